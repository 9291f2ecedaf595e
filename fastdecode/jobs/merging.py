"""Joins the outputs of a job's shards in the order of the input.

Answers stay on disk. Memory holds 20 bytes an answer, and about 50 at the peak.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np

from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.files import STANDARD, identity
from fastdecode.core.os_errors import explained
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs.formats import OpenAILines, SimpleLines
from fastdecode.jobs.lines import LineSink
from fastdecode.jobs.manifest import Manifest
from fastdecode.jobs.shard import Shard
from fastdecode.jobs.survey import OnLook, unseen
from fastdecode.openai.requests import RequestReader

TICK_LINES: Final = 10_000
SHOWN_SHARDS: Final = 10
MAX_LINES: Final = 1 << 48
_RESTORE: Final = "restore the file, or run its job again with --overwrite"


@dataclass(frozen=True)
class Merged:
    """Counts of the joined file."""

    num_answers: int
    num_failed: int
    """Answers that are errors."""
    num_missing: int
    """Lines without an answer."""


def merge(
    outputs: Sequence[Path], merged: Path, on_look: OnLook = unseen, *, partial: bool = False
) -> Merged:
    """Write the answers of all outputs into one file.

    Args:
        outputs: Outputs of ``fastdecode run-batch``, with their manifests beside them.
        merged: As ``LineSink`` takes it.
        partial: True if answers may be missing.

    Raises:
        ConfigError: If the outputs are not those of one job, answers are missing, a line is
            answered twice, or the joined file is one of the outputs or manifests.
        FastDecodeError: If the joined file can't be written (code ``output_failed``).
    """
    _check_apart(outputs, merged)
    manifests = [Manifest.read(Manifest.path_for(path.resolve())) for path in outputs]
    _check_one_job(outputs, manifests, partial=partial)
    numbers, owners, offsets = array("q"), array("i"), array("q")
    num_lines = num_failed = 0
    for owner, (path, manifest) in enumerate(zip(outputs, manifests, strict=True)):
        num_before = len(numbers)
        for number, failed, offset in _answers(path, manifest):
            numbers.append(number)
            owners.append(owner)
            offsets.append(offset)
            num_failed += failed
        num_read = len(numbers) - num_before
        if 0 < manifest.num_lines < num_read:
            raise ConfigError(
                f"{path} has {num_read} answers for {manifest.num_lines} lines: {_RESTORE}"
            )
        num_lines += manifest.num_lines or num_read
        on_look((owner + 1) / len(outputs) / 2, len(numbers))
    num_missing = num_lines - len(numbers)
    if num_missing and not partial:
        raise ConfigError(
            f"{num_missing} lines have no answer yet: go on with their jobs by --resume, or join "
            "what is there by --partial"
        )
    order = np.argsort(np.frombuffer(numbers, np.int64), kind="stable")
    twice = np.flatnonzero(np.diff(np.frombuffer(numbers, np.int64)[order]) == 0)
    if len(twice):
        raise ConfigError(
            f"line {numbers[order[twice[0]]]} is answered twice: the outputs were changed"
        )
    try:
        with (
            contextlib.ExitStack() as opened,
            _written_beside(merged) as beside,
            contextlib.closing(LineSink(beside)) as sink,
        ):
            files = [opened.enter_context(_opened(path)) for path in outputs]
            for count, place in enumerate(order, start=1):
                sink.write(_line_at(files[owners[place]], offsets[place], outputs[owners[place]]))
                if count % TICK_LINES == 0:
                    on_look(0.5 + count / len(order) / 2, len(order))
    except OSError as error:
        raise FastDecodeError(
            f"can't write the output file {merged}: {explained(error)}", code="output_failed"
        ) from None
    return Merged(len(numbers), num_failed, num_missing)


def _line_at(file: BufferedReader, offset: int, path: Path) -> bytes:
    """Return the line at an offset. Raises: ConfigError: If it can't be read, or was cut."""
    try:
        file.seek(offset)
        line = file.readline()
    except OSError as error:
        raise ConfigError(f"can't read the answers in {path}: {explained(error)}") from None
    if not line.endswith(b"\n"):
        raise ConfigError(
            f"can't read the answers in {path}: it was cut while it was read: restore it, and "
            "merge again"
        )
    return line


def _check_apart(outputs: Sequence[Path], merged: Path) -> None:
    """Raises: ConfigError: If writing the joined file would destroy an input."""
    if merged == STANDARD:
        return
    written = identity(merged), identity(_part_of(merged.resolve()))
    for output in outputs:
        for path in (output, Manifest.path_for(output.resolve())):
            if identity(path) in written:
                raise ConfigError(f"{path} is an input and the output: choose another --output")


def _check_one_job(
    outputs: Sequence[Path], manifests: Sequence[Manifest], *, partial: bool
) -> None:
    """Raises: ConfigError: If they are shards of several jobs, or some are missing."""
    first = manifests[0]
    count = Shard.of(first.shard).count
    seen: dict[str, Path] = {}
    for path, manifest in zip(outputs, manifests, strict=True):
        alike = replace(manifest, shard=first.shard, run_seed=first.run_seed)
        differences = first.differences(alike)
        if Shard.of(manifest.shard).count != count:
            differences.append(f"shard {first.shard} and shard {manifest.shard}")
        if differences:
            told = "\n".join(f"  {difference}" for difference in differences)
            raise ConfigError(f"{outputs[0]} and {path} are not of one job:\n{told}")
        if manifest.shard in seen:
            raise ConfigError(f"{seen[manifest.shard]} and {path} are both shard {manifest.shard}")
        seen[manifest.shard] = path
    missing = [f"{i}/{count}" for i in range(1, count + 1) if f"{i}/{count}" not in seen]
    if missing and not partial:
        more = ", ..." if len(missing) > SHOWN_SHARDS else ""
        raise ConfigError(
            f"{len(missing)} shard(s) are missing: {', '.join(missing[:SHOWN_SHARDS])}{more}: name "
            "their outputs, too, or join what is there by --partial"
        )


def _answers(path: Path, manifest: Manifest) -> Iterator[tuple[int, bool, int]]:
    """Yield each answer's line, True if it is an error, and its offset.

    An incomplete answer at the end counts as missing.

    Raises:
        ConfigError: If a line isn't an answer, or answers no line of the output's shard.
    """
    simple, openai = SimpleLines(SamplingParams()), RequestReader({}, (), False)
    is_openai = manifest.lines == OpenAILines.name
    lines = OpenAILines(openai, manifest.run_id) if is_openai else simple
    shard, offset = Shard.of(manifest.shard), 0
    with _opened(path) as file:
        for place, raw in enumerate(file, start=1):
            try:
                number, failed = lines.identify(json.loads(raw))
                if not raw.endswith(b"\n") or number > MAX_LINES:
                    raise ValueError
            except (KeyError, ValueError, TypeError, RecursionError):
                if not file.peek(1):
                    return
                raise ConfigError(
                    f"line {place} of {path} is no answer of the run in its manifest: {_RESTORE}"
                ) from None
            is_past = 0 < manifest.last_line < number
            if number < 1 or is_past or number not in shard:
                raise ConfigError(
                    f"line {place} of {path} answers line {number} of the input, which is not in "
                    f"shard {shard}: {_RESTORE}"
                )
            yield number, failed, offset
            offset += len(raw)


def _opened(path: Path) -> BufferedReader:
    """Raises: ConfigError: If the output can't be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"can't read the answers in {path}: {explained(error)}: mend that, and merge again"
        ) from None


@contextlib.contextmanager
def _written_beside(merged: Path) -> Iterator[Path]:
    """Yield where to write a file, which replaces the one of its name once it is whole. A pipe
    or device is written itself."""
    target = merged.resolve()
    if merged == STANDARD or (target.exists() and not target.is_file()):
        yield merged
        return
    part = _part_of(target)
    try:
        yield part
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _part_of(target: Path) -> Path:
    """Return the name of a file that isn't whole. It is compressed if the target is."""
    return target.with_name(target.name + (".part.gz" if target.suffix == ".gz" else ".part"))
