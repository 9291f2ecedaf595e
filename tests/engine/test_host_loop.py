"""How much Python the engine's own thread runs for each lane and layer.

Where a GPU computes a unit in 200 us, this keeps it waiting. Calls are counted, which no other
load on the machine changes."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from instant_steps import InstantSteps
from torch import Tensor

from fastdecode.core.holders import HolderId
from fastdecode.core.model.families import read_model_spec
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.wire.codec import Codec
from fastdecode.wire.messages import Attend, AttendResult, BeginStep
from sworker.load.weights import random_model

CPU = torch.device("cpu")
NUM_LANES, NUM_ROWS = 2, 64
CODEC = Codec()


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
    """A device that takes no time, in memory of the host."""

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


def count_calls(num_r_workers: int) -> float:
    """Return calls in Python and from it into C, per lane and layer: of a deep model beyond a
    shallow one's."""

    def calls(num_layers: int) -> int:
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
            "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "rope_theta": 1e4, "tie_word_embeddings": False,
        }  # fmt: skip
        spec = read_model_spec(config, name="tiny")
        model = random_model(spec, device=CPU, dtype=torch.bfloat16)
        steps = InstantSteps(
            model, CPU, NUM_LANES, NUM_ROWS, num_r_workers, capture=True, gpu=IdleGpu()
        )
        steps.run(steps.batches())
        return calls_of(partial(steps.run, steps.batches()))

    return (calls(16) - calls(8)) / (8 * NUM_LANES)


def calls_of(run: Callable[[], None]) -> int:
    """Return how many functions this thread calls: in Python, and from Python in C."""
    events: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        events[event] += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


class ListedConnection:
    """Encodes what is sent, and decodes it again; then its answer, likewise."""

    heard_s = None

    def __init__(self, index: int, answers: deque[tuple[int, Any]]) -> None:
        self.peer, self._index, self._answers = f"r{index}", index, answers

    def send(self, message: Any) -> None:
        CODEC.encode(message).in_one_piece()
        if isinstance(message, Attend):
            o = message.q
            result = AttendResult(message.step, message.lane, message.layer, o, None, 0.0)
            data = CODEC.encode(result).in_one_piece()
            self._answers.append((self._index, np.frombuffer(data, np.uint8)))


class ListedHub:
    """R-workers that answer at once."""

    def __init__(self, num_r_workers: int) -> None:
        self._answers: deque[tuple[int, Any]] = deque()
        self.connections = [ListedConnection(i, self._answers) for i in range(num_r_workers)]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        index, data = self._answers.popleft()
        return index, CODEC.decode(data)


def count_message_calls(num_r_workers: int) -> float:
    """Return calls per R-worker, lane and layer, both ends' codec included."""
    exchange(num_r_workers, 1)()
    return calls_of(exchange(num_r_workers, 10)) / (10 * num_r_workers)


def exchange(num_r_workers: int, num_layers: int) -> Callable[[], None]:
    """Return what sends and receives the messages of ``num_layers`` layers."""
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


@pytest.mark.parametrize(("num_r_workers", "most_calls"), [(1, 85), (4, 136), (16, 332)])
def test_calls_a_lane_and_layer(num_r_workers: int, most_calls: int) -> None:
    """They grow by what each R-worker's own message and answer take, and by
    nothing that looks at all R-workers for every answer."""
    assert 50 < count_calls(num_r_workers) <= most_calls


def test_calls_a_message_are_as_many_for_any_number_of_r_workers() -> None:
    """Beside the codec's: the fleet's, for one message and its answer."""
    one, sixteen = (count_message_calls(number) for number in (1, 16))
    assert 20 < sixteen <= one + 1 <= 70
