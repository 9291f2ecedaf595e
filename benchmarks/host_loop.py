"""What the engine's own thread does for each lane and layer, beside 1, 4 and 16
R-workers: its time and its Python calls. The device takes no time, and
R-workers answer at once, so nothing else is left.

    python benchmarks/host_loop.py [--out FILE]

``time_lanes`` and ``count_calls`` run the real ``Pipeline``, ``RemoteStep`` and
staging for a GPU. ``time_messages`` runs the real ``WorkerPool`` and codec to an
R-worker and back, with a socket's place taken by a list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_instant import InstantFleet, _batch
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.model.families import read_model_spec
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.wire import codec
from fastdecode.wire.messages import Attend, AttendResult, BeginStep
from sworker.graphs import StepGraphs
from sworker.load.weights import random_model
from sworker.worker import SWorker

CPU = torch.device("cpu")
NUM_R_WORKERS = (1, 4, 16)
NUM_LANES, NUM_LAYERS, NUM_ROWS = 2, 32, 64


class IdleStream:
    """A stream, an event and a mark of a device that takes no time."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> IdleStream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def replay(self) -> None: ...


class IdleGpu:
    """A device that takes no time, in memory of the host; see ``sworker.device.Gpu``."""

    def __init__(self) -> None:
        self._stream = IdleStream()
        self._on = contextlib.nullcontext()

    def new_stream(self) -> IdleStream:
        return self._stream

    def current_stream(self) -> IdleStream:
        return self._stream

    def on(self, stream: Any) -> contextlib.nullcontext[None]:
        return self._on

    def mark(self) -> IdleStream:
        return self._stream

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def reads(self, array: Any) -> bool:
        return True

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def room(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def new_pool(self) -> object:
        return None

    def capture(self, run: Callable[[], None], pool: object) -> IdleStream:
        return self._stream


def make_pipeline(num_r_workers: int, num_layers: int = NUM_LAYERS) -> tuple[Pipeline, Any]:
    """A pipeline of ``NUM_LANES`` lanes on an idle GPU, and its holders."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    spec = read_model_spec(config, name="tiny")
    model = random_model(spec, device=CPU, dtype=torch.bfloat16)
    gpu: Any = IdleGpu()
    graphs = StepGraphs(model, CPU, capture=True, num_lanes=NUM_LANES, max_rows=64, gpu=gpu)
    graphs.prepare([graphs.buckets.of(NUM_ROWS)])
    holder = Holder(
        HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1
    )
    holders = (holder,) * num_r_workers
    fleet: Any = InstantFleet()
    plan = AttentionPlan(spec.attention, DType.BFLOAT16, fleet, CPU, holders, gpu=gpu)
    return Pipeline(SWorker(spec, model, CPU, graphs, gpu), plan, NUM_LANES), holders


def steps(pipeline: Pipeline, holders: Any, num_steps: int) -> Iterator[Callable[[], None]]:
    """So many steps of all lanes; batches are laid out before each is given."""
    for step in range(num_steps):
        batches = [_batch(holders, step, lane, NUM_LANES, NUM_ROWS) for lane in range(NUM_LANES)]
        yield partial(_run_step, pipeline, batches)


def _run_step(pipeline: Pipeline, batches: Sequence[StepBatch]) -> None:
    for lane, batch in enumerate(batches):
        pipeline.launch(lane, batch, np.arange(0))
    while pipeline.lanes.in_flight:
        pipeline.run()


def time_lanes(num_r_workers: int, num_steps: int = 24) -> float:
    """Microseconds a lane and layer; the best of so many steps."""
    pipeline, holders = make_pipeline(num_r_workers)
    best_s = min(_seconds(run) for run in steps(pipeline, holders, num_steps))
    return best_s / (NUM_LANES * NUM_LAYERS) * 1e6


def count_calls(num_r_workers: int) -> float:
    """Python calls, and calls from Python into C, a lane and layer: of a deep
    model beyond a shallow one's."""

    def calls(num_layers: int) -> int:
        pipeline, holders = make_pipeline(num_r_workers, num_layers)
        warm, counted = steps(pipeline, holders, 2)
        warm()
        return sum(calls_of(counted))

    return (calls(16) - calls(8)) / (8 * NUM_LANES)


def calls_of(run: Callable[[], None]) -> tuple[int, int]:
    """How many functions this thread calls: in Python, and from Python in C."""
    events: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        events[event] += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return events["call"], events["c_call"]


class ListedConnection:
    """Encodes what is sent, and decodes it again; then its answer, likewise."""

    heard_s = None

    def __init__(self, index: int, answers: deque[tuple[int, Any]]) -> None:
        self.peer, self._index, self._answers = f"r{index}", index, answers
        self._room = memoryview(bytearray(1 << 16))

    def send(self, message: Any) -> None:
        frame = codec.encode(message, epoch=7)
        frame.write(self._room)
        if isinstance(message, Attend):
            o = message.q
            result = AttendResult(message.step, message.lane, message.layer, o, None, 0.0)
            answer = codec.encode(result, epoch=7)
            data = np.zeros(answer.num_bytes, np.uint8)
            answer.write(data.data)
            self._answers.append((self._index, data))


class ListedHub:
    """R-workers that answer at once."""

    def __init__(self, num_r_workers: int) -> None:
        self._answers: deque[tuple[int, Any]] = deque()
        self.connections = [ListedConnection(i, self._answers) for i in range(num_r_workers)]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        index, data = self._answers.popleft()
        return index, codec.decode(data)[0]


def time_messages(num_r_workers: int, num_layers: int = 400) -> float:
    """Microseconds an R-worker, lane and layer: of the fleet, the codec and
    copies, both ends'."""
    run = exchange(num_r_workers, num_layers)
    return min(_seconds(run) for _ in range(5)) / (num_layers * num_r_workers) * 1e6


def count_message_calls(num_r_workers: int) -> float:
    """The same, in calls."""
    exchange(num_r_workers, 1)()
    return sum(calls_of(exchange(num_r_workers, 10))) / (10 * num_r_workers)


def exchange(num_r_workers: int, num_layers: int) -> Callable[[], None]:
    """So many layers' messages to R-workers and back."""
    hub: Any = ListedHub(num_r_workers)
    fleet = WorkerPool(hub, timeout_s=300.0)
    q, kv = np.zeros((16, 4, 8), np.uint16), np.zeros((16, 2, 8), np.uint16)
    n = np.ones(16, np.int32)
    for holder in range(num_r_workers):
        begin = BeginStep(0, 0, np.arange(16), n, n, n, n)
        fleet.send(HolderId(holder), begin)

    def run() -> None:
        for layer in range(num_layers):
            for holder in range(num_r_workers):
                fleet.send(HolderId(holder), Attend(0, 0, layer, q, kv, kv))
            for _ in range(num_r_workers):
                fleet.receive(most_s=0.0)

    return run


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for num_r_workers in NUM_R_WORKERS:
        row = SimpleNamespace(
            r_workers=num_r_workers,
            us=round(time_lanes(num_r_workers), 1),
            calls=count_calls(num_r_workers),
            message_us=round(time_messages(num_r_workers), 2),
            message_calls=count_message_calls(num_r_workers),
        )
        rows.append(vars(row))
        print(
            f"{num_r_workers:3} R-workers: {row.us:6.1f} us and {row.calls:6.0f} calls a lane and "
            f"layer; messages {row.message_us:.2f} us and {row.message_calls:.0f} calls an "
            "R-worker, lane and layer, both ends'"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
