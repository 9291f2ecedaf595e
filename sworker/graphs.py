"""S-steps without launch overhead: a lane's rows in fixed memory, padded to a bucket, each unit of work a CUDA graph.

A **unit** is what the S-worker does between two attentions: unit 0 embeds and runs the first layer's ``pre_attention``;
unit i runs ``post_attention`` of layer i - 1 and ``pre_attention`` of layer i; the last one ends with hidden states.
Everything that a unit reads and writes lies in its lane's buffers, so a graph that was captured once is right for
every later step of so many rows. Rows are independent: what stands in the padding changes nobody's result but the
shape of the matrix products, whose rounding may depend on it.

Without capture, as on a CPU, the same code runs the units as they are; that is how it is tested there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdecode.core.model_spec import ModelSpec
from sworker.buffers import LENT_LAYERS
from sworker.model.skeleton import Model

MAX_GRAPH_ROWS = 512
"""Beyond so many rows a layer computes for longer than its launches take."""
_EAGER_USES = 1


def bucket_of(num_rows: int) -> int:
    """The least bucket for so many rows: 1, 2, 4, 8, then steps of 8, and from 128 on of an eighth, up to 512. Up to 64
    rows a layer is bound by reading its weights, so padding costs nothing; beyond, less than an eighth."""
    assert num_rows >= 1
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


@dataclass(frozen=True)
class LaneBuffers:
    """The fixed memory of one lane, M rows. o is read by a unit, x by the next one, qkv by whoever attends."""

    token_ids: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]
    x: Tensor  # [M, hidden]
    o: Tensor  # [M, Hq, D]
    qkv: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """q [M, Hq, D], k and v [M, Hkv, D], as often as layers may be on loan: unit i writes i modulo their number."""

    @classmethod
    def allocate(cls, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device) -> LaneBuffers:
        def rows(*dims: int) -> Tensor:
            return torch.zeros((num_rows, *dims), dtype=dtype, device=device)

        ids = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        q, kv = (spec.num_q_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        qkv = tuple((rows(*q), rows(*kv), rows(*kv)) for _ in range(LENT_LAYERS))
        return cls(ids[0], ids[1], rows(spec.hidden_size), rows(*q), qkv)

    def outputs(self, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a unit writes q, k and v."""
        return self.qkv[unit % len(self.qkv)]


class StepGraphs:
    """Runs the units of a model's S-steps on lanes' buffers.

    Args:
        model: on ``device``.
        capture: whether to capture CUDA graphs; if not, units run as they are.
        max_rows: steps of more rows are somebody else's.
    """

    def __init__(self, model: Model, device: torch.device, *, capture: bool, max_rows: int = MAX_GRAPH_ROWS) -> None:
        self.model = model
        self.device = device
        self.max_rows = max_rows
        self._capture = capture
        self._lanes: dict[int, LaneBuffers] = {}
        self._uses: dict[tuple[int, int, int], int] = {}
        self._graphs: dict[tuple[int, int, int], Any] = {}  # (lane, unit, bucket) → torch.cuda.CUDAGraph
        self._pool: Any = torch.cuda.graph_pool_handle() if capture else None
        self._stream = torch.cuda.Stream(device) if capture else None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_units(self) -> int:
        return len(self.model.layers) + 1

    def buffers(self, lane: int) -> LaneBuffers:
        """A lane's memory, the same at every call."""
        if lane not in self._lanes:
            dtype = self.model.embed_tokens.weight.dtype
            with torch.inference_mode(False):
                self._lanes[lane] = LaneBuffers.allocate(self.model.spec, bucket_of(self.max_rows), dtype, self.device)
        return self._lanes[lane]

    @torch.inference_mode()
    def run(self, lane: int, unit: int, bucket: int) -> None:
        """One unit on the first ``bucket`` rows of a lane. Captured at its second use, for the first one makes
        libraries choose their kernels and get their workspaces."""
        key = (lane, unit, bucket)
        graph = self._graphs.get(key)
        if graph is None and self._capture and self._uses.get(key, 0) >= _EAGER_USES:
            graph = self._graphs[key] = self._captured(lane, unit, bucket)
        if graph is not None:
            graph.replay()
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        self._unit(self.buffers(lane), unit, bucket)

    def _unit(self, lane: LaneBuffers, unit: int, num_rows: int) -> None:
        rows = slice(num_rows)
        x, positions, layers = lane.x[rows], lane.positions[rows], self.model.layers
        if unit == 0:
            y = self.model.embed(lane.token_ids[rows], positions)
        else:
            y = layers[unit - 1].post_attention(x, lane.o[rows])
        if unit < len(layers):
            q, k, v = layers[unit].pre_attention(y, positions)
            for target, source in zip(lane.outputs(unit), (q, k, v), strict=True):
                target[rows].copy_(source)
        x.copy_(y)

    def _captured(self, lane: int, unit: int, bucket: int) -> Any:
        """All graphs share one memory pool: they run one after another, and leave nothing behind in it."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may go on calling CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._unit(self.buffers(lane), unit, bucket)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph
