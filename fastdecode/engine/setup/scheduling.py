"""What steps will be like: how many lanes, which graphs, and the memory of both; and the scheduler
that follows from it and from what holders offer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.groups import Batching
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import longest_window
from fastdecode.engine.setup.memory import (
    GRAPH_BYTES,
    UNIT_KERNELS,
    FreeMemory,
    KVDemand,
    MemoryPlan,
    StepSizes,
    plan_memory,
)
from fastdecode.schedule.cache.retention import Retention, costs_of
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import MAX_LANES as MAX_HYBRID_LANES
from fastdecode.schedule.hybrid.control import HybridOptions
from fastdecode.schedule.hybrid.forecast import Guess
from fastdecode.schedule.lanes import MAX_AUTO_LANES
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.reserving.starts import OwnHolders
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.codec import MAX_BODY_BYTES
from sworker.graphs import MAX_GRAPH_ROWS, MAX_GRAPHS, Buckets, LaneGraphs
from sworker.whole import slices_of

if TYPE_CHECKING:
    from fastdecode.engine.setup.resolve import ResolvedConfig

_PROMPT_ROWS = 64
"""Rows of a short prompt, in a step that decodes: a longer one computes for longer than
its launches take."""
LAYER_KERNELS = 11  # of a layer with its attention, at most, where kernels are fused
_GRAPHS_SHARE = 32  # CUDA graphs may take one part in 32 of the device's memory
_CLOSED_BYTES = MAX_BODY_BYTES // (2 * MAX_AUTO_LANES)
"""Bytes of a layer's queries that go to closed parts of split sequences: of a lane's
prompts, and as many of all decoding sequences. So they fit into one message
even where lanes have become one whose prompts were booked apart."""

_HELD_STEPS = 8  # prompts under way are held up to the tokens of 8 steps


class LaneLimits(NamedTuple):
    """Numbers of lanes that there may be."""

    first: int
    fewest: int
    most: int

    @property
    def adapt(self) -> bool:
        return self.fewest < self.most


@dataclass(frozen=True)
class Steps:
    """Forecast of steps: the number of lanes, the graphs, and the memory of both."""

    config: EngineConfig
    spec: ModelSpec
    dtype: DType  # dtype of activations
    transport: str
    free: FreeMemory
    uses_graphs: bool
    held_token_bytes: int = 0
    """K and V of a token of a prompt that the S-worker attends and R-workers
    hold. 0 if these attend prompts, or the device can't hold their dtype."""
    num_stages_here: int = 1  # stages that share the memory of this one's device
    num_stages_on_host: int = 1  # stages that share this host's memory
    kv_token_bytes: int = 0
    """K and V of a token that this S-worker's device keeps."""
    usual_lanes: int = 1
    """Lanes where S-part and R-part don't overlap: the stages that do."""
    weight_dtype: DType | None = None
    """Dtype of weights in memory. None if it is that of activations."""

    def plan(self, *, may_overlap: bool) -> tuple[LaneLimits, ScheduleOptions, MemoryPlan]:
        """As many lanes as may be of use and there is memory for.

        Raises:
            ConfigError: If there isn't even enough for the fewest.
        """
        refusal: ConfigError | None = None
        for lanes in self._choices(may_overlap):
            try:
                return self._planned(lanes)
            except ConfigError as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _choices(self, may_overlap: bool) -> Iterator[LaneLimits]:
        config, asked = self.config, self.config.batching.lanes
        if self.config.r_part.kv_placement == "hybrid":
            yield LaneLimits(1, 1, MAX_HYBRID_LANES)
            return
        num_stages = self.config.s_part.pp
        if asked is not None or not may_overlap:
            # On shared cores stages take turns, each with all of them: every
            # lane more would read the weights once more.
            fixed = asked or (num_stages if config.r_part.swaps else self.usual_lanes)
            yield LaneLimits(fixed, fixed, fixed)
            return
        # Two a stage: one at its S-worker, one at its R-workers. Fixed intervals
        # are computed for this number of lanes.
        first = 2 * num_stages
        if self.config.batching.schedule != "fixed-f":
            for most in range(max(MAX_AUTO_LANES, first), 1, -1):
                yield LaneLimits(min(first, most), 1, most)
        yield LaneLimits(first, first, first)
        yield LaneLimits(num_stages, num_stages, num_stages)

    def _planned(self, lanes: LaneLimits) -> tuple[LaneLimits, ScheduleOptions, MemoryPlan]:
        config = self.config
        on_gpu = self.free.device_bytes is not None
        batching = _batching(config, lanes.first, on_gpu=on_gpu)
        row_elements = max(each.num_q_heads * each.head_dim for each in self.spec.attention)
        fit = _CLOSED_BYTES // (row_elements * self.dtype.size_bytes)
        closed_rows = max(1, min(fit, ScheduleOptions.max_closed_rows))
        schedule = ScheduleOptions(batching, config.r_part.split_tokens, closed_rows)
        graphs: tuple[LaneGraphs, ...] = ()
        if self.uses_graphs:
            graphs = lane_graphs(config, self.spec.num_layers, lanes.most)
        buckets = Buckets.choose(graphs, self.max_graphs)
        # Of one prompt as long as they may be, or of several steps' prompts, if one may take
        # several steps.
        longest, held_bytes = self.spec.max_model_len, 0
        if longest > batching.chunk_tokens():
            held_bytes = self.held_token_bytes * min(longest, _HELD_STEPS * batching.step_tokens)
        sizes = StepSizes(
            num_lanes=lanes.most,
            step_tokens=batching.step_tokens,
            logit_rows=-(-batching.max_num_sequences // lanes.fewest),
            itemsize=self.dtype.size_bytes,
            weight_itemsize=(self.weight_dtype or self.dtype).size_bytes,
            num_shards=config.s_part.tp,
            num_graphs=buckets.num_graphs(graphs),
            num_kernels=buckets.num_kernels(graphs),
            graph_rows=MAX_GRAPH_ROWS if self.max_graphs else 0,
            held_bytes=held_bytes,
        )
        memory = plan_memory(
            self.spec,
            sizes,
            self._kv_demand(lanes.most, schedule),
            self.free,
            gpu_memory_fraction=config.s_part.gpu_memory_fraction,
        )
        return lanes, schedule, memory

    def _kv_demand(self, num_lanes: int, schedule: ScheduleOptions) -> KVDemand:
        r_part, swaps = self.config.r_part, self.config.r_part.swaps
        of_stage = r_part.r_workers + self.config.cluster.spare_r_workers
        num_threads = of_stage * self.config.s_part.pp
        stored_bytes = self.kv_token_bytes * schedule.stored_tokens(r_part.block_size)
        # With replicas each device's cache has another one, on the host.
        on_host = 1 + r_part.num_replicas if self.free.device_bytes is None else 1
        of_devices = self.num_stages_here * on_host
        in_process = {"local": of_devices, "inline": num_threads, "inproc": num_threads}
        return KVDemand(
            on_device=self.transport == "local",
            num_caches=in_process.get(self.transport, 0),
            cache_bytes=_bytes(r_part.kv_memory_gb),
            is_on_both=r_part.kv_placement == "hybrid",
            device_cache_bytes=_bytes(r_part.device_kv_gb),
            swapped_lanes=num_lanes if swaps else 0,
            stored_bytes=stored_bytes if swaps else 0,
            num_stages=self.num_stages_on_host,
        )

    @property
    def max_graphs(self) -> int:
        if not self.uses_graphs:
            return 0
        total = self.free.device_total_bytes
        each = max(GRAPH_BYTES, UNIT_KERNELS * self.free.graph_node_bytes)
        return min(MAX_GRAPHS, total // _GRAPHS_SHARE // each) if total else MAX_GRAPHS


def lane_graphs(config: EngineConfig, num_layers: int, num_lanes: int) -> tuple[LaneGraphs, ...]:
    """What is captured for each lane: what may occur, and no more.

    Lane l exists where there are l + 1 lanes or more, which share all sequences
    evenly; a short prompt may come to its rows. With KV on both sides the home
    lane may have all sequences, and so may the first away lane; the home lane's
    decode steps are whole graphs, or slices of some layers.
    """
    placement, most = config.r_part.kv_placement, config.batching.max_num_sequences
    is_whole = placement == "gpu"
    units, kernels = num_layers + 1, LAYER_KERNELS * num_layers
    lanes = []
    for lane in range(num_lanes):
        num_shares = max(1, lane) if placement == "hybrid" else lane + 1
        rows = min(MAX_GRAPH_ROWS, -(-most // num_shares) + _PROMPT_ROWS)
        lanes.append(LaneGraphs(rows, units + is_whole, (1 + is_whole) * kernels))
    if placement == "hybrid":
        home = units + 1 + len(slices_of(num_layers))
        lanes[0] = LaneGraphs(lanes[0].max_rows, home, 3 * kernels)
    return tuple(lanes)


def _batching(config: EngineConfig, num_lanes: int, *, on_gpu: bool) -> Batching:
    """Return the options with a schedule, a chunk, and ``num_lanes``."""
    asked, s_part = config.batching, config.s_part
    schedule = asked.schedule
    if schedule == "auto":
        if asked.load_limit is not None:
            schedule = "stabilized"
        elif num_lanes <= s_part.pp or config.r_part.swaps:
            # No more lanes than stages: no stage's S-part and R-part overlap. The forecast
            # knows no lanes that are swapped.
            schedule = "greedy"
    chunk = asked.chunk_tokens(on_gpu=on_gpu)
    return replace(asked, schedule=schedule, lanes=num_lanes, prefill_chunk=chunk)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def schedule_for(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    holders: Seq[Holder],
    blocks: tuple[int, ...],
    times: MeasuredTimes | None,
    *,
    is_instance: bool,
    first_part_id: int,
) -> ContinuousScheduler:
    """Return the scheduler of an engine.

    Args:
        blocks: KV blocks of each of ``holders``, 0 of a lost one.
        is_instance: Others fetch its prompts.
    """
    block_size, placement = resolved.config.r_part.block_size, resolved.config.r_part.kv_placement
    at_once = all(holder.answers_at_once for holder in holders)
    # Other stages and instances read whole sequences.
    is_whole = is_instance or len(resolved.layers) > 1
    device = HolderId(len(holders) - 1)  # with KV on both sides
    guess = Guess(holders[device].token_bytes)
    return make_scheduler(
        resolved.schedule,
        blocks,
        block_size,
        times,
        opening_steps=0 if at_once else 1,
        hybrid=HybridOptions(device, guess) if placement == "hybrid" else None,
        keeps_blocks=resolved.config.keeps_blocks,
        hands_over=is_instance,
        cache_policy=Retention(block_size, costs_of(spec)),
        window=None if is_whole else longest_window(spec.attention),
        swap_threshold=resolved.config.cache.swap_threshold,
        first_part_id=first_part_id,
        places=OwnHolders() if resolved.config.r_part.swaps else None,
    )


def measured_times(resolved: ResolvedConfig) -> MeasuredTimes | None:
    """Times of steps, for what depends on them: the number of lanes, the policy, or the
    place of KV. None if nothing does, and steps aren't timed for it."""
    is_greedy = resolved.schedule.batching.schedule == "greedy"
    is_hybrid = resolved.config.r_part.kv_placement == "hybrid"
    return MeasuredTimes() if resolved.lanes.adapt or is_hybrid or not is_greedy else None
