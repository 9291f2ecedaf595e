"""The search for a plan: candidates, the choice among them, and what stands in
the way if there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from cost_model.hardware import Gpu
from cost_model.plans.constraints import (
    Constraint,
    Promises,
    best_effort_constraints,
    gpu_busy_constraints,
    r_memory_bytes,
    s_memory_bytes,
    s_worker_fits,
)
from cost_model.plans.question import MAX_BATCH, Goal, Setup, split_counts
from cost_model.predict import MAX_LANES, StepPrediction, System
from cost_model.quantities import counted, rate_text, seconds_text
from fastdecode.core.errors import ConfigError

# A lane more must save this part of the sockets.
LANE_SAVING = 0.20

ConstraintsOf: TypeAlias = Callable[[System, int, int, Promises], tuple[Constraint, ...]]


@dataclass(frozen=True)
class Plan:
    """One way to run the workload."""

    lane_batch: int
    """Sequences that pass the GPU at once: the paper's B."""
    lanes: int
    sockets: int
    """R-workers, one a socket, spare ones included."""
    spare_sockets: int
    """Of these, how many may be lost."""
    sockets_per_host: int
    expected: StepPrediction
    fast: StepPrediction
    """If every input is better than thought by its own error."""
    slow: StepPrediction
    """If every input is worse than thought by its own error."""
    constraints: tuple[Constraint, ...]
    kv_bytes: float
    """KV cache of all R-workers."""
    s_memory_bytes: float
    load_limit_tokens: int
    """W_lim: cached tokens of one lane that the R-workers keep up with."""

    @property
    def batch(self) -> int:
        return self.lane_batch * self.lanes

    @property
    def hosts(self) -> int:
        return -(-self.sockets // self.sockets_per_host)

    @property
    def kv_bytes_per_host(self) -> float:
        """What a full host must hold after the spare ones are lost."""
        return (
            self.kv_bytes
            / (self.sockets - self.spare_sockets)
            * min(self.sockets_per_host, self.sockets)
        )

    @property
    def binding(self) -> Constraint:
        """The constraint that asks for the most sockets."""
        return max(self.constraints, key=lambda row: row.min_sockets or 0)


def find_plans(
    system: System, goal: Goal, promises: Promises, constraints_of: ConstraintsOf
) -> Iterator[Plan]:
    """The best plan of every batch that has any, by rising batch."""
    for lane_batches in _batches(goal, system.s.max_batch):
        chosen: Plan | None = None
        for lanes, lane_batch in lane_batches:
            plan = plan_of(
                system, goal, lane_batch, lanes, constraints_of(system, lane_batch, lanes, promises)
            )
            if plan is None:
                continue
            if chosen is None or _better_lanes(plan, chosen):
                chosen = plan
        if chosen is not None:
            yield chosen


def _batches(goal: Goal, max_batch: int | None) -> Iterator[list[tuple[int, int]]]:
    """(lanes, lane batch) candidates: those of one yield compete as to lanes,
    the yields compete as to batch.

    Raises:
        ConfigError: the batch that was asked for is beyond what was measured.
    """
    lanes = range(1, MAX_LANES + 1) if goal.lanes is None else (goal.lanes,)
    if goal.batch is not None:
        candidates = [(k, -(-goal.batch // k)) for k in lanes if k <= goal.batch]
        within = [(k, batch) for k, batch in candidates if max_batch is None or batch <= max_batch]
        if not within:
            raise ConfigError(
                f"--batch {goal.batch}: the S-part was measured up to {max_batch} tokens in a "
                "lane; calibrate with larger batches"
            )
        yield within
        return
    # 1, 2, 3, 4, 6, 8, 12, …: with every batch, twice that batch.
    exponent = 0
    while 1 << exponent <= (max_batch or MAX_BATCH):
        for lane_batch in (1 << exponent, 3 << exponent - 1) if exponent else (1,):
            if max_batch is None or lane_batch <= max_batch:
                yield [(k, lane_batch) for k in lanes]
        exponent += 1


def _better_lanes(more: Plan, fewer: Plan) -> bool:
    """Whether a plan of the same batch with more lanes is worth having."""
    if more.expected.tokens_per_s < fewer.expected.tokens_per_s * (1 - 1e-9):
        return False
    if more.expected.tokens_per_s > fewer.expected.tokens_per_s * 1.01:
        return True
    return more.sockets <= (1.0 - LANE_SAVING) * fewer.sockets


def plan_of(
    system: System, goal: Goal, lane_batch: int, lanes: int, rows: tuple[Constraint, ...]
) -> Plan | None:
    needs = [row.min_sockets for row in rows if row.min_sockets is not None]
    if len(needs) < len(rows):
        return None
    sockets = max(1, *needs) + goal.survive
    if goal.max_sockets is not None and sockets > goal.max_sockets:
        return None
    return Plan(
        lane_batch=lane_batch,
        lanes=lanes,
        sockets=sockets,
        spare_sockets=goal.survive,
        sockets_per_host=system.r.sockets_per_host,
        expected=system.predict(lane_batch, lanes, sockets),
        fast=system.scaled(-1).predict(lane_batch, lanes, sockets),
        slow=system.scaled(+1).predict(lane_batch, lanes, sockets),
        constraints=rows,
        kv_bytes=r_memory_bytes(system, lane_batch, lanes) * (1 + goal.replicas),
        s_memory_bytes=s_memory_bytes(system, lane_batch, lanes),
        load_limit_tokens=system.load_limit_tokens(lane_batch, sockets - goal.survive),
    )


def choose(plans: Iterable[Plan], min_gain: float) -> Plan | None:
    """The smallest batch whose double, and whatever lies between, gains less
    than ``min_gain``.

    Args:
        plans: by rising batch; taken no further than needed.
    """
    window: deque[Plan] = deque()
    for plan in plans:
        while window and plan.lane_batch > 2 * window[0].lane_batch:
            if _gains_less(window, min_gain):
                return window[0]
            window.popleft()
        window.append(plan)
    while window and not _gains_less(window, min_gain):
        window.popleft()
    return window[0] if window else None


def _gains_less(window: Sequence[Plan], min_gain: float) -> bool:
    """Whether nobody gives ``min_gain`` more tokens than the first."""
    most = max(plan.expected.tokens_per_s for plan in window)
    return most < (1.0 + min_gain) * window[0].expected.tokens_per_s


# --- infeasible
# ------------------------------------------------------------------------------


def diagnose(
    setup: Setup, system: System, goal: Goal, promises: Promises, plan: Plan | None
) -> tuple[tuple[Constraint, ...], str]:
    """What stands in the way: the candidate that breaks the fewest constraints,
    and which these are."""
    best: tuple[Constraint, ...] | None = None
    for candidates in _batches(goal, system.s.max_batch):
        for lanes, lane_batch in candidates:
            if lanes == 1 and goal.lanes is None:
                continue
            broken = tuple(
                _capped(row, goal)
                for row in gpu_busy_constraints(system, lane_batch, lanes, promises)
                if _capped(row, goal).min_sockets is None
            )
            if best is None or len(broken) < len(best):
                best = broken
    assert best is not None
    if plan is not None:
        step = plan.expected
        return best, (
            f"without keeping the GPU busy: {counted(plan.batch, 'sequence')} on "
            f"{counted(plan.sockets, 'socket')} give {rate_text(step.tokens_per_s)} tokens/s; the "
            f"{step.limit} sets the pace and the GPU is busy {step.s_utilisation:.0%} of the time"
        )
    return best, _what_must_give(setup, system, goal)


def _capped(row: Constraint, goal: Goal) -> Constraint:
    """A need beyond the sockets at hand is as good as none that satisfies."""
    if (
        goal.max_sockets is None
        or row.min_sockets is None
        or row.min_sockets + goal.survive <= goal.max_sockets
    ):
        return row
    detail = (
        f"{row.min_sockets + goal.survive} sockets needed, {goal.max_sockets} at hand; {row.detail}"
    )
    return replace(row, min_sockets=None, detail=detail)


def _what_must_give(setup: Setup, system: System, goal: Goal) -> str:
    """Nothing runs: the least relaxation that would."""
    if not s_worker_fits(system, 1, 1):
        return _enough_gpus(setup)
    relaxed = Promises(float("inf"), goal.headroom, goal.replicas)
    lanes = range(1, MAX_LANES + 1) if goal.lanes is None else (goal.lanes,)
    plans = [
        p
        for k in lanes
        for p in find_plans(system, replace(goal, lanes=k), relaxed, best_effort_constraints)
    ]
    if not plans:
        return "more sockets than --max-sockets allows, or another --batch"
    fastest = min(plans, key=lambda plan: plan.expected.step_s)
    return (
        f"the shortest step that this hardware can make is {seconds_text(fastest.expected.step_s)} "
        f"a token ({seconds_text(fastest.expected.latency_s)} a sequence), with "
        f"{counted(fastest.batch, 'sequence')} on {counted(fastest.sockets, 'socket')}: ask for no "
        "less"
    )


def _enough_gpus(setup: Setup) -> str:
    if not isinstance(setup.gpu, Gpu):
        return "a device with more memory: the weights don't fit into the measured one"
    for num_gpus in split_counts(setup.spec, setup.num_gpus):
        system = replace(setup, num_gpus=num_gpus).system()
        if s_worker_fits(system, 1, 1):
            return f"--gpus {num_gpus}: the weights fit into {num_gpus} x {setup.gpu.name}"
    return (
        f"a larger GPU: the weights don't fit into as many {setup.gpu.name} as its heads can be "
        "split over"
    )
