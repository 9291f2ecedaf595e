"""Which features work together.

``FEATURES`` are switches of an engine, each turned on by one option.
``REFUSALS`` are the pairs that an engine refuses, with the reason: either the
two contradict each other, or nobody has built the pair yet. ``TRIPLES`` work in
pairs alone. Everything else is accepted. ``EngineConfig`` checks the tables,
``fastdecode doctor --features`` and ``docs/reference/features.md`` print them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.core.errors import ConfigError, Given

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A switch of an engine."""

    name: str
    option: str
    """The option that turns it on."""
    is_value: Callable[[Any], bool]
    """Whether a value of the option turns it on."""
    example: Options
    """The fewest options that turn it on."""

    def is_on(self, options: Options) -> bool:
        return self.is_value(options[self.option])


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _above(number: int) -> Callable[[Any], bool]:
    return lambda value: value > number


def _is_given(value: Any) -> bool:
    return value is not None and value != ()


def _are_threads(instances: Sequence[str]) -> bool:
    return any(":" not in each for each in instances)


def _are_ranks(instances: Sequence[str]) -> bool:
    return any(":" in each and "://" not in each for each in instances)


def _on_gpu(**more: Any) -> dict[str, Any]:
    return {"kv_placement": "gpu", **more}


_TWO = ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5601")

FEATURES: Mapping[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("tensor parallelism", "tp", _above(1), {"tp": 2}),
        Feature("stages", "pp", _above(1), {"pp": 2}),
        Feature("prompt stages", "prompt_pp", _above(0), {"prompt_pp": 1}),
        Feature("device KV", "kv_placement", _is("gpu"), _on_gpu()),
        Feature("hybrid KV", "kv_placement", _is("hybrid"), {"kv_placement": "hybrid"}),
        Feature("swap", "kv_placement", _is("swap"), {"kv_placement": "swap", "pp": 3}),
        Feature("host tier", "cache_memory_gb", _is_given, _on_gpu(cache_memory_gb=1.0)),
        Feature("int4 KV", "kv_dtype", lambda name: name.lower() == "int4", {"kv_dtype": "int4"}),
        Feature("shared heads", "r_partition", _is("heads"), {"r_partition": "heads"}),
        Feature("split sequences", "split_tokens", _is_given, {"split_tokens": 1024}),
        Feature("replicas", "replicas", bool, {"replicas": 1}),
        Feature("replicas on disk", "replicas", _is("disk"), {"replicas": "disk"}),
        Feature("standby", "spare_r_workers", _above(0), {"spare_r_workers": 1}),
        Feature("prefix cache", "prefix_cache", _is("on"), {"prefix_cache": "on"}),
        Feature("disk tier", "cache_disk", _is_given, {"cache_disk": "DIR", "cache_disk_gb": 1.0}),
        Feature("instances", "instances", _are_threads, {"instances": ("prefill", "decode")}),
        Feature("instance ranks", "instances", _are_ranks, {"instances": ("both:1", "both:1")}),
        Feature("addresses", "r_worker_addresses", _is_given, {"r_worker_addresses": _TWO}),
        Feature("stabilized", "schedule", _is("stabilized", "fixed-f"), {"schedule": "stabilized"}),
        Feature("synchronized", "schedule", _is("synchronized"), {"schedule": "synchronized"}),
        Feature("load limit", "load_limit", _is_given, {"load_limit": 1000}),
        Feature("fixed lanes", "lanes", _is_given, {"lanes": 3}),
        Feature(
            "R-workers attend prompts", "prompt_attention", _is("r"), {"prompt_attention": "r"}
        ),
    )
}
"""By name, in the order in which tables show them. Expert parallelism (``ep``)
divides the S-workers of tensor parallelism: its pairs are that feature's."""


@dataclass(frozen=True)
class Refusal:
    """Why two features do not work together."""

    reason: str
    is_contradiction: bool = field(default=False, kw_only=True)
    """The two make no sense together. Else the pair is not built yet."""


def _pairs(
    feature: str,
    others: str,
    reason: str,
    *,
    is_contradiction: bool = False,
) -> Iterator[tuple[frozenset[str], Refusal]]:
    for other in others.split(", "):
        pair = frozenset((FEATURES[feature].name, FEATURES[other].name))
        yield pair, Refusal(reason, is_contradiction=is_contradiction)


_ONE_DEVICE = "beside R-workers, only the first S-worker would keep KV on its device"
_NO_R_WORKERS = "KV on the device needs no R-workers"
_OF_R_WORKERS = (
    "addresses, R-workers attend prompts, replicas on disk, shared heads, split sequences, standby"
)

REFUSALS: Mapping[frozenset[str], Refusal] = dict(
    itertools.chain(
        _pairs("device KV", "hybrid KV, swap", "KV is in one placement", is_contradiction=True),
        _pairs("hybrid KV", "swap", "KV is in one placement", is_contradiction=True),
        _pairs("hybrid KV", "host tier", "it is for KV on the device alone",
               is_contradiction=True),
        _pairs("device KV", _OF_R_WORKERS, _NO_R_WORKERS, is_contradiction=True),
        _pairs("swap", _OF_R_WORKERS, _NO_R_WORKERS, is_contradiction=True),
        _pairs("host tier", _OF_R_WORKERS, _NO_R_WORKERS, is_contradiction=True),
        _pairs("host tier", "disk tier", "a cache has one lower tier"),
        _pairs("swap", "host tier", "swapped KV is in the host's memory already",
               is_contradiction=True),
        _pairs("hybrid KV", "stages, tensor parallelism", _ONE_DEVICE),
        _pairs("hybrid KV", "stabilized, synchronized",
               "the rule for hybrid KV decides when a sequence starts, and so does a schedule",
               is_contradiction=True),
        _pairs("hybrid KV", "fixed lanes",
               "with hybrid KV the number of lanes says where sequences are: its rule decides it",
               is_contradiction=True),
        _pairs("prompt stages", "addresses",
               "the instance that runs prompts reaches R-workers of this process alone"),
        _pairs("shared heads", "split sequences",
               "with shared heads every R-worker has a part of every sequence",
               is_contradiction=True),
        _pairs("standby", "addresses",
               "a new R-worker at a lost one's address replaces it", is_contradiction=True),
        _pairs("disk tier", "addresses",
               "each `fastdecode r-worker` has a disk of its own: give it --cache-disk",
               is_contradiction=True),
        _pairs("stabilized", "synchronized", "an engine has one schedule", is_contradiction=True),
        _pairs("instances", "instance ranks", "instances are of one kind", is_contradiction=True),
        _pairs("instances", "addresses",
               "instances of this process have R-workers of this process", is_contradiction=True),
        _pairs("instance ranks", "addresses",
               "instances that are ranks have R-workers that are ranks", is_contradiction=True),
        _pairs("instances", "tensor parallelism",
               "S-workers that act as one are ranks of an MPI job, and so are their instances",
               is_contradiction=True),
        _pairs("instance ranks", "swap",
               "a rank has one cache that others reach, and with swap each lane has one"),
        _pairs("instance ranks", "tensor parallelism, stages, prompt stages",
               "each instance has its own: ROLE:R_WORKERS:tp=N:pp=N",
               is_contradiction=True),
    )
)  # fmt: skip
"""By pair of names. What is not here works."""


@dataclass(frozen=True)
class Triple:
    """Three features that work together in pairs, but not all three yet."""

    names: tuple[str, str, str]
    """As an error lists them."""
    reason: str


def _triples(firsts: str, seconds: str, thirds: str, reason: str) -> Iterator[Triple]:
    for names in itertools.product(*(each.split(", ") for each in (firsts, seconds, thirds))):
        first, second, third = (FEATURES[name].name for name in names)
        yield Triple((first, second, third), reason)


_ALL_HEADS = "a stage's replica has all heads of its layers"
_ONE_REPLICA = "a device's replica has all heads, and nobody else writes or reads it"

TRIPLES: Sequence[Triple] = (
    *_triples("shared heads", "stages", "replicas", _ALL_HEADS),
    *_triples("disk tier", "tensor parallelism", "device KV, swap",
              "only the first S-worker of a stage would store its heads"),
    *_triples("prompt stages", "tensor parallelism", "device KV, swap",
              "others reach one device of each stage"),
    *_triples("tensor parallelism, prompt stages, instances", "replicas", "device KV, swap",
              _ONE_REPLICA),
    *_triples("instance ranks", "replicas", "device KV", _ONE_REPLICA),
)  # fmt: skip
"""What an engine refuses besides pairs."""


def features_on(options: Options) -> list[Feature]:
    """The features that are on, in the table's order.

    Args:
        options: all of an engine's, by name.
    """
    return [feature for feature in FEATURES.values() if feature.is_on(options)]


def refusal(one: Feature, other: Feature) -> Refusal | None:
    """Why the two do not work together; None: they do."""
    return REFUSALS.get(frozenset((one.name, other.name)))


def check_features(options: Options) -> None:
    """
    Raises:
        ConfigError: two or three features are on that do not work together.
    """
    on = features_on(options)
    given = {each.name: Given(each.option, options[each.option]) for each in on}
    for one, other in itertools.combinations(on, 2):
        found = refusal(one, other)
        if found is None:
            continue
        raise ConfigError(
            given[one.name],
            " contradicts " if found.is_contradiction else " is not supported with ",
            given[other.name],
            f"{'' if found.is_contradiction else ' yet'}: {found.reason}. Remove one of them",
        )
    for triple in TRIPLES:
        if given.keys() >= set(triple.names):
            first, second, third = (given[name] for name in triple.names)
            raise ConfigError(
                first, " is not supported with ", second, " and ", third,
                f" yet: {triple.reason}. Remove one of them",
            )  # fmt: skip


def refused_pairs(*, is_contradiction: bool) -> list[tuple[str, str, str]]:
    """Two names and the reason, in the table's order."""
    pairs = []
    for one, other in itertools.combinations(FEATURES, 2):
        found = REFUSALS.get(frozenset((one, other)))
        if found is not None and found.is_contradiction is is_contradiction:
            pairs.append((one, other, found.reason))
    return pairs


def refusals_as_text() -> str:
    """One line a refused pair, what is not built yet first."""
    sections = [f"features: {', '.join(FEATURES)}"]
    for title, is_contradiction in (("not supported yet", False), ("contradictions", True)):
        pairs = refused_pairs(is_contradiction=is_contradiction)
        lines = [f"  {one} + {other}: {reason}" for one, other, reason in pairs]
        sections.append("\n".join([f"{title} ({len(pairs)} pairs):", *lines]))
    triples = [f"  {' + '.join(each.names)}: {each.reason}" for each in TRIPLES]
    sections.append("\n".join([f"not all three yet ({len(triples)} triples):", *triples]))
    return "\n\n".join([*sections, "everything else is accepted"])
