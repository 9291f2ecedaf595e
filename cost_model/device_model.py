"""What a model says of the goals on a GPU: kernels of a layer one by one, and the
loop that feeds them. All figures that go in stand in ``Card`` and ``HostCosts``;
nothing of them was measured by this project. ``cost_model/stages.py`` has the
roofline that plans are made by, which knows no tiles and no launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.simulate.device_loop import LaneCosts, cycle_s
from cost_model.workload import TokenCosts
from fastdecode.core.model.spec import ModelSpec

_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 256, 0.85), (64, 128, 0.65))
"""Rows and columns of what one multiprocessor computes at a time, and how near
it comes to the best rate."""
_SPLITS = (1, 2, 4, 8)
"""Of the inner dimension, where tiles are few."""
_NUM_SMALL = 4
"""Kernels of a unit beside the four products: two norms with their sums, the
gate, the rotary embedding."""


@dataclass(frozen=True)
class Card:
    """An H200: public rates."""

    num_multiprocessors: int = 132
    matmul_flops_per_s: float = 788e12
    """Of large products in bfloat16; 770 to 800 are reported."""
    product_share: float = 0.9
    """Of that rate: what a layer's products reach, tiles left empty aside."""
    memory_bytes_per_s: float = 4.3e12
    attention_flops_per_s: float = 300e12
    """FlashAttention-2, causal prompts."""
    paged_efficiency: float = 0.8
    """Of the memory's rate: attention that reads blocks where they lie."""
    node_s: float = 1e-6
    """From one kernel of a graph to the next."""
    small_s: float = 2.5e-6
    """Of a small kernel, beside its bytes."""
    link_bytes_per_s: float = 50e9
    """Pinned copies, each way."""


@dataclass(frozen=True)
class HostCosts:
    """Of the thread that feeds the GPU, a lane and layer. What is called is
    counted in ``tests/engine/test_device_order.py``."""

    replay_s: tuple[float, float] = (6e-6, 9e-6)
    """A graph's launch, at best and at worst."""
    lookup_s: float = 2.1e-6
    """To find the graph, and enter inference mode."""
    launch_s: float = 40e-6
    """All of a lane's turn up to the queued copy."""
    send_s: float = 15e-6
    """To each R-worker."""
    receive_s: float = 35e-6
    """From each, its bytes aside."""
    landing_bytes_per_s: tuple[float, float] = (8e9, 35e9)
    """What of an answer is copied on the host, from memory and within caches."""


@dataclass(frozen=True)
class DeviceModel:
    """One dense model on one card, in 16 bits."""

    spec: ModelSpec
    costs: TokenCosts
    card: Card = Card()
    host: HostCosts = HostCosts()

    def unit_s(self, rows: int) -> float:
        """A layer without its attention, as one graph."""
        products = sum(self._product_s(rows, n, k) for n, k in self._products())
        return products + self._small_s(rows) + (4 + _NUM_SMALL) * self.card.node_s

    def s_step_share(self, rows: int) -> float:
        """Of the matmul rate, that a unit reaches."""
        flops = rows * sum(2.0 * n * k for n, k in self._products())
        return flops / self.unit_s(rows) / self.card.matmul_flops_per_s

    def prefill_share(self, tokens: int) -> float:
        """Of the matmul rate, that one prompt through all layers reaches."""
        attention = self.costs.attention_flops * tokens * tokens / 2
        products = tokens * sum(2.0 * n * k for n, k in self._products())
        layer_s = self.unit_s(tokens) + attention / self.card.attention_flops_per_s
        return (products + attention) / layer_s / self.card.matmul_flops_per_s

    def launches_s(self) -> tuple[float, float]:
        """Of the host, a layer's graph: at best and at worst."""
        best, worst = self.host.replay_s
        return best + self.host.lookup_s, worst + self.host.lookup_s

    def instant_ratio(self, lanes: int, rows: int) -> tuple[float, float]:
        """A step of so many lanes over their S-parts, where R-workers answer at
        once: with answers in the host's caches, and in its memory."""
        cold, warm = (self._instant(lanes, rows, x) for x in self.host.landing_bytes_per_s)
        return warm, cold

    def decode_over_floor(self, rows: int, context: int) -> float:
        """A decode step with KV on the GPU, over what it takes at least: each
        product's weights read or its sums made at the best rates, and KV read.
        No engine is faster than 1."""
        card, layers = self.card, self.spec.num_layers
        kv_bytes = rows * context * self.costs.kv_bytes
        head = (self.spec.vocab_size, self._hidden)
        layer_s = sum(self._least_s(rows, n, k) for n, k in self._products())
        floor_s = layers * layer_s + self._least_s(rows, *head)
        floor_s += kv_bytes / card.memory_bytes_per_s
        attention_s = kv_bytes / (card.memory_bytes_per_s * card.paged_efficiency)
        attention_s += layers * 2 * (card.small_s + card.node_s)
        step_s = layers * self.unit_s(rows) + attention_s + self._product_s(rows, *head)
        return step_s / floor_s

    def _least_s(self, rows: int, columns: int, inner: int) -> float:
        """Of a product, at the card's best rates."""
        flops, num_bytes = 2.0 * rows * columns * inner, 2.0 * columns * inner
        card = self.card
        return max(flops / card.matmul_flops_per_s, num_bytes / card.memory_bytes_per_s)

    @property
    def _hidden(self) -> int:
        return self.spec.hidden_size

    def _products(self) -> Iterator[tuple[int, int]]:
        """Columns and inner dimension of each."""
        inner, ups = self.spec.intermediate_size, 2 if self.spec.gated_mlp else 1
        yield sum(self.spec.qkv_sizes), self._hidden
        yield self._hidden, self.spec.qkv_sizes[0]
        yield ups * inner, self._hidden
        yield self._hidden, inner

    def _product_s(self, rows: int, columns: int, inner: int) -> float:
        """The best of all ways to cut it into tiles; at least what its weights
        take to be read."""
        card = self.card
        each = card.product_share * card.matmul_flops_per_s / card.num_multiprocessors
        ways = []
        for tile_rows, tile_columns, share in _TILES:
            num_tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
            for splits in _SPLITS:
                waves = -(-num_tiles * splits // self.card.num_multiprocessors)
                tile_flops = 2.0 * tile_rows * tile_columns * inner / splits
                adding = 0.0 if splits == 1 else 8.0 * rows * columns * splits
                added_s = adding / self.card.memory_bytes_per_s
                added_s += self.card.small_s if adding else 0.0
                ways.append(waves * tile_flops / (each * share) + added_s)
        return max(min(ways), 2.0 * columns * inner / self.card.memory_bytes_per_s)

    def _small_s(self, rows: int) -> float:
        """All kernels of a unit that aren't products."""
        norms = 2 * 4 * self._hidden
        gate = (3 if self.spec.gated_mlp else 2) * self.spec.intermediate_size
        rotary = 2 * sum(self.spec.qkv_sizes)
        num_bytes = 2.0 * rows * (norms + gate + rotary)
        return num_bytes / self.card.memory_bytes_per_s + _NUM_SMALL * self.card.small_s

    def _instant(self, lanes: int, rows: int, landing_bytes_per_s: float) -> float:
        out_bytes, back_bytes = rows * self.costs.out_bytes, rows * self.costs.back_bytes
        unit_s = self.unit_s(rows)
        times = LaneCosts(
            unit_s=unit_s,
            out_s=out_bytes / self.card.link_bytes_per_s,
            back_s=back_bytes / self.card.link_bytes_per_s,
            launch_s=self.host.launch_s,
            send_s=self.host.send_s,
            receive_s=self.host.receive_s + back_bytes / landing_bytes_per_s,
        )
        num_units = self.spec.num_layers + 1
        return cycle_s(times, lanes, num_units) / (lanes * num_units * unit_s)
