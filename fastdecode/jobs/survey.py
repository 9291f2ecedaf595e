"""The first pass over a batch job's input: what is in it, which lines are bad,
and its hash. Memory stays flat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from fastdecode.core.errors import ConfigError
from fastdecode.jobs.line_format import LineError, LineFormat, LineId, LineRequest
from fastdecode.jobs.line_set import DuplicateFinder, LineSet
from fastdecode.jobs.lines import LineReader, too_long
from fastdecode.openai.chat import Chat

# Bad lines that are told one by one.
MAX_COMPLAINTS = 20
# Lines that are read to find out which format a file has.
MAX_PROBED_LINES = 100
OPENAI_FIELDS = ("custom_id", "method", "url", "body")


@dataclass
class Survey:
    """What a file holds."""

    num_lines: int = 0
    """Lines that aren't blank."""
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
    """Lines that are turns of conversations."""
    most_tokens: int = 0
    """Tokens that all answers together can have, without lines that name no limit."""
    complaints: list[tuple[int, str]] = field(default_factory=list)
    """(line number, what is wrong) of the first bad lines."""

    @property
    def is_refused(self) -> bool:
        """No line can be answered for want of a tokenizer."""
        return self.num_untokenizable > 0 and len(self.bad) == self.num_lines

    def refusal(self, path: Path) -> ConfigError:
        """Why a job with such an input doesn't start."""
        if self.is_refused:
            return no_tokenizer(path, self.num_untokenizable)
        shown = "\n".join(f"  {text}" for _, text in sorted(self.complaints)[:MAX_COMPLAINTS])
        num_bad = len(self.bad)
        more = "" if num_bad <= MAX_COMPLAINTS else f"\n  and {num_bad - MAX_COMPLAINTS} more"
        return ConfigError(
            f"{num_bad} of the {self.num_lines} lines of {path} are bad; nothing was "
            f"run:\n{shown}{more}\n"
            f"mend them, or have each answered with its error by --on-error skip",
            code="invalid_input",
        )


def no_tokenizer(path: Path, num_lines: int) -> ConfigError:
    """Why a file of texts isn't given to a model that takes only token ids."""
    return ConfigError(
        f"no line of {path} can be answered: {num_lines} are text, but the model directory has no "
        "tokenizer.json; "
        f"add the model's tokenizer.json, or give token ids",
        code="no_tokenizer",
    )


def is_openai(path: Path) -> bool:
    """Whether a file looks like OpenAI batch lines; decided by its first
    readable line, and OpenAI's if there is none.

    Raises:
        ConfigError: the file can't be read.
    """
    with path.open("rb") as file:
        for _, (_, raw) in zip(range(MAX_PROBED_LINES), LineReader(file), strict=False):
            try:
                line = json.loads(raw or b"")
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                return "id" not in line or any(name in line for name in OPENAI_FIELDS)
    return True


def survey(path: Path, lines: LineFormat, *, takes_text: bool = True) -> Survey:
    """Read a file from end to end, as the job will.

    Args:
        takes_text: the model has a tokenizer.
    """
    found = Survey()
    finder = DuplicateFinder()
    with path.open("rb") as file:
        reader = LineReader(file)
        for number, raw in reader:
            found.num_lines += 1
            found.last_line = number
            line_id: LineId | None = None
            try:
                if raw is None:
                    raise LineError(str(too_long(number)), code="line_too_long")
                request = lines.parse(raw, number)
                line_id = request.line_id
                found.num_turns += request.conversation_id is not None
                found.most_tokens += most_tokens(request)
                if not takes_text:
                    _refuse_text(found, request)
            except LineError as error:
                line_id = error.line_id
                _complain(found, number, line_id, error.code, str(error))
            if line_id is not None:
                finder.add(number, line_id)
    found.sha256, found.num_bytes = reader.sha256, reader.num_bytes
    _note_duplicates(found, finder, lines)
    return found


def most_tokens(request: LineRequest) -> int:
    """Tokens that a line's answers can have; 0: there is no limit but the model's."""
    params = request.params
    return len(request.prompts) * params.n * (params.max_tokens or 0)


def _refuse_text(found: Survey, request: LineRequest) -> None:
    if any(isinstance(prompt, (str, Chat)) for prompt in request.prompts):
        found.num_untokenizable += 1
        text = "it is text, but the model directory has no tokenizer.json"
        raise LineError(text, code="no_tokenizer", line_id=request.line_id)


def _note_duplicates(found: Survey, finder: DuplicateFinder, lines: LineFormat) -> None:
    for place, (number, first) in enumerate(finder.find().tolist()):
        found.duplicates.add(number)
        if number not in found.bad and place < MAX_COMPLAINTS:
            text = f"its {lines.id_field} was used by line {first}: give each line one of its own"
            found.complaints.append((number, f"line {number}: {lines.duplicate_code}: {text}"))
        found.bad.add(number)


def _complain(found: Survey, number: int, line_id: LineId | None, code: str, problem: str) -> None:
    found.bad.add(number)
    if len(found.complaints) < MAX_COMPLAINTS:
        named = "" if line_id is None else f" ({line_id!r})"
        found.complaints.append((number, f"line {number}{named}: {code}: {problem}"))
