"""Do lanes hide one part behind the other? S-worker on one core, R-worker on
another, MPI between them.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline.json

A Llama-shaped random model in bfloat16, and a batch whose context is chosen so
that the S-part of a step takes about as long as the R-part. Everything is
measured in one job, one lane and two in turns, so that what else the machine
does falls on both. A *cycle* is one step of every sequence; T_S and T_R are
what S-part and R-part of a cycle take in one lane, where they alternate. Goals:
two lanes within 1.15 of the longer part, where one lane takes the sum of both;
with a millisecond added to every answer, ``--lanes auto`` within 1.2.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).parents[1]
MODEL = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
         "num_key_value_heads": 12, "intermediate_size": 2048}  # fmt: skip
VOCAB = 512
BATCH = 320
PROBE_CONTEXT = 64
SEGMENTS = 24
CYCLES = 4
"""Of a segment."""
SETTLE_CYCLES = 120
"""For the automatic choice of lanes."""
MPIRUN = [
    "--with-ft",
    "ulfm",
    "--oversubscribe",
    "--bind-to",
    "none",
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "self,sm",
]


@dataclass(frozen=True)
class Segment:
    """A few cycles in so many lanes, seconds of each."""

    lanes: int
    cycle_s: float
    s_part_s: float
    """That the S-worker's thread was busy."""
    r_part_s: float
    """That the R-worker computed."""


class Sums:
    """A trace that adds up the R-worker's seconds."""

    def __init__(self) -> None:
        self.r_part_s = 0.0

    def s_part(self, *args: Any) -> None: ...

    def sampled(self, *args: Any) -> None: ...

    def waited(self, *args: Any) -> None: ...

    def load(self, *args: Any) -> None: ...

    def attended(self, *args: Any) -> None:
        self.r_part_s += args[-1]


class Delayed:
    """An R-worker's connection whose messages leave later, without holding each other up."""

    def __init__(self, connection: Any, delay_s: float) -> None:
        self._connection = connection
        self._delay_s = delay_s
        self._due: list[tuple[float, int, Any]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()
        self.peer, self.receive, self.close = connection.peer, connection.receive, connection.close

    def send(self, message: Any) -> None:
        with self._changed:
            heapq.heappush(
                self._due, (time.perf_counter() + self._delay_s, next(self._count), message)
            )
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                due, _, message = heapq.heappop(self._due)
            time.sleep(max(0.0, due - time.perf_counter()))
            self._connection.send(message)


class DelayedHub:
    """An R-worker's hub with such connections."""

    def __init__(self, hub: Any, delay_s: float) -> None:
        self._hub = hub
        self._delay_s = delay_s
        self._delayed: dict[Any, Delayed] = {}
        self.receive_any, self.close = hub.receive_any, hub.close

    @property
    def connections(self) -> list[Delayed]:
        for connection in self._hub.connections:
            if connection not in self._delayed:
                self._delayed[connection] = Delayed(connection, self._delay_s)
        return [self._delayed[connection] for connection in self._hub.connections]


def s_worker(options: argparse.Namespace) -> None:
    """Rank 0: the engine, and the clock."""
    import torch

    torch.set_num_threads(1)
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.engine.setup.launch import RunningEngine
    from fastdecode.measure.calibrate import cancel_all

    sums = Sums()
    config = EngineConfig.of(
        str(options.model), dtype="bfloat16", schedule="greedy",
        max_num_sequences=BATCH, lanes=None if options.delay_s else 1, prefill_chunk=1024,
        max_step_tokens=BATCH + 2048, prefix_cache="off",
    )  # fmt: skip
    running = RunningEngine(config, trace=sums)
    bench = Bench(running, sums)
    context = options.context or bench.balanced_context()
    ahead = SETTLE_CYCLES if options.delay_s else SEGMENTS * CYCLES // 2
    bench.start(max(1, context - ahead))
    if options.delay_s:
        for _ in range(SETTLE_CYCLES):
            bench.cycle()
        segments = [bench.segment(bench.lanes) for _ in range(SEGMENTS // 2)]
    else:
        segments = [bench.segment(1 + i % 2) for i in range(SEGMENTS)]
    cancel_all(running.engine)
    running.close()
    result = {"context": context, "segments": [asdict(segment) for segment in segments]}
    options.out.write_text(json.dumps(result))


class Bench:
    def __init__(self, running: Any, sums: Sums) -> None:
        self._running, self._engine, self._sums = running, running.engine, sums
        self._num_started = 0

    @property
    def lanes(self) -> int:
        return self._engine._pipeline.num_lanes

    def start(self, prompt_len: int) -> None:
        """A batch, its prompts run."""
        import numpy as np

        from fastdecode.core.sequence import Request, SamplingParams

        rng = np.random.default_rng(0)
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        before = self._engine.stats.num_prompt_tokens
        for _ in range(BATCH):
            self._num_started += 1
            tokens = tuple(rng.integers(3, VOCAB, prompt_len).tolist())
            self._engine.submit(Request(str(self._num_started), tokens, params, 400, seed=0))
        while self._engine.stats.num_prompt_tokens - before < BATCH * prompt_len:
            self._engine.step()

    def cycle(self) -> None:
        """One step of every lane."""
        for _ in range(self.lanes):
            self._engine.step()

    def balanced_context(self) -> int:
        """The context at which the R-part takes as long as the S-part."""
        from fastdecode.measure.calibrate import cancel_all

        self.start(PROBE_CONTEXT)
        for _ in range(4):
            self.cycle()
        probe = self.segment(1)
        cancel_all(self._engine)
        return round((PROBE_CONTEXT + 4 + CYCLES) * probe.s_part_s / probe.r_part_s)

    def segment(self, lanes: int) -> Segment:
        """``CYCLES`` cycles in so many lanes; the first one isn't counted."""
        self._engine.set_num_lanes(lanes)
        self.cycle()
        waited = self._engine._pipeline.wait_s
        r_part = self._sums.r_part_s
        started = time.perf_counter()
        for _ in range(CYCLES):
            self.cycle()
        cycle_s = (time.perf_counter() - started) / CYCLES
        s_part_s = cycle_s - (self._engine._pipeline.wait_s - waited) / CYCLES
        return Segment(lanes, cycle_s, s_part_s, (self._sums.r_part_s - r_part) / CYCLES)


def r_worker(delay_s: float) -> None:
    from fastdecode.wire.mpi.hub import r_worker_hub
    from fastdecode.wire.mpi.job import join, leave
    from rworker.attention import AttentionExecutor
    from rworker.state import RWorkerState
    from rworker.worker import serve

    hub: Any = r_worker_hub(join())
    if delay_s:
        hub = DelayedHub(hub, delay_s)
    serve(hub, RWorkerState("r0", kv_bytes=4 << 30), AttentionExecutor(num_threads=1))
    hub.close()
    leave(0)


def make_checkpoint(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=4096, tie_word_embeddings=False, **MODEL
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def job(model: Path, scratch: Path, *more: str) -> dict[str, Any]:
    """An MPI job of S-worker and R-worker; what it measured."""
    out = scratch / "result.json"
    env = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(scratch), PYTHONPATH=str(ROOT))
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    python = [sys.executable, __file__, "--model", str(model), "--out", str(out), *more, "--rank"]
    launcher = str(Path(sys.executable).with_name("mpirun"))
    command = [launcher, *MPIRUN, "-n", "1", *python, "s", ":", "-n", "1", *python, "r"]
    subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=True, timeout=280)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def summarise(plain: dict[str, Any], delayed: dict[str, Any]) -> dict[str, Any]:
    one, two = ([s for s in plain["segments"] if s["lanes"] == n] for n in (1, 2))
    pairs = list(zip(one, two, strict=True))
    longer = [max(a["s_part_s"], a["r_part_s"]) for a in one]
    auto = delayed["segments"]
    middle = statistics.median
    return {
        "context_tokens": plain["context"],
        "t_s_ms": 1e3 * middle(a["s_part_s"] for a in one),
        "t_r_ms": 1e3 * middle(a["r_part_s"] for a in one),
        "one_lane_ms": 1e3 * middle(a["cycle_s"] for a in one),
        "two_lanes_ms": 1e3 * middle(b["cycle_s"] for b in two),
        "one_lane_over_sum": middle(a["cycle_s"] / (a["s_part_s"] + a["r_part_s"]) for a in one),
        "two_lanes_over_longer": middle(
            b["cycle_s"] / x for (_, b), x in zip(pairs, longer, strict=True)
        ),
        "two_lanes_over_longer_in_two_lanes": middle(
            b["cycle_s"] / max(b["s_part_s"], b["r_part_s"]) for b in two
        ),
        "quiet_two_lanes_over_longer": quiet(b["cycle_s"] for b in two)
        / max(quiet(a["s_part_s"] for a in one), quiet(a["r_part_s"] for a in one)),
        "delayed_1ms_lanes": auto[-1]["lanes"],
        "delayed_1ms_ms": 1e3 * middle(a["cycle_s"] for a in auto),
        "delayed_1ms_over_longer": middle(
            a["cycle_s"] / max(a["s_part_s"], a["r_part_s"]) for a in auto
        ),
    }


def quiet(values: Iterable[float]) -> float:
    """The lower quartile: what a machine that does other work at times shows when it doesn't."""
    return statistics.quantiles(values, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("pipeline.json"))
    parser.add_argument("--rank", choices=("s", "r"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--delay-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0 if options.rank == "s" else 1]})
        s_worker(options) if options.rank == "s" else r_worker(options.delay_s)
        return
    before = provenance()
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as scratch:
        model = Path(scratch) / "model"
        make_checkpoint(model)
        plain = job(model, Path(scratch))
        delayed = job(model, Path(scratch), "--context", str(plain["context"]), "--delay-s", "1e-3")
    summary = summarise(plain, delayed)
    for name, value in summary.items():
        print(f"{name:<36} {value:.3f}" if isinstance(value, float) else f"{name:<36} {value}")
    result = {
        **before,
        "load_average_after": os.getloadavg(),
        "batch": BATCH,
        "model": MODEL,
        "summary": summary,
    }
    result |= {"segments": plain["segments"], "segments_delayed_1ms": delayed["segments"]}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
