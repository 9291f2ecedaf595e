"""A plan for a pipeline of stages (``--pp``): the plan of its slowest stage, N times.

A stage never waits for another one while there are enough lanes, so ``size`` plans it as a model of
its layers. The slowest is the first, which has embedding and head, or the largest of the others.
Hidden states between stages, a small part of what goes to R-workers, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from cost_model.plans.constraints import s_worker_fits
from cost_model.plans.question import Goal, Setup
from cost_model.plans.size import Sizing
from cost_model.printing import bytes_text, counted, rate_text, seconds_text
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.stages import layers_of_stages, stage_spec

PlanOf: TypeAlias = Callable[[Setup, Goal], Sizing]


def slowest_stage(setup: Setup, goal: Goal, num_stages: int, plan: PlanOf) -> Sizing:
    """Plan the stage that sets the pace of all. ``plan`` answers the question about one stage."""
    first, *others = layers_of_stages(setup.spec, num_stages)
    asked = _stage_goal(goal, num_stages)
    questions = [replace(setup, spec=stage_spec(setup.spec, first))]
    if others:
        largest = stage_spec(setup.spec, max(others, key=len))
        questions.append(replace(setup, spec=largest, has_ends=False))
    slowest, *rest = sorted(
        (plan(each, asked) for each in questions),
        key=lambda each: each.most_tokens_per_s if each.feasible else -1.0,
    )
    chosen = slowest.plan
    if rest and slowest.feasible and chosen is not None:
        (quicker,) = rest
        if not s_worker_fits(quicker.system, chosen.lane_batch, chosen.lanes):
            return quicker
    return slowest


def _stage_goal(goal: Goal, num_stages: int) -> Goal:
    for name in ("lanes", "batch", "max_sockets"):
        count = getattr(goal, name)
        if count is not None and count < num_stages:
            each = f": each of the {num_stages} stages of "
            raise ConfigError(Given(name, count), each, Given("pp"), " has one")
    return replace(
        goal,
        latency_s=goal.latency_s and goal.latency_s / num_stages,
        tpot_s=goal.tpot_s and goal.tpot_s / num_stages,
        batch=goal.batch and goal.batch // num_stages,
        lanes=goal.lanes and goal.lanes // num_stages,
        max_sockets=goal.max_sockets and goal.max_sockets // num_stages,
    )


def _stages(setup: Setup, num_stages: int, sizing: Sizing) -> Iterator[dict[str, Any]]:
    """Yield each stage's share: bytes of weights on each of its GPUs, and R-workers, one per
    socket. ``setup`` is the whole model's, ``sizing`` one stage's."""
    spec, costs = setup.spec, setup.costs
    ends = spec.num_embedding_parameters + spec.num_head_parameters
    for number, layers in enumerate(layers_of_stages(spec, num_stages)):
        num_bytes = sum(costs.layer_read_bytes(layer, math.inf) for layer in layers)
        num_bytes += 0 if number else ends * costs.weights.others
        yield {
            "stage": number,
            "first_layer": layers.start,
            "num_layers": len(layers),
            "weight_bytes": int(num_bytes / setup.num_gpus),
            "num_gpus": setup.num_gpus,
            "sockets": sizing.plan and sizing.plan.sockets,
        }


def stages_json(setup: Setup, num_stages: int, sizing: Sizing) -> dict[str, Any] | None:
    plan = sizing.plan
    if plan is None:
        return None
    return {
        "stages": tuple(_stages(setup, num_stages, sizing)),
        "batch": plan.batch * num_stages,
        "lanes": plan.lanes * num_stages,
        "sockets": plan.sockets * num_stages,
        "tokens_per_s": plan.expected.tokens_per_s,
        "tpot_s": plan.expected.tpot_s * num_stages,
    }


def stages_text(setup: Setup, num_stages: int, sizing: Sizing) -> Iterator[str]:
    yield f"{setup.spec.name} in {num_stages} pipeline stages (--pp {num_stages})"
    staged = stages_json(setup, num_stages, sizing)
    if staged is not None:
        yield (
            f"  Together     {counted(staged['sockets'], 'socket')}, {staged['batch']:,} sequences "
            f"at once in {counted(staged['lanes'], 'lane')}; {rate_text(staged['tokens_per_s'])} "
            f"tokens/s, {seconds_text(staged['tpot_s'])} a token"
        )
    gpus = f"on each of {setup.num_gpus} GPUs" if setup.num_gpus > 1 else "on a GPU"
    gpus = "on a socket" if setup.is_without_gpu else gpus
    r_workers = "" if sizing.plan is None else f"; {counted(sizing.plan.sockets, 'R-worker')}"
    for each in _stages(setup, num_stages, sizing):
        last = each["first_layer"] + each["num_layers"] - 1
        beside = "" if each["stage"] else ", embedding and head"
        yield (
            f"  Stage {each['stage']:<7}layers {each['first_layer']}-{last}{beside}: weights "
            f"{bytes_text(each['weight_bytes'])} {gpus}{r_workers}"
        )
    yield "Below, the plan of the slowest stage, as of a model of its own"
