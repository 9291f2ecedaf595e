"""What ``fastdecode bench-serve`` itself is off by: its figures of a server
whose delays are scripted, against what that server wrote down; and guidellm's
of the same server, where there is one.

    python benchmarks/bench_serve_error.py --out benchmarks/results/serving.json
    python benchmarks/bench_serve_error.py --guidellm /path/to/guidellm
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provenance import provenance
from serving import note

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "examples" / "model" / "checkpoint")
FIRST_S, GAP_S, NUM_TOKENS = 0.05, 0.02, 32
KINDS = ("ttft", "tpot", "itl", "e2e")


class Scripted:
    """Answers every request with a token after 50 ms, and one each 20 ms after
    that; knows when it wrote them. (A server of its own: one that does
    something would have delays of its own.)"""

    def __init__(self) -> None:
        self.written: list[list[float]] = []
        """Of each request when it came, and when its tokens were written."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    await self._complete(head, reader, writer)
                else:
                    _whole(writer, self._told(head))
                await writer.drain()
        writer.close()

    def _told(self, head: bytes) -> Any:
        if head.startswith(b"GET /written"):
            written, self.written = self.written, []
            return written
        return {"data": [{"id": "m", "root": "m"}]}

    async def _complete(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        (length,) = (
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-le")
        )
        await reader.readexactly(length)
        times = [time.monotonic()]
        self.written.append(times)
        kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
        for i in range(NUM_TOKENS):
            due_s = times[0] + FIRST_S + i * GAP_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            over = "length" if i == NUM_TOKENS - 1 else None
            choice = {"index": 0, "text": " x", "finish_reason": over}
            times.append(time.monotonic())
            _event(writer, {"object": "text_completion", "choices": [choice], "usage": None})
            await writer.drain()
        used = {"prompt_tokens": 32, "completion_tokens": NUM_TOKENS, "total_tokens": 0}
        _event(writer, {"object": "text_completion", "choices": [], "usage": used})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")


def _whole(writer: asyncio.StreamWriter, said: Any) -> None:
    raw = json.dumps(said).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    writer.write(head.encode() + b"\r\n\r\n" + raw)


def _event(writer: asyncio.StreamWriter, said: Any) -> None:
    _chunk(writer, b"data: " + json.dumps({"id": "1", "model": "m", **said}).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))


def serve() -> None:
    """Until it is killed."""

    async def run() -> None:
        server = await asyncio.start_server(Scripted().answer, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(run())


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """The port of a scripted server, in a process of its own."""
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def written(port: int) -> list[list[float]]:
    """What the server has written since it was asked last."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /written HTTP/1.1\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        raw = b""
        while piece := connection.recv(1 << 20):
            raw += piece
    said: list[list[float]] = json.loads(raw.split(b"\r\n\r\n", 1)[1])
    return said


def scripted_ms(port: int) -> dict[str, float]:
    """Medians of what the server did."""
    every = written(port)
    gaps = [b - a for _, *row in every for a, b in itertools.pairwise(row)]
    return {
        "ttft": statistics.median(row[1] - row[0] for row in every) * 1e3,
        "tpot": statistics.median((row[-1] - row[1]) / (NUM_TOKENS - 1) for row in every) * 1e3,
        "itl": statistics.median(gaps) * 1e3,
        "e2e": statistics.median(row[-1] - row[0] for row in every) * 1e3,
    }


def bench_serve(port: int, options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Medians that it tells."""
    out = Path(directory, "ours.json")
    command = [sys.executable, "-m", "fastdecode.cli.main", "bench-serve", "--json", str(out)]
    command += ["--base-url", f"http://127.0.0.1:{port}", "--requests", str(options.requests)]
    command += ["--rate", str(options.rate), "--cv", "0", "--prompt-tokens", "32"]
    command += ["--output-tokens", str(NUM_TOKENS)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    told = json.loads(out.read_text())
    return {kind: told[f"{kind}_s"]["p50"] * 1e3 for kind in KINDS}


def guidellm(port: int, options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Medians that it tells. Its time per output token counts the first one,
    too; so what it calls inter-token latency is a request's, our TPOT."""
    out = Path(directory, "guidellm.json")
    backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=m"
    command = [
        str(options.guidellm), "run", "--backend", f"{backend},request_format=/v1/completions",
        "--profile", f"kind=constant,rate={options.rate}",
        "--constraint", f"kind=max_requests,count={options.requests}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
        "--tokenizer", f"kind=hf_auto,model={MODEL}", "--output", f"kind=json,path={out}",
        "--disable-console",
    ]  # fmt: skip
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run(command, check=True, capture_output=True, env=environ)
    told = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def median(name: str) -> float:
        return float(told[name]["successful"]["percentiles"]["p50"])

    return {
        "ttft": median("time_to_first_token_ms"),
        "tpot": median("inter_token_latency_ms"),
        "e2e": median("request_latency") * 1e3,
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of each, in turns; what they tell minus what the server did."""
    clients = {"bench_serve": bench_serve}
    if options.guidellm is not None:
        clients["guidellm"] = guidellm
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    with serving() as port, tempfile.TemporaryDirectory() as directory:
        for round_ in range(options.rounds):
            for name in list(clients)[:: 1 if round_ % 2 == 0 else -1]:
                told = clients[name](port, options, directory)
                did = scripted_ms(port)
                off = {kind: told[kind] - did[kind] for kind in told}
                rows[name].append({"told_ms": told, "did_ms": did, "off_ms": off})
    worst = {
        name: {kind: statistics.median(row["off_ms"][kind] for row in every) for kind in every[0][
            "off_ms"]}
        for name, every in rows.items()
    }  # fmt: skip
    return {"median_off_ms": worst, "rounds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--guidellm", type=Path, metavar="FILE", help="its command")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second, evenly")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    results = {**provenance(), "results": compare(options)}
    print(json.dumps(results["results"]["median_off_ms"], indent=1))
    if options.out is not None:
        note(options.out, "bench_serve_error", results)


if __name__ == "__main__":
    main()
