"""Step events as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

The file is a JSON array with a line per event, written as they happen. The format allows the
closing bracket to be missing, so the file of a killed run is readable. Rows:

* **S-worker**: a row per lane with its S-steps (``S 3`` ends at the attention of layer 3),
  ``logits`` and ``sample``, and a row with its waits.
* **R-workers**: a row each, with the attention it computed (``L3``).
* counters: sequences running and waiting, cached tokens (W).

An R-worker reports how long it computed, not when. It computes in the order of arrival, so a span
begins when its q, k, v were sent, or when the worker's previous span ended. Over a network it ran
later by the time of the transfer. ``round_trip_us`` is from sending to reading the answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeAlias

from fastdecode.core.files import open_output
from fastdecode.core.trace import Trace

logger = logging.getLogger(__name__)

MAX_TRACE_BYTES = 1 << 30  # viewers open no larger trace: it stops there, and the run continues

S_WORKER = 1
R_WORKERS = 2
WAIT_ROW = 0
FIRST_LANE_ROW = 1

_Row: TypeAlias = tuple[int, int, str]  # process, number and name


class ChromeTrace:
    """Writes events to a buffered file. If writing fails, it warns once, and the run continues.
    ``start_s`` is time zero, of ``time.perf_counter``."""

    def __init__(self, out: IO[bytes], start_s: float, max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._out: IO[bytes] | None = out
        self._start_s, self._room = start_s, max_bytes
        self._rows: set[_Row] = set()
        self._free_s: dict[int, float] = {}  # end of each R-worker's last span
        self._write(b"[\n")
        for process, name in ((S_WORKER, "S-worker"), (R_WORKERS, "R-workers")):
            self._event("M", "process_name", process, tid=0, args={"name": name})

    def s_part(self, lane: int, step: int, layer: int | None, start_s: float, end_s: float) -> None:
        name = "logits" if layer is None else f"S {layer}"
        self._span(name, _lane_row(lane), start_s, end_s, step=step)

    def sampled(self, lane: int, step: int, num_tokens: int, start_s: float, end_s: float) -> None:
        self._span("sample", _lane_row(lane), start_s, end_s, step=step, tokens=num_tokens)

    def waited(self, start_s: float, end_s: float) -> None:
        self._span("wait", (S_WORKER, WAIT_ROW, "wait for R-workers"), start_s, end_s)

    def attended(
        self,
        worker: int,
        lane: int,
        step: int,
        layer: int,
        sent_s: float,
        arrived_s: float,
        compute_s: float,
    ) -> None:
        start_s = max(sent_s, self._free_s.get(worker, sent_s))
        end_s = self._free_s[worker] = start_s + compute_s
        row, trip_us = (R_WORKERS, worker, f"R-worker {worker}"), _microseconds(arrived_s - sent_s)
        self._span(f"L{layer}", row, start_s, end_s, step=step, lane=lane, round_trip_us=trip_us)

    def load(self, at_s: float, num_running: int, num_waiting: int, num_cached_tokens: int) -> None:
        at, sequences = at_s - self._start_s, {"running": num_running, "waiting": num_waiting}
        for name, args in (("sequences", sequences), ("cached tokens W", {"W": num_cached_tokens})):
            self._event("C", name, S_WORKER, ts=_microseconds(at), args=args)

    def close(self) -> None:
        """End the array. The file belongs to the caller."""
        if self._out is not None:
            # Every event ends in a comma, and JSON wants a last one without.
            self._room = max(self._room, 1 << 10)
            now = _microseconds(time.perf_counter() - self._start_s)
            end = {"ph": "i", "name": "end", "s": "g", "pid": S_WORKER, "tid": 0, "ts": now}
            self._write(_line(end)[:-2] + b"\n]\n")
            self._out = None

    def _span(self, name: str, row: _Row, start_s: float, end_s: float, **args: object) -> None:
        process, number, row_name = row
        if row not in self._rows:
            self._rows.add(row)
            self._event("M", "thread_name", process, tid=number, args={"name": row_name})
        start, dur = _microseconds(start_s - self._start_s), _microseconds(end_s - start_s)
        self._event("X", name, process, tid=number, ts=start, dur=dur, args=args)

    def _event(self, phase: str, name: str, process: int, **more: object) -> None:
        self._write(_line({"ph": phase, "name": name, "pid": process, **more}))

    def _write(self, data: bytes) -> None:
        if self._out is None:
            return
        if len(data) > self._room:
            logger.warning(
                "the trace has reached its greatest size; the rest of the run isn't in it"
            )
            self.close()
            return
        self._room -= len(data)
        try:
            self._out.write(data)
        except OSError as error:
            logger.warning("the trace ends here, its file can't be written: %s", error.strerror)
            self._out = None


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[Trace | None]:
    """Open a trace into a file, which replaces an existing one. Without a path, trace nothing.
    Raises ConfigError: If the file can't be written."""
    if path is None:
        yield None
        return
    out = os.fdopen(open_output(path, "trace"), "wb", buffering=1 << 16)
    trace = ChromeTrace(out, time.perf_counter())
    try:
        yield trace
    finally:
        trace.close()
        with contextlib.suppress(OSError):
            out.close()


def _lane_row(lane: int) -> _Row:
    return S_WORKER, FIRST_LANE_ROW + lane, f"lane {lane}"


def _line(event: dict[str, object]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b",\n"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
