"""What an engine reports besides its totals: how it is, and each holder.
Values only, that another thread or process may look at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.wire.transport import loss


@dataclass(frozen=True)
class HolderFigures:
    """A holder, which is an R-worker wherever there are R-workers."""

    name: str
    lost: str | None
    """Why it is lost, without its name; None: it isn't."""
    kv_blocks: int
    kv_blocks_used: int
    """Reserved, or in use: not those that are only kept for requests to come."""
    load_tokens: int
    """Cached for sequences that run."""
    busy_s: float
    """Its compute, summed over all steps."""


@dataclass(frozen=True)
class EngineFigures:
    lanes: int
    r_workers: tuple[HolderFigures, ...]

    def lost_with(self, why: str) -> EngineFigures:
        """Of an engine that is gone: so are its holders, and nothing of them is in use."""
        gone = (
            replace(each, lost=each.lost or why, kv_blocks_used=0, load_tokens=0)
            for each in self.r_workers
        )
        return replace(self, r_workers=tuple(gone))


def figures_of(
    stats: EngineStats, scheduler: ContinuousScheduler, fleet: HolderPool
) -> EngineFigures:
    """As they are between two steps."""
    loads = _loads(scheduler)
    lost = fleet.lost
    holders = tuple(
        _holder(holder, stats, scheduler, fleet, lost.get(holder), loads[holder])
        for holder in map(HolderId, range(len(fleet)))
    )
    return EngineFigures(len(scheduler.lanes), holders)


def _holder(
    holder: HolderId,
    stats: EngineStats,
    scheduler: ContinuousScheduler,
    fleet: HolderPool,
    lost: WorkerError | None,
    load: int,
) -> HolderFigures:
    num_blocks = scheduler.ledger.capacity.blocks(holder)
    used = num_blocks - scheduler.ledger.available_blocks(holder) if lost is None else 0
    name = fleet.peer(holder)
    why = None if lost is None else loss(name, lost).removeprefix(f"{name} is lost: ")
    return HolderFigures(name, why, num_blocks, used, load, stats.r_busy_each_s[holder])


def _loads(scheduler: ContinuousScheduler) -> Counter[HolderId]:
    """Tokens that each holder has cached for sequences that run."""
    loads: Counter[HolderId] = Counter()
    for lane in scheduler.lanes:
        for run in lane.running.values():
            for part in run.residence.parts:
                cached = run.sequence.num_present - part.first_token
                loads[part.holder] += max(0, min(part.num_tokens, cached))
    return loads
