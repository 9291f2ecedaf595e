"""Which features work together.

``FEATURES`` are switches of an engine, each turned on by one option. ``CONTRADICTIONS`` and
``NOT_YET`` are the pairs that an engine refuses, with the reason. ``TRIPLES`` work in pairs alone.
Everything else is accepted. ``EngineConfig`` checks the tables, ``fastdecode doctor --features``
and ``docs/reference/features.md`` print them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastdecode.core.errors import ConfigError, Given


def _is_given(value: Any) -> bool:
    return value is not None and value != ()


FEATURES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tensor parallelism": ("tp", lambda number: number > 1),
    "stages": ("pp", lambda number: number > 1),
    "prompt stages": ("prompt_pp", bool),
    "device KV": ("kv_placement", lambda place: place == "gpu"),
    "hybrid KV": ("kv_placement", lambda place: place == "hybrid"),
    "swap": ("kv_placement", lambda place: place == "swap"),
    "host tier": ("cache_memory_gb", _is_given),
    "int4 KV": ("kv_dtype", lambda name: name.lower() == "int4"),
    "shared heads": ("r_partition", lambda how: how == "heads"),
    "split sequences": ("split_tokens", _is_given),
    "replicas": ("replicas", bool),
    "replicas on disk": ("replicas", lambda where: where == "disk"),
    "standby": ("spare_r_workers", bool),
    "prefix cache": ("prefix_cache", lambda use: use == "on"),
    "disk tier": ("cache_disk", _is_given),
    "instances": ("instances", lambda all_: any(":" not in each for each in all_)),
    "instance ranks": (
        "instances",
        lambda all_: any(":" in each and "://" not in each for each in all_),
    ),
    "addresses": ("r_worker_addresses", _is_given),
    "stabilized": ("schedule", lambda mode: mode in ("stabilized", "fixed-f")),
    "synchronized": ("schedule", lambda mode: mode == "synchronized"),
    "load limit": ("load_limit", _is_given),
    "fixed lanes": ("lanes", _is_given),
    "R-workers attend prompts": ("prompt_attention", lambda side: side == "r"),
}
"""By name, in the order in which tables show them: the option, and the values that turn the
feature on. Expert parallelism (``ep``) divides the S-workers of tensor parallelism: its pairs are
that feature's."""

Pairs = Mapping[frozenset[str], str]


def _pairs(*rows: tuple[str, str, str]) -> Pairs:
    """Rows of a feature, others of which each makes a pair with it, and the reason."""
    return {
        frozenset((one, other)): reason
        for one, others, reason in rows
        for other in others.split(", ")
    }


_OF_R_WORKERS = (
    "addresses, R-workers attend prompts, replicas on disk, shared heads, split sequences, standby"
)
_NO_R_WORKERS = "KV on the device needs no R-workers"
CONTRADICTIONS: Pairs = _pairs(
    ("device KV", "hybrid KV, swap", "KV is in one placement"),
    ("hybrid KV", "swap", "KV is in one placement"),
    ("hybrid KV", "host tier", "it is for KV on the device alone"),
    ("device KV", _OF_R_WORKERS, _NO_R_WORKERS),
    ("swap", _OF_R_WORKERS, _NO_R_WORKERS),
    ("host tier", _OF_R_WORKERS, _NO_R_WORKERS),
    ("swap", "host tier", "swapped KV is in the host's memory already"),
    ("hybrid KV", "stabilized, synchronized",
     "the rule for hybrid KV decides when a sequence starts, and so does a schedule"),
    ("hybrid KV", "fixed lanes",
     "with hybrid KV the number of lanes says where sequences are: its rule decides it"),
    ("shared heads", "split sequences",
     "with shared heads every R-worker has a part of every sequence"),
    ("standby", "addresses", "a new R-worker at a lost one's address replaces it"),
    ("disk tier", "addresses",
     "each `fastdecode r-worker` has a disk of its own: give it --cache-disk"),
    ("stabilized", "synchronized", "an engine has one schedule"),
    ("instances", "instance ranks", "instances are of one kind"),
    ("instances", "addresses", "instances of this process have R-workers of this process"),
    ("instance ranks", "addresses", "instances that are ranks have R-workers that are ranks"),
    ("instances", "tensor parallelism",
     "S-workers that act as one are ranks of an MPI job, and so are their instances"),
    ("instance ranks", "tensor parallelism, stages, prompt stages",
     "each instance has its own: ROLE:R_WORKERS:tp=N:pp=N"),
)  # fmt: skip
"""Pairs that make no sense together."""

NOT_YET: Pairs = _pairs(
    ("host tier", "disk tier", "a cache has one lower tier"),
    ("hybrid KV", "stages, tensor parallelism",
     "beside R-workers, only the first S-worker would keep KV on its device"),
    ("prompt stages", "addresses",
     "the instance that runs prompts reaches R-workers of this process alone"),
    ("instance ranks", "swap",
     "a rank has one cache that others reach, and with swap each lane has one"),
)  # fmt: skip
"""Pairs that are not built."""


def _triples(
    firsts: str, second: str, thirds: str, reason: str
) -> Iterator[tuple[tuple[str, str, str], str]]:
    for first, third in itertools.product(firsts.split(", "), thirds.split(", ")):
        yield (first, second, third), reason


_ONE_REPLICA = "a device's replica has all heads, and nobody else writes or reads it"
TRIPLES: Sequence[tuple[tuple[str, str, str], str]] = (
    *_triples("shared heads", "stages", "replicas",
              "a stage's replica has all heads of its layers"),
    *_triples("disk tier", "tensor parallelism", "device KV, swap",
              "only the first S-worker of a stage would store its heads"),
    *_triples("prompt stages", "tensor parallelism", "device KV, swap",
              "others reach one device of each stage"),
    *_triples("tensor parallelism, prompt stages, instances", "replicas", "device KV, swap",
              _ONE_REPLICA),
    *_triples("instance ranks", "replicas", "device KV", _ONE_REPLICA),
)  # fmt: skip
"""Three features that work together in pairs, but not all three yet, and the reason."""


def features_on(options: Mapping[str, Any]) -> list[str]:
    """Return the features that all of an engine's options turn on, in the table's order."""
    return [name for name, (option, is_on) in FEATURES.items() if is_on(options[option])]


def check_features(options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: If two or three features are on that do not work together.
    """
    given = {x: Given(FEATURES[x][0], options[FEATURES[x][0]]) for x in features_on(options)}
    for one, other in itertools.combinations(given, 2):
        pair, both = frozenset((one, other)), (given[one], given[other])
        if pair in CONTRADICTIONS:
            why = f": {CONTRADICTIONS[pair]}. Remove one of them"
            raise ConfigError(both[0], " contradicts ", both[1], why)
        if pair in NOT_YET:
            why = f" yet: {NOT_YET[pair]}. Remove one of them"
            raise ConfigError(both[0], " is not supported with ", both[1], why)
    for names, reason in TRIPLES:
        if given.keys() >= set(names):
            first, second, third = (given[name] for name in names)
            raise ConfigError(
                first, " is not supported with ", second, " and ", third,
                f" yet: {reason}. Remove one of them",
            )  # fmt: skip


def refused_pairs(pairs: Pairs) -> list[tuple[str, str, str]]:
    """Return two names and the reason of each pair, in the table's order."""
    every = itertools.combinations(FEATURES, 2)
    return [(*pair, pairs[frozenset(pair)]) for pair in every if frozenset(pair) in pairs]


def refusals_as_text() -> str:
    """Return a line for each refusal, pairs that are not built first."""
    sections = [f"features: {', '.join(FEATURES)}"]
    for title, pairs in (("not supported yet", NOT_YET), ("contradictions", CONTRADICTIONS)):
        lines = [f"  {one} + {other}: {reason}" for one, other, reason in refused_pairs(pairs)]
        sections.append("\n".join([f"{title} ({len(pairs)} pairs):", *lines]))
    triples = [f"  {' + '.join(names)}: {reason}" for names, reason in TRIPLES]
    sections.append("\n".join([f"not all three yet ({len(triples)} triples):", *triples]))
    return "\n\n".join([*sections, "everything else is accepted"])
