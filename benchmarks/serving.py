"""What HTTP costs: decoding through ``fastdecode serve`` beside the same in
process, in turns; chunks a second from an engine that costs nothing, the
client on the same cores; the first token's delay; CPU of an idle server; what
a reader of a byte a second costs the others; and 10,000 requests, 30% of which
are left at random moments, of which nothing may be left.

    python benchmarks/serving.py decode --model examples/model/checkpoint
    python benchmarks/serving.py chunks --out benchmarks/results/serving.json
    python benchmarks/serving.py ttft
    python benchmarks/serving.py idle --model examples/model/checkpoint
    python benchmarks/serving.py reader
    python benchmarks/serving.py reused --model examples/model/checkpoint
    python benchmarks/serving.py leave

On a machine that others use, too, ``--autogroup-nice -10`` weighs what is
measured more than them (Linux shares the CPU by session; needs root).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import server_process
from scripted_serving import IS_WORDY as WORDY
from server_process import FASTDECODE, Server, scripted_server, serving

from fastdecode.measure.serving.client import Endpoint, run_closed
from fastdecode.measure.serving.load import FIRST_TOKEN, LoadShape, arriving, closed
from fastdecode.measure.serving.report import report

Ran: TypeAlias = "tuple[float, dict[str, float]]"
"""Output tokens a second, and µs of CPU a token by process."""
IN_PROCESS = """
import json, sys, time
from fastdecode import LLM, SamplingParams
model, prompts, tokens = json.loads(sys.argv[1])
params = SamplingParams(max_tokens=tokens, ignore_eos=True)
with LLM(model, kv_memory_gb=0.5, prefix_cache="off") as llm:
    llm.generate(prompts, params)
    print("ready", flush=True)
    for _ in sys.stdin:
        started, cpu_s = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        num = len(prompts) * tokens
        print(json.dumps([num / took_s, {"engine": cpu_s / num * 1e6}]), flush=True)
"""


@contextlib.contextmanager
def in_process(options: argparse.Namespace) -> Iterator[Callable[[], Ran]]:
    """``LLM.generate``, each time it is called."""
    prompts = [planned.prompt for planned in closed(_shape(options))]
    asked = json.dumps([options.model, prompts, options.tokens])
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the tests' servers have it
    command = [sys.executable, "-c", IN_PROCESS, asked]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdin is not None and process.stdout is not None
    goes, tells = process.stdin, process.stdout

    def once() -> Ran:
        print("go", file=goes, flush=True)
        tokens_per_s, cpu_us = json.loads(tells.readline())
        return tokens_per_s, cpu_us

    try:
        assert tells.readline() == "ready\n"
        yield once
    finally:
        goes.close()
        process.wait(60)


@contextlib.contextmanager
def over_http(options: argparse.Namespace) -> Iterator[Callable[[], Ran]]:
    """The same through a server."""
    command = [*FASTDECODE, "serve", options.model, "--port", "0", "--kv-memory-gb", "0.5"]
    command += ["--prefix-cache", "off"]
    with preferred(options, serving(command)) as server:
        endpoint, load = Endpoint(server.url), closed(_shape(options))

        def once() -> Ran:
            before, client_s = _cpu_s(server), time.process_time()
            model = Path(options.model).name
            records = asyncio.run(run_closed(endpoint, model, load, len(load)))
            told, used = report(records, None), {"client": time.process_time() - client_s}
            used |= {name: cpu_s - before[name] for name, cpu_s in _cpu_s(server).items()}
            num = told["output_tokens"]
            return told["output_tokens_per_s"], {
                name: cpu_s / num * 1e6 for name, cpu_s in used.items()
            }

        once()
        yield once


def _shape(options: argparse.Namespace) -> LoadShape:
    return LoadShape(options.requests, 20, options.tokens)


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, and CPU for a token, in turns."""
    rows: dict[str, list[Ran]] = {"in_process": [], "over_http": []}
    with in_process(options) as inside, over_http(options) as outside:
        ways = {"in_process": inside, "over_http": outside}
        for round_ in range(options.rounds):
            for name in list(ways)[:: 1 if round_ % 2 == 0 else -1]:
                rows[name].append(ways[name]())
    rates = {name: statistics.median(rate for rate, _ in row) for name, row in rows.items()}
    cpu_us = {
        name: {who: statistics.median(cpu_us[who] for _, cpu_us in row) for who in row[0][1]}
        for name, row in rows.items()
    }
    pairs = [over[0] / inside[0] for inside, over in zip(*rows.values(), strict=True)]
    return {
        "tokens_per_s": rates,
        "ratio": rates["over_http"] / rates["in_process"],
        "ratio_of_pairs": statistics.median(pairs),
        "pairs": pairs,
        "cpu_us_a_token": cpu_us,
        "rounds": rows,
    }


def chunks(options: argparse.Namespace) -> dict[str, Any]:
    """Of 64 streams at more and more tokens a second: where the server can't
    keep up, tokens come together. And at half of the most that came."""
    tried = [_chunks_at(options, wanted) for wanted in options.paces]
    greatest = max(float(each["chunks_per_s"]) for each in tried)
    return {"tried": tried, "greatest": greatest, "half": _chunks_at(options, greatest / 2)}


def _chunks_at(options: argparse.Namespace, wanted: float) -> dict[str, Any]:
    """So many tokens a second."""
    step_s = 64 / wanted
    with preferred(options, scripted_server("--step-s", str(step_s))) as server:
        shape = LoadShape(64, 4, max(20, int(8 / step_s)))
        before = _cpu_s(server)
        records = asyncio.run(run_closed(Endpoint(server.url), "checkpoint", closed(shape), 64))
        used = {name: cpu_s - before[name] for name, cpu_s in _cpu_s(server).items()}
    told = report(records, None)
    return {
        "wanted_tokens_per_s": wanted,
        "tokens_per_s": told["output_tokens_per_s"],
        "chunks_per_s": told["chunks"] / told["duration_s"],
        "later_than_the_step_s": {key: value - step_s for key, value in told["itl_s"].items()},
        "cpu_us_a_chunk": {name: cpu_s / told["chunks"] * 1e6 for name, cpu_s in used.items()},
    }


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token, one request after the other, of an
    engine whose step takes 5 ms: in process, and over HTTP, in turns."""
    rows: dict[str, list[float]] = {"in_process": [], "over_http": []}
    asked = str(options.requests)
    with preferred(options, scripted_server("--step-s", "0.005")) as server:
        endpoint = Endpoint(server.url)
        for _ in range(options.rounds):
            script = Path(server_process.__file__).with_name("scripted_serving.py")
            command = [sys.executable, str(script), "--step-s", "0.005", "--in-process", asked]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            rows["in_process"].append(statistics.median(json.loads(done.stdout)) * 1e3)
            load = closed(LoadShape(options.requests, 20, 2))
            records = asyncio.run(run_closed(endpoint, "checkpoint", load, 1))
            rows["over_http"].append(statistics.median(each.ttft_s for each in records) * 1e3)
    inside, outside = (statistics.median(row) for row in rows.values())
    return {"median_ms": rows, "http_costs_ms": outside - inside}


def reused(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds (median, p90) of small answers, one after the other, on one
    connection: the list of models, and completions of one token."""
    command = [*FASTDECODE, "serve", options.model, "--port", "0", "--kv-memory-gb", "0.1"]
    completion = json.dumps({"prompt": [FIRST_TOKEN], "max_tokens": 1})
    asked = {
        "models": ("GET", "/v1/models", None),
        "completion": ("POST", "/v1/completions", completion),
    }
    with preferred(options, serving(command)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        with contextlib.closing(connection):
            return {
                name: _spread_ms([_took_ms(connection, *what) for _ in range(options.requests)])
                for name, what in asked.items()
            }


def _took_ms(
    connection: http.client.HTTPConnection, method: str, path: str, body: str | None
) -> float:
    began_s = time.perf_counter()
    connection.request(method, path, body, {"content-type": "application/json"} if body else {})
    answer = connection.getresponse()
    answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise RuntimeError(f"{path} was answered {answer.status}")
    return (time.perf_counter() - began_s) * 1e3


def _spread_ms(took_ms: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(took_ms), "p90": statistics.quantiles(took_ms, n=10)[8]}


@contextlib.contextmanager
def preferred(options: argparse.Namespace, started: Any) -> Iterator[Server]:
    """A server with the weight that its benchmark is to have."""
    with started as server:
        if options.autogroup_nice:
            for process in server.job.processes():
                weigh(process.pid, options.autogroup_nice)
        yield server


def weigh(pid: int, nice: int) -> None:
    """Its session's, against other sessions."""
    Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def reader(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token of 16 streams, in turns without and beside a very slow reader."""
    rows: dict[str, list[float]] = {"alone": [], "beside": []}
    load = closed(LoadShape(64, 20, 60))
    with preferred(options, scripted_server("--step-s", "0.005")) as server:
        endpoint = Endpoint(server.url)
        for _ in range(options.rounds):
            for name in rows:
                slow = SlowReader(server) if name == "beside" else contextlib.nullcontext()
                with slow:
                    records = asyncio.run(run_closed(endpoint, "checkpoint", load, 16))
                tpots = [each.tpot_s for each in records if each.tpot_s is not None]
                rows[name].append(statistics.median(tpots) * 1e3)
                server.wait_until_idle()
    alone, beside = (statistics.median(row) for row in rows.values())
    return {"tpot_ms": rows, "ratio": beside / alone}


class SlowReader:
    """Asks for 30 MB, and takes a byte a second of them."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": [WORDY], "max_tokens": 4000, "n": 2, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        self._socket.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._is_over.wait(1.0) and self._socket.recv(1):
            pass

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()


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
        async with places, endpoint.session() as session:
            run = endpoint.run(planned, "checkpoint", 0.0, session)
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


KINDS = {
    "decode": decode, "chunks": chunks, "ttft": ttft, "idle": idle, "reader": reader,
    "reused": reused, "leave": leave,
}  # fmt: skip


def note(path: Path, what: str, results: dict[str, Any]) -> None:
    """Write results beside those of other kinds."""
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, what: results}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(KINDS))
    parser.add_argument("--model", default="examples/model/checkpoint")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--paces", type=float, nargs="+", default=[4000, 8000, 12_000, 14_000, 16_000],
        help="tokens a second that chunks tries",
    )  # fmt: skip
    parser.add_argument("--autogroup-nice", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.requests = options.requests or {"leave": 10_000, "ttft": 200}.get(options.what, 64)
    if options.autogroup_nice:
        weigh(os.getpid(), options.autogroup_nice)
    results = {**provenance(), "results": KINDS[options.what](options)}
    print(json.dumps(results["results"], indent=1))
    if options.out is not None:
        note(options.out, options.what, results)


if __name__ == "__main__":
    main()
