"""What HTTP costs: decoding through ``fastdecode serve`` beside the same in
process, in turns; chunks a second from an engine that costs nothing, the
client on the same cores; CPU of an idle server; and 10,000 requests, 30% of
which are left at random moments, of which nothing may be left.

    python benchmarks/serving.py decode --model examples/model/checkpoint
    python benchmarks/serving.py chunks
    python benchmarks/serving.py idle --model examples/model/checkpoint
    python benchmarks/serving.py leave
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from server_process import FASTDECODE, Server, scripted_server, serving

from fastdecode.measure.serving.client import Endpoint
from fastdecode.measure.serving.load import FIRST_TOKEN, LoadShape, arriving, closed
from fastdecode.measure.serving.report import report
from fastdecode.measure.serving.run import run_closed


def in_process(options: argparse.Namespace) -> float:
    """Output tokens a second of ``LLM.generate``, the best of some runs."""
    code = """
import json, sys, time
from fastdecode import LLM, SamplingParams
model, prompts, tokens, runs = json.loads(sys.argv[1])
params = SamplingParams(max_tokens=tokens, ignore_eos=True)
with LLM(model, kv_memory_gb=0.5) as llm:
    llm.generate(prompts[:4], params)
    best = 0.0
    for _ in range(runs):
        started = time.perf_counter()
        llm.generate(prompts, params)
        best = max(best, len(prompts) * tokens / (time.perf_counter() - started))
print(best)
"""
    prompts = [planned.prompt for planned in closed(_shape(options))]
    asked = json.dumps([options.model, prompts, options.tokens, options.runs])
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the tests' servers have it
    done = subprocess.run(
        [sys.executable, "-c", code, asked], capture_output=True, check=True, env=environ
    )
    return float(done.stdout.split()[-1])


def over_http(options: argparse.Namespace) -> float:
    """The same through a server."""
    command = [*FASTDECODE, "serve", options.model, "--port", "0", "--kv-memory-gb", "0.5"]
    with serving(command) as server:
        endpoint = Endpoint(server.url)
        load, best = closed(_shape(options)), 0.0
        for _ in range(options.runs + 1):
            records = asyncio.run(run_closed(endpoint, "checkpoint", load, len(load)))
            best = max(best, float(report(records, None)["output_tokens_per_s"]))
        return best


def _shape(options: argparse.Namespace) -> LoadShape:
    return LoadShape(options.requests, 20, options.tokens)


def decode(options: argparse.Namespace) -> dict[str, Any]:
    ways = {"in_process": in_process, "over_http": over_http}
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds):
        for name in list(ways)[:: 1 if round_ % 2 == 0 else -1]:
            rows[name].append(ways[name](options))
    inside, outside = (statistics.median(rows[name]) for name in ways)
    return {"tokens_per_s": rows, "ratio": outside / inside}


def chunks(options: argparse.Namespace) -> dict[str, Any]:
    """64 streams as fast as they go; then at half of that."""
    results: dict[str, Any] = {}
    with scripted_server("--step-s", "0") as server:
        shape = LoadShape(64, 4, 1000)
        records = asyncio.run(run_closed(Endpoint(server.url), "checkpoint", closed(shape), 64))
        full = report(records, None)
        results["greatest"] = {
            "chunks_per_s": full["chunks"] / full["duration_s"],
            "tokens_per_s": full["output_tokens_per_s"],
        }
    step_s = 64 / (results["greatest"]["chunks_per_s"] / 2)
    with scripted_server("--step-s", str(step_s)) as server:
        shape = LoadShape(64, 4, max(20, int(10 / step_s)))
        records = asyncio.run(run_closed(Endpoint(server.url), "checkpoint", closed(shape), 64))
        half = report(records, None)
        late = {key: value - step_s for key, value in half["itl_s"].items()}
        results["half"] = {
            "chunks_per_s": half["chunks"] / half["duration_s"], "later_than_the_step_s": late,
        }  # fmt: skip
    return results


def idle(options: argparse.Namespace) -> dict[str, Any]:
    command = [*FASTDECODE, "serve", options.model, "--port", "0", "--kv-memory-gb", "0.1"]
    with serving(command) as server:
        server.complete(prompt=[FIRST_TOKEN], max_tokens=4)
        time.sleep(2)
        before = _cpu_s(server)
        time.sleep(options.seconds)
        used = {name: cpu_s - before[name] for name, cpu_s in _cpu_s(server).items()}
        return {f"{name}_cpu": cpu_s / options.seconds for name, cpu_s in used.items()}


def leave(options: argparse.Namespace) -> dict[str, Any]:
    """Memory, descriptors and threads of both processes, after each tenth."""
    seen: list[dict[str, Any]] = []
    with scripted_server("--step-s", "0.001", "--max-queued-requests", "100000") as server:
        for part in range(11):
            asyncio.run(_send_and_leave(server, options.requests // 10, seed=part))
            server.wait_until_idle()
            seen.append({
                name: {"rss": p.memory_info().rss, "fds": p.num_fds(), "threads": p.num_threads()}
                for name in ("http", "engine")
                for p in (server.process(name),)
            })  # fmt: skip
    growth = {name: seen[-1][name]["rss"] / seen[5][name]["rss"] - 1 for name in ("http", "engine")}
    rss = {name: [each[name]["rss"] for each in seen] for name in growth}
    ends = {"first": seen[0], "last": seen[-1]}
    return {"growth_of_the_last_half": growth, "rss": rss, **ends}


async def _send_and_leave(server: Server, num: int, seed: int) -> None:
    random_ = random.Random(seed)
    endpoint = Endpoint(server.url)
    places = asyncio.Semaphore(64)

    async def one(planned: Any, after_s: float | None) -> None:
        async with places:
            run = endpoint.run(planned, "checkpoint", 0.0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(run, after_s)

    load = arriving(LoadShape(num, 8, 20, seed=seed), 1e6)
    leaves = [random_.uniform(0, 0.1) if random_.random() < 0.3 else None for _ in load]
    await asyncio.gather(*[one(*pair) for pair in zip(load, leaves, strict=True)])


def _cpu_s(server: Server) -> dict[str, float]:
    def used(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    return {name: used(server.process(name)) for name in ("http", "engine")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("decode", "chunks", "idle", "leave"))
    parser.add_argument("--model", default="examples/model/checkpoint")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.requests = options.requests or (10_000 if options.what == "leave" else 64)
    measure = {"decode": decode, "chunks": chunks, "idle": idle, "leave": leave}[options.what]
    results = {"what": options.what, **provenance(), "results": measure(options)}
    print(json.dumps(results["results"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
