"""How soon those who wait hear that the engine is dead: seconds from the moment
at which its process is killed, or its step fails, until open requests have
their error, streams and whole answers (goal: 2 s).

    python benchmarks/serving_deaths.py --rounds 5 --out benchmarks/results/serving.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from provenance import provenance
from serving import note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scripted_serving import BREAKS
from server_process import Server, scripted_server

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LONG = 4000
HEARS_WITHIN_S = 60.0


async def ask(server: Server, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request, sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"prompt": [1, 2], "max_tokens": LONG, **more})
    writer.write(f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    return reader, writer


async def hear(reader: asyncio.StreamReader) -> tuple[float, bool]:
    """When an answer ended, and whether with an error."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.wait_for(reader.read(1 << 20), HEARS_WITHIN_S):
            said = said[-4096:] + piece
            if b'"error"' in said:
                return time.monotonic(), True
    return time.monotonic(), False


async def die(server: Server, way: str, num: int) -> dict[str, Any]:
    """Seconds until these requests heard of it; every other one is a stream."""
    asked = [await ask(server, stream=i % 2 == 0) for i in range(num)]
    while server.status()["num_running"] < num:
        await asyncio.sleep(0.05)
    hearing = [asyncio.create_task(hear(reader)) for reader, _ in asked]
    engine = server.process("engine")
    dead_s = time.monotonic()
    if way == "killed":
        engine.kill()
    else:
        asked.append(await ask(server, prompt=[BREAKS]))
    heard = await asyncio.gather(*hearing)
    taken_s = sorted(at_s - dead_s for at_s, _ in heard)
    told = sum(is_error for _, is_error in heard)
    for _, writer in asked:
        writer.close()
    return {"median_s": taken_s[num // 2], "longest_s": taken_s[-1], "told": told, "open": num}


def deaths(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of each way to die, of a server each."""
    rows: dict[str, list[dict[str, Any]]] = {"killed": [], "failed": []}
    for _ in range(options.rounds):
        for way, found in rows.items():
            with scripted_server("--step-s", str(options.step_s)) as server:
                found.append(asyncio.run(die(server, way, options.requests)))
                outcome = server.job.wait(60, grace_s=30)
                found[-1].update(exit_code=outcome.exit_code, orphans=outcome.orphans)
    longest = {way: max(each["longest_s"] for each in found) for way, found in rows.items()}
    return {"longest_s": longest, "rounds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {**provenance(), "results": deaths(options)}
    print(json.dumps(results["results"], indent=1))
    if options.out is not None:
        note(options.out, "deaths", results)


if __name__ == "__main__":
    main()
