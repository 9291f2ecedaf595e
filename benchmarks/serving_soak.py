"""A server under a mixed load for a long time: streams and whole answers of all
lengths, clients that leave, bodies that are wrong, a reader who takes a byte a
second. Each minute: times, memory, descriptors and threads of both processes;
at the end no request, KV block, task or descriptor may be left, and memory of
the last half be flat.

    python benchmarks/serving_soak.py --soak-minutes 30 --out benchmarks/results/serving.json

Exit code: 0 all kept what they promise; 1 see ``broken``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import provenance
from serving import SlowReader, note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from server_process import FASTDECODE, Server, serving

from fastdecode.measure.serving.client import Endpoint, Record
from fastdecode.measure.serving.load import FIRST_TOKEN, Planned

MOST_GROWTH = 0.02
PROCESSES = ("http", "engine")
NUM_POOLED = 4
"""Threads that the HTTP process begins when they are first needed."""


@dataclass
class Minute:
    """What happened in it."""

    records: list[Record] = field(default_factory=list)
    num_left: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """Of wrong bodies and whole answers."""
    seen: dict[str, dict[str, int]] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        done = [record for record in self.records if record.error is None]
        tpots = [record.tpot_s for record in done if record.tpot_s is not None]
        return {
            "answered": len(done),
            "errors": sorted({str(r.error) for r in self.records if r.error is not None}),
            "left": self.num_left,
            "statuses": dict(sorted(self.statuses.items())),
            "output_tokens": sum(record.num_tokens for record in done),
            "ttft_p50_ms": _median_ms([record.ttft_s for record in done]),
            "tpot_p50_ms": _median_ms(tpots),
            **self.seen,
        }


def _median_ms(values: list[float]) -> float | None:
    return statistics.median(values) * 1e3 if values else None


class Load:
    """Some clients, each of which does one thing after the other, drawn."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._endpoint = Endpoint(server.url)
        self._options = options
        self.minute = Minute()

    async def run(self, until_s: float) -> None:
        """Until then by ``time.monotonic``, and what had begun by then."""
        clients = [self._client(i, until_s) for i in range(self._options.concurrency)]
        await asyncio.gather(*clients)

    async def _client(self, number: int, until_s: float) -> None:
        random_ = random.Random(f"{self._options.seed}.{until_s}.{number}")
        acts: list[Callable[[random.Random], Any]] = [
            *[self._stream] * 12, *[self._leave] * 5, *[self._whole] * 2, self._wrong,
        ]  # fmt: skip
        while time.monotonic() < until_s:
            await random_.choice(acts)(random_)

    async def _stream(self, random_: random.Random) -> None:
        planned = self._planned(random_)
        self.minute.records.append(await self._endpoint.run(planned, "checkpoint", 0.0))

    async def _leave(self, random_: random.Random) -> None:
        run = self._endpoint.run(self._planned(random_), "checkpoint", 0.0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(run, random_.uniform(0, 0.5))
        self.minute.num_left += 1

    async def _whole(self, random_: random.Random) -> None:
        planned = self._planned(random_)
        body = {"prompt": list(planned.prompt), "max_tokens": planned.output_tokens, "n": 2}
        await self._ask(json.dumps(body).encode(), 200)

    async def _wrong(self, random_: random.Random) -> None:
        bodies = (b"{", b'{"prompt": [-1]}', b'{"prompt": [1], "x": 1}', b"[" * 10_000)
        await self._ask(random_.choice(bodies), 400)

    async def _ask(self, body: bytes, expected: int) -> None:
        status = await asyncio.to_thread(_status, self._server, body)
        self.minute.statuses[status] = self.minute.statuses.get(status, 0) + 1
        if status != expected:
            self.minute.records.append(Record(0.0, error=f"status {status}, not {expected}"))

    def _planned(self, random_: random.Random) -> Planned:
        prompt = [random_.randrange(FIRST_TOKEN, 1000) for _ in range(random_.randrange(1, 200))]
        return Planned(0.0, tuple(prompt), random_.randrange(1, 100))


def _status(server: Server, body: bytes) -> int:
    try:
        return server.ask("POST", "/v1/completions", body, timeout_s=300)[0]
    except (OSError, http.client.HTTPException):
        return 0


def look(server: Server) -> dict[str, dict[str, int]]:
    """Memory, descriptors and threads; tasks of the HTTP process's event loop."""
    seen = {}
    for name in PROCESSES:
        process = server.process(name)
        seen[name] = {
            "rss": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
        }
    seen["http"]["tasks"] = int(server.status()["num_tasks"])
    return seen


def soak(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    load, minutes = Load(server, options), []
    asyncio.run(load.run(time.monotonic() + options.warm_up_s))
    server.wait_until_idle()
    first = look(server)
    end_s = time.monotonic() + options.soak_minutes * 60
    with contextlib.nullcontext() if options.no_slow_reader else SlowReader(server):
        while time.monotonic() < end_s:
            load.minute = Minute()
            asyncio.run(load.run(min(end_s, time.monotonic() + 60)))
            load.minute.seen = look(server)
            minutes.append(load.minute.told())
            left_min = max(0.0, end_s - time.monotonic()) / 60
            print(f"{left_min:.0f} minutes left: {json.dumps(minutes[-1])}", flush=True)
    return {"first": first, "left": left(server, first), "last": look(server), "minutes": minutes}


def left(server: Server, first: dict[str, dict[str, int]]) -> list[str]:
    """What is left a minute after the last client has gone: empty, unless
    something is broken."""

    def is_as_before() -> bool:
        now = look(server)["http"]
        return all(now[what] <= first["http"][what] for what in ("fds", "tasks"))

    found = []
    for wait, what in (
        (server.wait_until_idle, "requests or KV blocks"),
        (lambda: server.wait_until(is_as_before), "descriptors or tasks of the HTTP process"),
    ):
        try:
            wait()
        except AssertionError:
            found.append(f"{what} are left: {json.dumps(server.status())}")
    return found


def broken(found: dict[str, Any]) -> list[str]:
    """Promises that weren't kept."""
    minutes, wrong = found["minutes"], list(found["left"])
    middle = minutes[len(minutes) // 2]
    for name in PROCESSES:
        growth = minutes[-1][name]["rss"] / middle[name]["rss"] - 1
        found.setdefault("growth_of_the_last_half", {})[name] = growth
        if growth > MOST_GROWTH:
            wrong.append(f"memory of the {name} process grew by {growth:.1%} in the last half")
        for what, more in (("fds", 0), ("threads", NUM_POOLED)):
            before, after = (found[when][name][what] for when in ("first", "last"))
            if after > before + more:
                wrong.append(f"{name}: {what} were {before} and are {after}")
    wrong += [f"errors: {minute['errors']}" for minute in minutes if minute["errors"]]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/model/checkpoint")
    parser.add_argument("--soak-minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-s", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-slow-reader", action="store_true")
    parser.add_argument("--out", type=Path)
    options, serve = parser.parse_known_args()
    command = [*FASTDECODE, "serve", options.model, "--port", "0", "--kv-memory-gb", "0.1"]
    with serving([*command, *serve]) as server:
        found = soak(server, options)
        os.kill(server.job.pid, signal.SIGTERM)
        found["exit_code"] = server.job.wait(60, grace_s=30).exit_code
    found["broken"] = broken(found)
    if found["exit_code"] != 0:
        found["broken"].append(f"the server ended with {found['exit_code']}")
    print(json.dumps({key: found[key] for key in found if key != "minutes"}, indent=1))
    if options.out is not None:
        note(options.out, "soak", {**provenance(), "results": found})
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
