"""The first pass over a job's input: its lines, the bad ones, and its hash. Memory stays flat."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.jobs.formats import OPENAI_FIELDS, LineError, LineFormat, load_object, shape_of
from fastdecode.jobs.lines import WHOLE, DuplicateFinder, LineId, LineSet, LineSource, Shard
from fastdecode.text.chats import Chat

MAX_COMPLAINTS = 20
"""Kinds of bad lines that a refusal shows, by the first line of each."""
MAX_PROBED_LINES = 100  # lines that are read to find out a file's format
SIMPLE_FIELDS = ("id", "prompt", "prompt_token_ids")
MAX_SHAPES: Final = 8192
MAX_SHAPE_BYTES: Final = 4096
"""Longest shape that is remembered."""
TICK_LINES: Final = 10_000
_NUMBERS: Final = re.compile(r"\d+")
OnLook: TypeAlias = Callable[[float, int], object]
"""Gets the share of the work that is done, and the number of lines."""


def unseen(share: float, num_lines: int) -> None:
    """An ``OnLook`` that shows nothing."""


@dataclass
class Survey:
    """Content of a file."""

    shard: Shard = WHOLE
    num_lines: int = 0  # of the shard, blank ones left out
    num_in_file: int = 0  # of the file, blank ones left out
    last_line: int = 0  # number of the last of them
    sha256: str = ""
    duplicates: LineSet = field(default_factory=LineSet)  # lines whose id an earlier line has
    bad: LineSet = field(default_factory=LineSet)
    """Lines that can't be answered, duplicates among them."""
    num_untokenizable: int = 0  # bad lines with text, for which there is no tokenizer
    num_turns: int = 0  # the shard's lines that are turns of conversations
    complaints: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    """Problem without its numbers → first line with it, its text, and the number of lines."""

    def complain(self, number: int, line_id: LineId | None, problem: str) -> None:
        """Note that a line is bad. Lines whose problems differ only in numbers are one kind."""
        self.bad.add(number)
        named = "" if line_id is None else f" ({line_id!r})"
        kind = _NUMBERS.sub("", problem)
        new = number, f"line {number}{named}: {problem}", 0
        first, text, count = self.complaints.get(kind, new)
        if count or len(self.complaints) < MAX_COMPLAINTS:
            self.complaints[kind] = first, text, count + 1

    @property
    def is_refused(self) -> bool:
        """True if no line can be answered without a tokenizer."""
        return self.num_untokenizable > 0 and len(self.bad) == self.num_in_file

    def refusal(self, source: LineSource) -> ConfigError:
        """Return why a job with such an input doesn't start."""
        if self.is_refused:
            return ConfigError(
                f"no line of {source} can be answered: {self.num_untokenizable} are text, but the "
                "model directory has no tokenizer.json; add the model's tokenizer.json, or give "
                "token ids",
                code="no_tokenizer",
            )
        num_left, shown = len(self.bad), ""
        for _, text, count in sorted(self.complaints.values()):
            num_left -= count
            shown += f"\n  {text}" + (f" (and {count - 1} more like it)" if count > 1 else "")
        more = f"\n  and {num_left} more" if num_left else ""
        return ConfigError(
            f"{len(self.bad)} of the {self.num_in_file} lines of {source} are bad; nothing was "
            f"run:{shown}{more}\n"
            f"correct them, or have each answered with its error: --on-error skip",
            code="invalid_input",
        )


def kind_of_lines(source: LineSource) -> Literal["openai", "simple"] | None:
    """Return the format of a file's first readable line. None if it is neither."""
    with source.open() as reader:
        for _, raw in itertools.islice(reader, MAX_PROBED_LINES):
            try:
                line = load_object(raw, 0)
            except RequestError:
                continue
            if any(name in line for name in OPENAI_FIELDS):
                return "openai"
            return "simple" if any(name in line for name in SIMPLE_FIELDS) else None
    return None


def survey(
    source: LineSource,
    lines: LineFormat,
    *,
    takes_text: bool = True,
    shard: Shard = WHOLE,
    on_look: OnLook = unseen,
) -> Survey:
    """Read a file from end to end, as the job will. Lines of a shape that was checked before are
    not checked again (``shape_of``).

    Args:
        takes_text: True if the model has a tokenizer.
        shard: The counts are of its lines. Bad lines are those of the whole file.
    """
    found, finder = Survey(shard), DuplicateFinder()
    checked: dict[bytes, bool] = {}
    with source.open() as reader:
        for number, raw in reader:
            found.num_in_file += 1
            found.last_line = number
            line_id, shape = (None, None) if raw is None else shape_of(raw)
            is_turn = None if shape is None else checked.get(shape)
            if is_turn is None:
                line_id, is_turn = _check(found, lines, number, raw, takes_text=takes_text)
                has_room = len(checked) < MAX_SHAPES
                if shape and is_turn is not None and has_room and len(shape) <= MAX_SHAPE_BYTES:
                    checked[shape] = is_turn
            if line_id is not None:
                finder.add(number, line_id)
            if number in shard:
                found.num_lines += 1
                found.num_turns += bool(is_turn)
            if found.num_in_file % TICK_LINES == 0:
                on_look(source.share, found.num_in_file)
    found.sha256 = reader.sha256
    for number, first in finder.find():
        found.duplicates.add(number)
        if number not in found.bad:
            text = f"its {lines.id_field} was used by line {first}: give each line one of its own"
            found.complain(number, None, f"duplicate_{lines.id_field}: {text}")
    return found


def _check(
    found: Survey, lines: LineFormat, number: int, raw: bytes | None, *, takes_text: bool
) -> tuple[LineId | None, bool | None]:
    """Parse a line. Return its id, if it has one, and if it is a turn. None if it is bad."""
    try:
        request = lines.parse(raw, number)
    except LineError as error:
        found.complain(number, error.line_id, f"{error.code}: {error}")
        return error.line_id, None
    if not takes_text and any(isinstance(each, (str, Chat)) for each in request.prompts):
        found.num_untokenizable += 1
        why = "no_tokenizer: it is text, but the model directory has no tokenizer.json"
        found.complain(number, request.line_id, why)
        return request.line_id, None
    return request.line_id, request.conversation_id is not None
