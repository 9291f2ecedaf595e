"""Joins the outputs of a job's shards in the order of the input.

Answers stay on disk. Memory holds 16 bytes an answer, and about 45 at the peak.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.files import STANDARD, identity
from fastdecode.core.os_errors import explained
from fastdecode.jobs.formats import identifier
from fastdecode.jobs.journal import RESTORE, read_answers, writing
from fastdecode.jobs.lines import LineSink, Shard
from fastdecode.jobs.manifest import Manifest
from fastdecode.jobs.survey import OnLook, unseen

TICK_LINES: Final = 10_000
SHOWN_SHARDS: Final = 10
_PART: Final = ".part"  # suffix of a file that is not whole yet


@dataclass(frozen=True)
class Merged:
    num_answers: int
    num_failed: int  # answers that are errors
    num_missing: int  # lines of the outputs' shards without an answer
    missing_shards: int  # shards without an output


def merge(
    outputs: Sequence[Path], merged: Path, on_look: OnLook = unseen, *, partial: bool = False
) -> Merged:
    """Write the answers of all outputs into one file. If ``partial``, some may be missing. Raises
    ConfigError: If the outputs are not those of one job, answers are missing, a line is answered
    twice, or the joined file is one of the outputs or manifests. FastDecodeError: If the joined
    file can't be written (code ``output_failed``)."""
    _check_apart(outputs, merged)
    manifests = [Manifest.read(Manifest.path_for(path.resolve())) for path in outputs]
    missing_shards = _check_one_job(outputs, manifests, partial=partial)
    numbers, offsets, num_failed = array("q"), array("q"), 0
    for count, (path, manifest) in enumerate(zip(outputs, manifests, strict=True), start=1):
        num_failed += _read(path, manifest, numbers, offsets)
        on_look(count / len(outputs) / 2, len(numbers))
    num_missing = sum(each.num_lines for each in manifests) - len(numbers)
    if num_missing and not partial:
        raise ConfigError(
            f"{num_missing} lines have no answer yet: continue their jobs with --resume, or "
            "join the others with --partial"
        )
    order = np.argsort(np.frombuffer(numbers, np.int64), kind="stable")
    twice = np.flatnonzero(np.diff(np.frombuffer(numbers, np.int64)[order]) == 0)
    if len(twice):
        raise ConfigError(
            f"line {numbers[order[twice[0]]]} is answered twice: the outputs were changed"
        )
    shards = [Shard.of(manifest.shard) for manifest in manifests]
    owners = {shard.index % shard.count: owner for owner, shard in enumerate(shards)}
    places = ((owners[numbers[at] % shards[0].count], offsets[at]) for at in order)
    _write(merged, _lines_at(places, outputs), len(numbers), on_look)
    return Merged(len(numbers), num_failed, num_missing, missing_shards)


def _read(path: Path, manifest: Manifest, numbers: array[int], offsets: array[int]) -> int:
    """Add each answer's line, and its place in the file. Return how many are errors."""
    offset, num_failed, num_before = 0, 0, len(numbers)
    identify = identifier(manifest.lines, manifest.run_id)
    shard = Shard.of(manifest.shard)
    for number, failed, raw in read_answers(path, identify, manifest.last_line, shard):
        numbers.append(number)
        offsets.append(offset)
        offset += len(raw)
        num_failed += failed
    num_read = len(numbers) - num_before
    if num_read > manifest.num_lines:
        raise ConfigError(
            f"{path} has {num_read} answers for {manifest.num_lines} lines: {RESTORE}"
        )
    return num_failed


def _write(merged: Path, lines: Iterable[bytes], num_lines: int, on_look: OnLook) -> None:
    """Write lines to a file, which replaces the one of its name once it is whole. A pipe or device
    is written itself."""
    target = merged.resolve()
    is_direct = merged == STANDARD or (target.exists() and not target.is_file())
    beside = merged if is_direct else target.with_name(target.name + _PART)
    with writing(merged), contextlib.ExitStack() as undo:
        if not is_direct:
            undo.callback(beside.unlink, missing_ok=True)
        with contextlib.closing(LineSink(beside, merged.suffix == ".gz")) as sink:
            for count, line in enumerate(lines, start=1):
                sink.write(line)
                if count % TICK_LINES == 0:
                    on_look(0.5 + count / num_lines / 2, num_lines)
        if not is_direct:
            beside.replace(target)


def _lines_at(places: Iterable[tuple[int, int]], outputs: Sequence[Path]) -> Iterator[bytes]:
    """Yield the line at each place, an output's index and an offset. Raises ConfigError."""
    with contextlib.ExitStack() as opened:
        try:
            files = [opened.enter_context((path := each).open("rb")) for each in outputs]
            for owner, offset in places:
                path = outputs[owner]
                files[owner].seek(offset)
                line = files[owner].readline()
                if not line.endswith(b"\n"):
                    raise OSError("it was cut while it was read: restore it, and merge again")
                yield line
        except OSError as error:
            raise ConfigError(f"can't read the answers in {path}: {explained(error)}") from None


def _check_apart(outputs: Sequence[Path], merged: Path) -> None:
    """Raises: ConfigError: If writing the joined file would destroy an input."""
    if merged == STANDARD:
        return
    target = merged.resolve()
    written = identity(target), identity(target.with_name(target.name + _PART))
    for output in outputs:
        for path in (output, Manifest.path_for(output.resolve())):
            if identity(path) in written:
                raise ConfigError(f"{path} is an input and the output: choose another --output")


def _check_one_job(outputs: Sequence[Path], manifests: Sequence[Manifest], *, partial: bool) -> int:
    """Return the number of missing shards. Raises ConfigError: If outputs don't form one job."""
    first = manifests[0]
    count = Shard.of(first.shard).count
    seen: dict[str, Path] = {}
    for path, manifest in zip(outputs, manifests, strict=True):
        alike = replace(manifest, shard=first.shard, run_seed=first.run_seed)
        differences = first.differences(alike)
        if Shard.of(manifest.shard).count != count:
            differences.append(f"shard {first.shard} and shard {manifest.shard}")
        if differences:
            listed = "\n".join(f"  {difference}" for difference in differences)
            raise ConfigError(f"{outputs[0]} and {path} are not of one job:\n{listed}")
        if manifest.shard in seen:
            raise ConfigError(f"{seen[manifest.shard]} and {path} are both shard {manifest.shard}")
        seen[manifest.shard] = path
    missing = [f"{i}/{count}" for i in range(1, count + 1) if f"{i}/{count}" not in seen]
    if missing and not partial:
        more = ", ..." if len(missing) > SHOWN_SHARDS else ""
        raise ConfigError(
            f"{len(missing)} shard(s) are missing: {', '.join(missing[:SHOWN_SHARDS])}{more}: name "
            "their outputs, too, or join the others with --partial"
        )
    return len(missing)
