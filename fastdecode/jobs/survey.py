"""The first pass over a batch job's input: what is in it, which lines are bad,
and its hash. Memory stays flat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final, Literal, TypeAlias

from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.jobs.line_format import LineError, LineFormat, LineId, LineRequest
from fastdecode.jobs.line_set import DuplicateFinder, LineSet
from fastdecode.jobs.line_source import LineSource
from fastdecode.jobs.lines import LineReader, load_object, too_long
from fastdecode.jobs.shard import WHOLE, Shard
from fastdecode.openai.chat import Chat

if TYPE_CHECKING:
    from fastdecode.jobs.plain_lines import Shapes

# Kinds of bad lines that a refusal shows, by the first line of each.
MAX_COMPLAINTS = 20
# Lines that are read to find out which format a file has.
MAX_PROBED_LINES = 100
OPENAI_FIELDS = ("custom_id", "method", "url", "body")
SIMPLE_FIELDS = ("id", "prompt", "prompt_token_ids")
FAST_FROM: Final = 8 << 20
"""Bytes of a file from which on compiled code pays."""
_NUMBERS: Final = re.compile(r"\d+")
OnLook: TypeAlias = Callable[[float, int], object]
"""Gets the share of a file that was read, and how many lines."""


def unseen(share: float, num_lines: int) -> None:
    """An ``OnLook`` that shows nothing."""


@dataclass
class Survey:
    """What a file holds."""

    shard: Shard = WHOLE
    num_lines: int = 0
    """The shard's lines that aren't blank."""
    num_in_file: int = 0
    """All lines that aren't blank."""
    last_line: int = 0
    """The number of the last of them."""
    sha256: str = ""
    num_bytes: int = 0
    duplicates: LineSet = field(default_factory=LineSet)
    """Lines whose id an earlier line has."""
    bad: LineSet = field(default_factory=LineSet)
    """Lines that can't be answered, duplicates among them."""
    num_untokenizable: int = 0
    """Of those, the ones with text for which there is no tokenizer."""
    num_turns: int = 0
    """The shard's lines that are turns of conversations."""
    limits: Counter[int] = field(default_factory=Counter)
    """The shard's answers by the most tokens that they may get; 0: no limit but the model's."""
    complaints: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    """What is wrong, without its numbers: the first line with that, what is wrong with it,
    and how many lines have it."""

    def complain(self, number: int, named: str, problem: str) -> None:
        """Note that a line is bad. Lines whose problems differ only in numbers are one kind."""
        self.bad.add(number)
        kind = _NUMBERS.sub("", problem)
        new = number, f"line {number}{named}: {problem}", 0
        first, text, count = self.complaints.get(kind, new)
        if count or len(self.complaints) < MAX_COMPLAINTS:
            self.complaints[kind] = first, text, count + 1

    @property
    def is_refused(self) -> bool:
        """No line can be answered for want of a tokenizer."""
        return self.num_untokenizable > 0 and len(self.bad) == self.num_in_file

    def refusal(self, source: LineSource) -> ConfigError:
        """Why a job with such an input doesn't start."""
        if self.is_refused:
            return ConfigError(
                f"no line of {source} can be answered: {self.num_untokenizable} are text, but the "
                "model directory has no tokenizer.json; add the model's tokenizer.json, or give "
                "token ids",
                code="no_tokenizer",
            )
        num_bad = num_left = len(self.bad)
        shown = ""
        for _, text, count in sorted(self.complaints.values()):
            num_left -= count
            shown += f"\n  {text}" + (f" (and {count - 1} more like it)" if count > 1 else "")
        more = f"\n  and {num_left} more" if num_left else ""
        return ConfigError(
            f"{num_bad} of the {self.num_in_file} lines of {source} are bad; nothing was "
            f"run:{shown}{more}\n"
            f"mend them, or have each answered with its error by --on-error skip",
            code="invalid_input",
        )


def kind_of_lines(source: LineSource) -> Literal["openai", "simple"] | None:
    """The format that a file's first readable line has; None: neither.

    Raises:
        ConfigError: the file can't be read.
    """
    with source.open() as file:
        for _, (_, raw) in zip(range(MAX_PROBED_LINES), LineReader(file), strict=False):
            try:
                line = load_object(raw or b"", 0)
            except RequestError:
                continue
            if any(name in line for name in OPENAI_FIELDS):
                return "openai"
            return "simple" if any(name in line for name in SIMPLE_FIELDS) else None
    return None


@dataclass(frozen=True)
class SoundLine:
    """What is counted of a line that can be answered."""

    is_turn: bool
    num_answers: int
    most_tokens: int
    """That an answer can have; 0: there is no limit but the model's."""


def survey(
    source: LineSource,
    lines: LineFormat,
    *,
    takes_text: bool = True,
    shard: Shard = WHOLE,
    on_look: OnLook = unseen,
    fast_from: int = FAST_FROM,
) -> Survey:
    """Read a file from end to end, as the job will.

    Args:
        takes_text: the model has a tokenizer.
        shard: counts are of its lines; bad lines are those of the whole file.
        on_look: called after each block of a large file.
        fast_from: of a file of so many bytes, lines are parsed only where their
            shape is new (``plain_lines``).
    """
    looking = _Looking(lines, shard, takes_text=takes_text)
    found = looking.found
    with source.open() as file:
        is_large = source.num_bytes >= fast_from
        if is_large:
            reader = _look_fast(file, looking, lambda: on_look(source.share, found.num_in_file))
        else:
            reader = _look(file, looking)
    found.sha256, found.num_bytes = reader.sha256, reader.num_bytes
    _note_duplicates(found, looking.finder, lines)
    return found


class _Looking:
    """What a survey keeps while it reads."""

    def __init__(self, lines: LineFormat, shard: Shard, *, takes_text: bool) -> None:
        self.found = Survey(shard)
        self.finder = DuplicateFinder()
        self._lines = lines
        self._takes_text = takes_text

    def parse(self, number: int, raw: bytes | None) -> SoundLine | None:
        """A line; what is counted of each line of its shape; None: it is bad."""
        found = self.found
        found.num_in_file += 1
        found.last_line = number
        found.num_lines += number in found.shard
        line_id: LineId | None = None
        sound: SoundLine | None = None
        try:
            if raw is None:
                raise LineError(str(too_long(number)), code="line_too_long")
            request = self._lines.parse(raw, number)
            line_id = request.line_id
            if not self._takes_text:
                _refuse_text(found, request)
            sound = _sound(request)
            self.count(sound, number in found.shard)
        except LineError as error:
            line_id = error.line_id
            named = "" if line_id is None else f" ({line_id!r})"
            found.complain(number, named, f"{error.code}: {error}")
        if line_id is not None:
            self.finder.add(number, line_id)
        return sound

    def count(self, sound: SoundLine, num_lines: int) -> None:
        """So many sound lines of the shard."""
        self.found.num_turns += num_lines * sound.is_turn
        if num_lines:
            self.found.limits[sound.most_tokens] += num_lines * sound.num_answers


def _look(file: IO[bytes], looking: _Looking) -> LineReader:
    """Parse every line."""
    reader = LineReader(file)
    for number, raw in reader:
        looking.parse(number, raw)
    return reader


def _look_fast(file: IO[bytes], looking: _Looking, tick: Callable[[], object]) -> LineReader:
    """Parse one line of each shape, and count the others."""
    from fastdecode.jobs.plain_lines import Shapes  # compiled, or loaded, just now

    reader, shapes = LineReader(file), Shapes(looking.found.shard)
    learned: list[SoundLine] = []
    for block in reader.blocks():
        if block is None:
            shapes.number += 1
            looking.parse(shapes.number, None)
        else:
            _look_at(block, looking, shapes, learned)
        tick()
    for sound, num_lines in zip(learned, shapes.counts.tolist(), strict=True):
        looking.found.num_lines += num_lines
        looking.count(sound, num_lines)
    return reader


def _look_at(block: bytes, looking: _Looking, shapes: Shapes, learned: list[SoundLine]) -> None:
    """Whole lines."""
    found = looking.found
    for numbers, digests, stop in shapes.read(block):
        looking.finder.add_many(numbers, digests)
        found.num_in_file += len(numbers)
        found.last_line = int(numbers[-1]) if len(numbers) else found.last_line
        if stop is None:
            return
        sound = looking.parse(stop.number, block[stop.start : stop.end])
        if sound is not None and shapes.learn():
            learned.append(sound)


def _sound(request: LineRequest) -> SoundLine:
    params = request.params
    num_answers = len(request.prompts) * params.n
    return SoundLine(request.conversation_id is not None, num_answers, params.max_tokens or 0)


def _refuse_text(found: Survey, request: LineRequest) -> None:
    if any(isinstance(prompt, (str, Chat)) for prompt in request.prompts):
        found.num_untokenizable += 1
        text = "it is text, but the model directory has no tokenizer.json"
        raise LineError(text, code="no_tokenizer", line_id=request.line_id)


def _note_duplicates(found: Survey, finder: DuplicateFinder, lines: LineFormat) -> None:
    for number, first in finder.find().tolist():
        found.duplicates.add(number)
        if number not in found.bad:
            text = f"its {lines.id_field} was used by line {first}: give each line one of its own"
            found.complain(number, "", f"{lines.duplicate_code}: {text}")
