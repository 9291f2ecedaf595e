"""Prediction of a steady batch, which ``fastdecode bench`` compares with the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cost_model.predict import System
from cost_model.traces import Count
from cost_model.workload import Workload
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.json_file import read_object

MAX_PLAN_BYTES = 16 << 20


@dataclass(frozen=True)
class SteadyBatch:
    """Sequences with the same context, none of which starts or ends."""

    batch: int
    lanes: int
    r_workers: int
    context_tokens: int


def predict_steady(system: System, steady: SteadyBatch) -> dict[str, float]:
    """Return seconds of a step, tokens/s, and a step's seconds of S-part and busiest R-worker."""
    # Outputs spread evenly over 1 .. 2C-1 tokens have the mean context C. No prompt starts.
    workload = Workload(0, max(1, 2 * steady.context_tokens - 1))
    at_context = replace(system, workload=workload)
    lane_batch = -(-steady.batch // steady.lanes)
    step = at_context.predict(lane_batch, steady.lanes, steady.r_workers)
    lane, layers = at_context.lane(lane_batch, steady.r_workers), system.costs.num_layers
    return {
        "step_s": step.step_s,
        "tokens_per_s": steady.batch / step.step_s,
        "s_part_s": steady.lanes * layers * lane.s_s,
        "r_part_s": steady.lanes * layers * lane.r_s,
    }


class _Plan(msgspec.Struct):
    batch: Count
    lanes: Count
    sockets: Count


class _Question(msgspec.Struct):
    model: str
    dtype: str
    kv_dtype: str
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]
    output_tokens: Count
    start_interval_steps: Count


class PlanFile(msgspec.Struct):
    """The part that is read of a file of ``fastdecode size --json`` or ``--emit``."""

    format: Literal["fastdecode.plan"]
    version: Literal[1]
    question: _Question
    plan: _Plan | None

    @property
    def steady(self) -> SteadyBatch:
        plan, question = self.plan, self.question
        assert plan is not None, "as read_plan has it"
        workload = Workload(
            question.prompt_tokens, question.output_tokens, question.start_interval_steps
        )
        context = round(workload.mean_context_tokens)
        return SteadyBatch(plan.batch, plan.lanes, plan.sockets, context)


def read_plan(path: Path) -> PlanFile:
    """Raises ConfigError: If the file isn't such a plan, or its question was infeasible."""
    given = Given("plan", str(path))
    tree = read_object(
        path, most_bytes=MAX_PLAN_BYTES, refuse=lambda why: ConfigError(given, f": {why}")
    )
    try:
        read = msgspec.convert(tree, PlanFile)
    except msgspec.ValidationError as error:
        why = f" isn't a plan of this release: {error}. Write it with fastdecode size --json"
        raise ConfigError(given, why) from None
    if read.plan is None:
        raise ConfigError(given, " holds no plan: what it asks is infeasible")
    return read


def scale_down(
    planned: SteadyBatch, *, cores: int, kv_tokens: int, max_batch: int, one_lane: bool
) -> SteadyBatch:
    """Return the plan's twin on a smaller machine, whose batch fits, with its contexts if they can.
    ``one_lane``: S-part and R-part share the cores, so that nothing overlaps."""
    r_workers = min(planned.r_workers, cores)
    context = max(16, min(planned.context_tokens, kv_tokens // (2 * r_workers)))
    batch = max(r_workers, min(planned.batch, max_batch, kv_tokens // (2 * context)))
    lanes = 1 if one_lane else min(planned.lanes, batch)
    return SteadyBatch(batch, lanes, r_workers, context)
