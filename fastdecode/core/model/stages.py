"""Which stage of a pipeline has which of a model's layers. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.spec import ModelSpec


def layers_of_stages(
    spec: ModelSpec, num_stages: int, counts: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Each stage's layers. The first stage has embedding and head beside its own, and so fewer
    where those are large.

    Args:
        counts: Layers of each stage. None balances them: the stage that reads the most weights
            per step reads as few as possible.

    Raises:
        ConfigError: If there are fewer layers than stages, or ``counts`` don't add up.
    """
    if counts is not None:
        return _counted(spec, num_stages, counts)
    if num_stages > spec.num_layers:
        raise ConfigError(
            Given("pp", num_stages),
            f": {spec.name} has {spec.num_layers} layers, and every stage needs one: choose a pp "
            "that isn't greater",
        )
    # Of the token embedding a step reads a few rows; where the head shares it, all.
    head = spec.num_head_parameters
    if spec.tied_embeddings:
        head += spec.vocab_size * spec.embedding_size
    costs = [float(spec.layer_parameters(layer)) for layer in range(spec.num_layers)]
    return split_layers(costs, num_stages, float(head))


def stage_spec(spec: ModelSpec, layers: range) -> ModelSpec:
    """The model of a stage that has these of a whole model's layers, one after
    the other; its first layer is called 0."""
    assert layers and layers.step == 1 and layers.stop <= spec.num_layers
    return replace(
        spec,
        num_layers=len(layers),
        attention=spec.attention[layers.start : layers.stop],
        ropes=spec.ropes[layers.start : layers.stop],
        layer_q_heads=spec.layer_q_heads[layers.start : layers.stop],
        mlps=spec.mlps[layers.start : layers.stop],
        mlp_limits=spec.mlp_limits[layers.start : layers.stop],
        expert_limits=spec.expert_limits[layers.start : layers.stop],
    )


def _counted(spec: ModelSpec, num_stages: int, counts: Sequence[int]) -> tuple[range, ...]:
    told = ",".join(map(str, counts))
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != spec.num_layers:
        raise ConfigError(
            Given("pp_layers", told),
            f": give {num_stages} numbers, one a stage, each 1 or more, that add up to the "
            f"{spec.num_layers} layers of {spec.name}",
        )
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def split_layers(
    costs: Sequence[float], num_stages: int, first_cost: float = 0.0
) -> tuple[range, ...]:
    """Cut layers into ``num_stages`` stretches, none empty, such that the
    dearest costs as little as can be; of such cuts, the most even one.

    Args:
        costs: of each layer; there are as many as stages, at least.
        first_cost: of what the first stage does beside its layers: the head.
    """
    assert 1 <= num_stages <= len(costs)
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)

    def cost_of(stage: int, first: int, end: int) -> float:
        return ends[end] - ends[first] + (first_cost if stage == 0 else 0.0)

    # best[i]: the dearest stretch, and the sum of squares, of layers 0 to i - 1
    # in the stages so far, and where each of those ends.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        then: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(costs) - (num_stages - stage - 1) + 1):
            most: tuple[float, float, tuple[int, ...]] = (math.inf, math.inf, ())
            for first, (dearest, squares, cuts) in best.items():
                if first < end and (cost := cost_of(stage, first, end)) <= most[0]:
                    found = (max(dearest, cost), squares + cost * cost, (*cuts, end))
                    most = min(most, found)
            then[end] = most
        best = then
    _, _, cuts = best[len(costs)]
    firsts = (0, *cuts[:-1])
    return tuple(range(first, end) for first, end in zip(firsts, cuts, strict=True))
