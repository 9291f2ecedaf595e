"""From options to a scheduler: the modes of ``--schedule``, one construction."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.schedule.admission.by_forecast import ByForecast, stabilizing_gain
from fastdecode.schedule.admission.policies import Admission, FixedF, Synchronized
from fastdecode.schedule.admission.stabilized import Stabilized
from fastdecode.schedule.cache.holdings import Holdings
from fastdecode.schedule.cache.retention import Policy
from fastdecode.schedule.cache.stock import Stock
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import HybridControl, HybridOptions
from fastdecode.schedule.lengths import LearntLengths, LengthPredictor
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.plan import Lane
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.reserving.starts import OwnHolders
from fastdecode.schedule.times import StepTime, balanced_loads

__all__ = ["ScheduleOptions", "make_scheduler"]

RESERVE: Final = 0.1
"""With a length quantile: requests start only while more than this share of a holder's
blocks is free, since running ones may outgrow what was reserved."""


def make_scheduler(
    options: ScheduleOptions,
    blocks: tuple[int, ...],
    block_size: int,
    times: StepTime | None = None,
    *,
    opening_steps: int = 0,
    hybrid: HybridOptions | None = None,
    keeps_blocks: bool = False,
    hands_over: bool = False,
    cache_policy: Policy | None = None,
    window: int | None = None,
    swap_threshold: float = 0.25,
    first_part_id: int = 0,
    places: OwnHolders | None = None,
    lengths: LengthPredictor | None = None,
    clock: Clock = time.monotonic,
) -> ContinuousScheduler:
    """Make a scheduler for holders of ``blocks`` KV blocks each, of ``block_size`` tokens.

    Args:
        opening_steps, first_part_id, places: see ``ContinuousScheduler``, ``Starts``.
        times: give load limits, unless ``load_limit`` is given. Without either, the limit is the
            load of a full batch whose starts are spread evenly.
        hybrid: one of the holders is the device, the others are R-workers. Needs ``times``.
        keeps_blocks, hands_over: see ``Holdings``.
        cache_policy, window: see ``Stock``. Split sequences are kept whole, whatever the window.
        swap_threshold: see ``BlockLedger``.
        lengths: forecasts what sequences generate. None to learn it.
        clock: seconds, for the idle time of cached blocks.

    Raises:
        ConfigError, CapacityError: If ``ScheduleOptions.fixed_interval`` does.
    """
    batching, split = options.batching, options.split_tokens
    if lengths is None:
        guess = batching.expected_output_tokens
        lengths = LearntLengths(batching.length_quantile, first_guess=guess)
    stock = Stock(
        len(blocks),
        block_size,
        cache_policy,
        clock,
        only_ends=split is not None,
        window=window if split is None else None,
    )
    cache = Holdings(stock, keeps_blocks=keeps_blocks, hands_over=hands_over)
    home = None if hybrid is None else hybrid.device
    reserve = 0.0 if batching.length_quantile is None else RESERVE
    rows = options.max_closed_rows
    ledger = BlockLedger(blocks, block_size, split, rows, cache, reserve, swap_threshold, home)
    control = None
    if hybrid is not None:
        assert times is not None, "what goes where follows from step times"
        control = HybridControl(hybrid, ledger, lengths, times, batching.max_num_sequences)
    # With a home lane there are no shares: that one may have all.
    sharing = options if home is None else options.with_lanes(1)
    capacity = tuple(num_blocks * block_size for num_blocks in blocks)
    return ContinuousScheduler(
        ledger,
        partial(_lanes, sharing, capacity, times, places, home=home),
        lengths,
        num_lanes=options.num_lanes,
        max_num_sequences=batching.max_num_sequences,
        opening_steps=opening_steps,
        first_part_id=first_part_id,
        places=places,
        hybrid=control,
    )


def _lanes(
    options: ScheduleOptions,
    capacity: tuple[int, ...],
    times: StepTime | None,
    places: OwnHolders | None,
    num_lanes: int,
    *,
    home: HolderId | None,
) -> list[Lane]:
    """Make lanes. Each has its share of all limits. With a home lane each may have all, but for a
    load limit, which away lanes share."""
    one = options.with_lanes(num_lanes) if home is None else options
    num_limited = one.num_lanes if home is None else max(1, num_lanes - 1)
    budget = (
        one.batching.step_tokens - one.lane_size,
        one.batching.chunk_tokens(),
        one.max_closed_rows,
        one.split_tokens,
        one.whole_prompts,
    )
    return [
        Lane(
            _admission(
                one,
                capacity if places is None else places.of_lane(index, capacity),
                times,
                num_limited,
                home,
            ),
            PrefillBudget(*budget),
            index=index,
        )
        for index in range(num_lanes)
    ]


def _admission(
    options: ScheduleOptions,
    capacity: tuple[int, ...],
    times: StepTime | None,
    num_limited: int,
    home: HolderId | None,
) -> Admission:
    """Make a lane's policy. ``num_limited``: lanes that share a load limit, which does not hold for
    ``home``."""
    batching = options.batching
    if batching.schedule == "greedy" or (batching.schedule == "auto" and times is None):
        return Admission()
    if batching.schedule == "synchronized":
        return Synchronized()
    if batching.schedule == "fixed-f":
        return FixedF(options.fixed_interval())
    if batching.load_limit is not None:
        limits = _shares(batching.load_limit // num_limited, capacity, times, home)
        limited = f"the load limit of {batching.load_limit}"
        if num_limited > 1:
            limited += f", shared out to {num_limited} lanes,"
        return Stabilized(
            capacity,
            options.lane_size,
            limits=limits,
            limited=limited,
            headroom=home is None,
        )

    def balance() -> tuple[int, ...] | None:
        return None if times is None else balanced_loads(times, options.lane_size, capacity)

    size = options.lane_size
    if batching.schedule == "auto" and times is not None:
        gain = partial(stabilizing_gain, times, size, capacity)
        return ByForecast(capacity, size, balance=balance, gain=gain, num_lanes=options.num_lanes)
    return Stabilized(capacity, size, balance=balance)


def _shares(
    limit: int, capacity: tuple[int, ...], times: StepTime | None, home: HolderId | None
) -> tuple[int, ...]:
    """Share a lane's load limit out to R-workers by their speed, or else by their memory. None gets
    more than it holds, and ``home`` is not limited."""
    weights = [float(tokens) for tokens in capacity]
    if times is not None:
        weights = [
            tokens / max(times.r_part_s(worker, tokens), 1e-30)
            for worker, tokens in enumerate(capacity)
        ]
    total = sum(weight for worker, weight in enumerate(weights) if worker != home) or 1.0
    return tuple(
        tokens if worker == home else max(1, min(tokens, int(limit * weights[worker] / total)))
        for worker, tokens in enumerate(capacity)
    )
