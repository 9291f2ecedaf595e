"""Joins the outputs of a job's shards in the order of the input. Answers stay on
disk; memory holds their places, about 64 bytes an answer at the peak."""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.files import STANDARD, identity
from fastdecode.core.os_errors import explained
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs.line_sink import LineSink
from fastdecode.jobs.manifest import Manifest
from fastdecode.jobs.openai_lines import ID_PREFIX, OpenAILines
from fastdecode.jobs.shard import Shard
from fastdecode.jobs.simple_lines import SimpleLines
from fastdecode.jobs.survey import OnLook, unseen
from fastdecode.openai.requests import RequestReader

TICK_LINES: Final = 10_000
SHOWN_SHARDS: Final = 10
MOST_LINES: Final = 1 << 48
"""Numbers of lines are not above it."""
_STRING: Final = rb'"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True)
class Merged:
    """What the joined file holds."""

    num_answers: int
    num_failed: int
    """Of those, errors."""
    num_missing: int
    """Lines without an answer."""


@dataclass(frozen=True)
class _Answers:
    """Of one output: the lines that its answers are for, and where they begin."""

    path: Path
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_failed: int


def merge(
    outputs: Sequence[Path], merged: Path, on_look: OnLook = unseen, *, partial: bool = False
) -> Merged:
    """Write the answers of all outputs into one file.

    Args:
        outputs: of ``fastdecode run-batch``, with their manifests in the same directories.
        merged: as ``LineSink`` takes it.
        on_look: gets the share of the work that is done, and how many answers were read.
        partial: answers may be missing.

    Raises:
        ConfigError: the outputs are not those of one job; answers are missing,
            or a line is answered twice; the joined file is one of the outputs or
            manifests.
        FastDecodeError: (code ``output_failed``) the joined file can't be written.
    """
    _check_apart(outputs, merged)
    manifests = [Manifest.read(Manifest.path_for(path.resolve())) for path in outputs]
    _check_one_job(outputs, manifests, partial=partial)
    found, num_read = [], 0
    for place, (path, manifest) in enumerate(zip(outputs, manifests, strict=True)):
        found.append(_index(path, manifest))
        num_read += len(found[-1].numbers)
        on_look((place + 1) / len(outputs) / 2, num_read)
    num_missing = sum(m.num_lines or len(f.numbers) for m, f in zip(manifests, found, strict=True))
    num_missing -= num_read
    if num_missing and not partial:
        raise ConfigError(
            f"{num_missing} lines have no answer yet: go on with their jobs by --resume, or join "
            "what is there by --partial"
        )
    _write(found, merged, on_look)
    return Merged(num_read, sum(one.num_failed for one in found), num_missing)


def _check_apart(outputs: Sequence[Path], merged: Path) -> None:
    """Raises ConfigError: writing the joined file would destroy an input."""
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
    """Raises ConfigError: they are shards of several jobs, or some are missing."""
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


def _index(path: Path, manifest: Manifest) -> _Answers:
    """What an output holds; a torn answer at its end counts as missing."""
    identify = _Identify(manifest)
    numbers, offsets = array("q"), array("q")
    offset = num_failed = 0
    with _opened(path) as file:
        for raw in file:
            told = identify(raw)
            if told is not None and told[0] <= MOST_LINES:
                numbers.append(told[0])
                offsets.append(offset)
                num_failed += told[1]
            elif file.peek(1):
                raise ConfigError(
                    f"line {len(numbers) + 1} of {path} is no answer of the run in its manifest: "
                    "restore the file, or run its job again with --overwrite"
                )
            offset += len(raw)
    found = _Answers(
        path, np.frombuffer(numbers, np.int64), np.frombuffer(offsets, np.int64), num_failed
    )
    _check_lines(found, manifest)
    return found


def _check_lines(found: _Answers, manifest: Manifest) -> None:
    """Raises ConfigError: an answer is for no line of the output's shard, or there
    are more answers than lines."""
    numbers, shard = found.numbers, Shard.of(manifest.shard)
    is_other = (numbers < 1) | (numbers % shard.count != shard.index % shard.count)
    if manifest.last_line:
        is_other |= numbers > manifest.last_line
    others = np.flatnonzero(is_other)
    if len(others):
        place = others[0]
        why = f"line {place + 1} of {found.path} answers line {numbers[place]} of the input, "
        why += f"which is not in shard {shard}"
    elif manifest.num_lines and len(numbers) > manifest.num_lines:
        why = f"{found.path} has {len(numbers)} answers for {manifest.num_lines} lines"
    else:
        return
    raise ConfigError(f"{why}: restore the file, or run its job again with --overwrite")


class _Identify:
    """Finds which line an answer is for, and whether it is an error: by its first
    bytes, as jobs write them, or else by parsing it."""

    def __init__(self, manifest: Manifest) -> None:
        self._lines: OpenAILines | SimpleLines
        if manifest.lines == OpenAILines.name:
            self._lines = OpenAILines(RequestReader({}, (), False), manifest.run_id)
            head = f'{{"id": "{ID_PREFIX}_{manifest.run_id}_'.encode()
            pattern = re.escape(head) + rb'(\d+)", "custom_id": (?:null|' + _STRING
            self._pattern = re.compile(pattern + rb'), "response": \{"status_code": ([45])?')
        else:
            self._lines = SimpleLines(SamplingParams())
            pattern = rb'\{"id": (?:null|-?\d+|' + _STRING
            self._pattern = re.compile(pattern + rb'), "line": (\d+), "(error")?')

    def __call__(self, raw: bytes) -> tuple[int, bool] | None:
        """None: it is no answer."""
        match = self._pattern.match(raw)
        if match is not None and raw.endswith(b"}\n"):
            return int(match[1]), match[2] is not None
        try:
            answer: dict[str, Any] = json.loads(raw)
            return self._lines.identify(answer) if raw.endswith(b"\n") else None
        except (KeyError, ValueError, TypeError, RecursionError):
            return None


def _write(found: Sequence[_Answers], merged: Path, on_look: OnLook) -> None:
    numbers = np.concatenate([one.numbers for one in found])
    owners = np.repeat(np.arange(len(found)), [len(one.numbers) for one in found])
    offsets = np.concatenate([one.offsets for one in found])
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if len(twice):
        raise ConfigError(
            f"line {numbers[order][twice[0]]} is answered twice: the outputs were changed"
        )
    try:
        with _written_beside(merged) as path, contextlib.closing(LineSink(path)) as sink:
            for place, line in enumerate(_lines(found, owners, offsets, order), start=1):
                sink.write(line)
                if place % TICK_LINES == 0:
                    on_look(0.5 + place / len(order) / 2, len(order))
    except OSError as error:
        raise FastDecodeError(
            f"can't write the output file {merged}: {explained(error)}", code="output_failed"
        ) from None


@contextlib.contextmanager
def _written_beside(merged: Path) -> Iterator[Path]:
    """Where to write a file, which replaces the one of its name once it is whole; a
    pipe or device is written itself."""
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
    """The name of a file that isn't whole; compressed if the target is."""
    return target.with_name(target.name + (".part.gz" if target.suffix == ".gz" else ".part"))


def _lines(
    found: Sequence[_Answers],
    owners: NDArray[np.int64],
    offsets: NDArray[np.int64],
    order: NDArray[np.int64],
) -> Iterator[bytes]:
    """The answers in this order.

    Raises:
        ConfigError: an output can't be read, or has become shorter.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_opened(one.path)) for one in found]
        for k in _in_pieces(order):
            file = files[owners[k]]
            try:
                file.seek(offsets[k])
                line = file.readline()
            except OSError as error:
                raise _unreadable(found[owners[k]].path, explained(error)) from None
            if not line.endswith(b"\n"):
                raise _unreadable(found[owners[k]].path, "it was cut while it was read")
            yield line


def _opened(path: Path) -> BufferedReader:
    """Raises ConfigError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, explained(error)) from None


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"can't read the answers in {path}: {why}: mend that, and merge again")


def _in_pieces(order: NDArray[np.int64]) -> Iterator[int]:
    """Its elements, as Python's integers, without a list of all of them."""
    for begin in range(0, len(order), TICK_LINES):
        yield from order[begin : begin + TICK_LINES].tolist()
