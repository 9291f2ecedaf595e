"""A plan for a pipeline of stages (``--pp``): the plan of its slowest stage, N times.

A stage never waits for another one while there are enough lanes, so ``size`` plans it as a model of
its layers. The slowest is the first, which has embedding and head, or the largest of the others.
Hidden states between stages, a small part of what goes to R-workers, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from cost_model.plans.constraints import s_worker_fits
from cost_model.plans.question import Goal, Setup
from cost_model.plans.size import Sizing
from cost_model.quantities import bytes_text, counted, rate_text, seconds_text
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.stages import layers_of_stages, stage_spec

PlanOf: TypeAlias = Callable[[Setup, Goal], Sizing]


@dataclass(frozen=True)
class StageShare:
    stage: int
    first_layer: int
    num_layers: int
    weight_bytes: int
    """Bytes on each of its GPUs."""
    num_gpus: int
    sockets: int | None
    """R-workers, one per socket. None if there is no plan."""


@dataclass(frozen=True)
class StagedPlan:
    stages: tuple[StageShare, ...]
    batch: int
    lanes: int
    sockets: int
    tokens_per_s: float
    tpot_s: float


def slowest_stage(setup: Setup, goal: Goal, num_stages: int, plan: PlanOf) -> Sizing:
    """The plan of the stage that sets the pace of all.

    Args:
        plan: answers the question about one stage.
    """
    first, *others = layers_of_stages(setup.spec, num_stages)
    asked = _stage_goal(goal, num_stages)
    questions = [replace(setup, spec=stage_spec(setup.spec, first))]
    if others:
        largest = stage_spec(setup.spec, max(others, key=len))
        questions.append(replace(setup, spec=largest, has_ends=False))
    answers = sorted((plan(each, asked) for each in questions), key=_pace)
    slowest, quickest = answers[0], answers[-1]
    chosen = slowest.plan
    if slowest.feasible and chosen is not None:
        fits = s_worker_fits(quickest.system, chosen.lane_batch, chosen.lanes)
        return slowest if fits else quickest
    return slowest


def _pace(sizing: Sizing) -> float:
    return sizing.most_tokens_per_s if sizing.feasible else -1.0


def _stage_goal(goal: Goal, num_stages: int) -> Goal:
    for name in ("lanes", "batch", "max_sockets"):
        count = getattr(goal, name)
        if count is not None and count < num_stages:
            raise ConfigError(
                Given(name, count),
                f": each of the {num_stages} stages of ",
                Given("pp"),
                " has one",
            )
    return replace(
        goal,
        latency_s=None if goal.latency_s is None else goal.latency_s / num_stages,
        tpot_s=None if goal.tpot_s is None else goal.tpot_s / num_stages,
        batch=None if goal.batch is None else goal.batch // num_stages,
        lanes=None if goal.lanes is None else goal.lanes // num_stages,
        max_sockets=None if goal.max_sockets is None else goal.max_sockets // num_stages,
    )


def stage_shares(setup: Setup, num_stages: int, sizing: Sizing) -> tuple[StageShare, ...]:
    """Return each stage's share. ``setup`` is the whole model's, ``sizing`` one stage's."""
    spec, costs = setup.spec, setup.costs
    ends = spec.num_embedding_parameters + spec.num_head_parameters
    shares = []
    for number, layers in enumerate(layers_of_stages(spec, num_stages)):
        num_bytes = sum(costs.layer_bytes(layer) for layer in layers)
        num_bytes += 0 if number else ends * costs.weights.others
        shares.append(
            StageShare(
                number,
                layers.start,
                len(layers),
                int(num_bytes / setup.num_gpus),
                setup.num_gpus,
                None if sizing.plan is None else sizing.plan.sockets,
            )
        )
    return tuple(shares)


def staged_plan(setup: Setup, num_stages: int, sizing: Sizing) -> StagedPlan | None:
    """Return all stages together. None if one of them has no plan."""
    plan = sizing.plan
    if plan is None:
        return None
    return StagedPlan(
        stage_shares(setup, num_stages, sizing),
        batch=plan.batch * num_stages,
        lanes=plan.lanes * num_stages,
        sockets=plan.sockets * num_stages,
        tokens_per_s=plan.expected.tokens_per_s,
        tpot_s=plan.expected.tpot_s * num_stages,
    )


def stages_text(setup: Setup, num_stages: int, sizing: Sizing) -> str:
    return "\n".join(_lines(setup, num_stages, sizing))


def _lines(setup: Setup, num_stages: int, sizing: Sizing) -> Iterator[str]:
    yield f"{setup.spec.name} in {num_stages} pipeline stages (--pp {num_stages})"
    staged = staged_plan(setup, num_stages, sizing)
    if staged is not None:
        yield (
            f"  Together     {counted(staged.sockets, 'socket')}, {staged.batch:,} sequences at "
            f"once in {counted(staged.lanes, 'lane')}; {rate_text(staged.tokens_per_s)} tokens/s, "
            f"{seconds_text(staged.tpot_s)} a token"
        )
    for share in stage_shares(setup, num_stages, sizing):
        last = share.first_layer + share.num_layers - 1
        beside = "" if share.stage else ", embedding and head"
        gpus = f"on each of {share.num_gpus} GPUs" if share.num_gpus > 1 else "on a GPU"
        gpus = "on a socket" if setup.is_without_gpu else gpus
        r_workers = "" if share.sockets is None else f"; {counted(share.sockets, 'R-worker')}"
        yield (
            f"  Stage {share.stage:<7}layers {share.first_layer}-{last}{beside}: weights "
            f"{bytes_text(share.weight_bytes)} {gpus}{r_workers}"
        )
    yield "Below, the plan of the slowest stage, as of a model of its own"


def stages_json(setup: Setup, num_stages: int, sizing: Sizing) -> dict[str, Any] | None:
    staged = staged_plan(setup, num_stages, sizing)
    return None if staged is None else asdict(staged)
