"""From a resolved configuration, and what holders offer, to a scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import longest_window
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.schedule.cache.costs import costs_of
from fastdecode.schedule.cache.retention import Retention
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import HybridOptions
from fastdecode.schedule.hybrid.forecast import Guess
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.reserving.holder_choice import OwnHolders
from fastdecode.schedule.times import MeasuredTimes


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
    """
    Args:
        spec: of the whole model.
        blocks: KV blocks of each of ``holders``; 0: it is lost.
        times: of steps, as ``measured_times`` makes them.
        is_instance: others fetch its prompts.
        first_part_id: see ``make_scheduler``.
    """
    block_size = resolved.config.r_part.block_size
    at_once = all(holder.answers_at_once for holder in holders)
    return make_scheduler(
        resolved.schedule,
        blocks,
        block_size,
        times,
        opening_steps=0 if at_once else 1,
        hybrid=_hybrid_options(resolved, holders),
        keeps_blocks=resolved.config.keeps_blocks,
        cache_policy=Retention(block_size, costs_of(spec)),
        window=_window(resolved, spec, is_instance=is_instance),
        swap_threshold=resolved.config.cache.swap_threshold,
        first_part_id=first_part_id,
        places=OwnHolders() if resolved.config.r_part.swaps else None,
    )


def _window(resolved: ResolvedConfig, spec: ModelSpec, *, is_instance: bool) -> int | None:
    """Tokens that the layer with the widest view sees; None: all, or other stages or
    instances read sequences, which are whole for that."""
    is_whole = is_instance or len(resolved.layers) > 1
    return None if is_whole else longest_window(spec.attention)


def measured_times(resolved: ResolvedConfig) -> MeasuredTimes | None:
    """Times of steps, for what depends on them: the number of lanes, the policy, or the
    place of KV; None: nothing does, and steps aren't timed for it."""
    is_greedy = resolved.schedule.batching.schedule == "greedy"
    is_hybrid = resolved.config.r_part.kv_placement == "hybrid"
    return MeasuredTimes() if resolved.adapts_lanes or is_hybrid or not is_greedy else None


def lane_control(resolved: ResolvedConfig, times: MeasuredTimes) -> LaneControl | None:
    """What decides how many lanes there are; None: the user has."""
    if not resolved.adapts_lanes:
        return None
    num_lanes, num_stages = resolved.schedule.num_lanes, len(resolved.layers)
    return LaneControl(times, num_lanes, most=resolved.most_lanes, num_stages=num_stages)


def _hybrid_options(resolved: ResolvedConfig, holders: Seq[Holder]) -> HybridOptions | None:
    """Of KV on both sides: the device is the last of the holders."""
    if resolved.config.r_part.kv_placement != "hybrid":
        return None
    device = HolderId(len(holders) - 1)
    return HybridOptions(device, Guess(holders[device].token_bytes))
