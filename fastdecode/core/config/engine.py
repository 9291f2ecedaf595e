"""What a user may choose about an engine. Frozen, and valid from construction
on.

Options are declared here, with their help, ranges and defaults, and nowhere
else: ``LLM(model, **options)``, the command line and the checks read them from
the fields (``fastdecode.core.config.options``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fastdecode.core.config.cache import Cache
from fastdecode.core.config.groups import Batching, Cluster, RPart
from fastdecode.core.config.instances import Instances
from fastdecode.core.config.options import declared, group_options
from fastdecode.core.config.s_part import SPart
from fastdecode.core.errors import ConfigError, Given

_OF_R_WORKERS = (
    "tp", "r_workers", "min_r_workers", "r_partition", "r_worker_addresses", "transport",
    "prompt_attention", "split_tokens", "spare_r_workers", "cache_disk", "cache_disk_gb",
)  # fmt: skip

_OF_ONE_SIDE: Mapping[str, tuple[Any, ...]] = {
    "tp": (1,),
    "lanes": (None,),
    "schedule": ("auto", "greedy"),
    "load_limit": (None,),
    "r_partition": ("sequences",),
    "split_tokens": (None,),
}
"""What KV on both sides leaves no choice of."""

_WITHOUT_REPLICAS: Mapping[str, tuple[Any, ...]] = {
    "kv_placement": ("r", "auto"),
    "prefix_cache": ("auto", "off"),
    "cache_disk": (None,),
}
"""What there may be beside replicas."""


_WITH_STAGES: Mapping[str, tuple[Any, ...]] = {
    "kv_placement": ("r", "gpu", "auto"),
    "r_partition": ("sequences",),
    "split_tokens": (None,),
    "transport": ("auto", "inproc", "mpi", "zmq"),
    "spare_r_workers": (0,),
    "cache_memory_gb": (None,),
}
"""What there may be beside several pipeline stages."""

_WITH_SWAP: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("auto", "greedy", "synchronized"),
    "load_limit": (None,),
}
"""What there may be where each lane has KV blocks of its own."""
LEAST_SWAPPED = 3
"""Stages, and lanes: two lanes would find all their KV on the device."""

_WITH_INSTANCES: Mapping[str, tuple[Any, ...]] = {
    "kv_placement": ("r", "auto"),
    "r_worker_addresses": ((),),
    "transport": ("auto", "inproc"),
    "replicas": (0,),
    "spare_r_workers": (0,),
    "pp": (1,),
    "tp": (1,),
    "cache_disk": (None,),
}
"""What there may be beside several instances of this process."""

_WITH_RANKS: Mapping[str, tuple[Any, ...]] = {
    **_WITH_INSTANCES,
    "transport": ("auto", "mpi"),
    "prompt_pp": (0,),
}
"""What there may be beside instances that are ranks of this job."""

_OF_A_CONTROLLER = frozenset(
    (
        "instance_addresses", "key", "link_security", "worker_silence_s", "worker_timeout_s",
        "max_model_len", "local_prefill_below", "max_num_sequences", "learn_lengths",
        "length_quantile", "expected_output_tokens", "dtype", "kv_dtype", "replan", "replan_slo",
        "replan_attainment", "replan_every_s", "replan_window_s",
    )
)  # fmt: skip
"""What there is to choose about instances at addresses from outside."""

_WITH_PROMPT_STAGES: Mapping[str, tuple[Any, ...]] = {
    "tp": (1,),
    "kv_placement": ("r", "auto"),
    "r_partition": ("sequences",),
    "split_tokens": (None,),
    "prompt_attention": ("auto", "s"),
    "replicas": (0,),
    "r_worker_addresses": ((),),
    "transport": ("auto", "inproc", "mpi"),
    "spare_r_workers": (0,),
    "schedule": ("auto", "greedy"),
    "load_limit": (None,),
    "prefix_cache": ("auto", "off"),
    "cache_disk": (None,),
    "prefill_instances": (0,),
}
"""What there may be beside stages of prompts."""

_OF_PROMPT_STAGES = " runs prompts as a whole, for R-workers that only store them, and"
_OF_INSTANCES = " is for R-workers of this process, and"
_OF_RANKS = " is for R-workers that are ranks of the same job, and"
_OF_STAGES = " keeps whole sequences in every stage, and"
_OF_SWAP = " gives each lane KV blocks of its own, and"
_OF_REPLICAS = " is for sequences on R-workers, whose KV blocks end with them, and"


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, in groups. ``resolve`` in the engine decides what
    is left open, in one place.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """

    model: str
    """A Hugging Face model directory."""
    s_part: SPart = field(default_factory=SPart)
    r_part: RPart = field(default_factory=RPart)
    batching: Batching = field(default_factory=Batching)
    cache: Cache = field(default_factory=Cache)
    cluster: Cluster = field(default_factory=Cluster)
    instances: Instances = field(default_factory=Instances)

    @classmethod
    def of(cls, model: str, **options: Any) -> EngineConfig:
        """From the options of all groups together, by name.

        Raises:
            ConfigError: there is no such option, or a value makes no sense.
        """
        given = group_options(GROUPS, options)
        return cls(model, **{name: group(**given[name]) for name, group in GROUPS.items()})

    @property
    def options(self) -> dict[str, Any]:
        """By name, of all groups together: what ``of`` takes."""
        return {
            each.name: getattr(getattr(self, name), each.name)
            for name, group in GROUPS.items()
            for each in declared(group)
        }

    @property
    def keeps_blocks(self) -> bool:
        """Whether KV blocks outlive requests, once it is settled where the KV
        cache is."""
        if self.cache.prefix_cache != "auto":
            return self.cache.prefix_cache == "on"
        has_others = self.r_part.replicas or self.s_part.prompt_pp
        return self.r_part.kv_placement in ("r", "gpu") and not has_others

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model is empty: give the path of a Hugging Face model directory")
        self._check_of_this_process()
        self._check_host_tier()
        if self.s_part.pp > 1:
            self._check_beside("pp", _WITH_STAGES, _OF_STAGES)
        if self.s_part.prompt_pp:
            self._check_beside("prompt_pp", _WITH_PROMPT_STAGES, _OF_PROMPT_STAGES)
            self._check_chunk()
        if self.s_part.swap:
            self._check_swap()
        if self.r_part.replicas:
            self._check_replicas()
        if self.instances.number:
            self._check_instances()
        if self.instances.instance_ranks:
            self._check_beside("instance_ranks", _WITH_RANKS, _OF_RANKS)
        if self.instances.instance_addresses:
            self._check_controller()
        elif self.cluster.key is not None and not self.cluster.r_worker_addresses:
            raise ConfigError(
                Given("key", self.cluster.key),
                " is for R-workers and instances at addresses: give ",
                Given("r_worker_addresses"),
                " or ",
                Given("instance_addresses"),
                " too",
            )
        if self.r_part.r_partition == "heads" and not self.r_part.replicas:
            self._check_no_spares()
        if self.r_part.kv_placement == "gpu":
            self._check_none_of_r_workers()
        elif self.r_part.kv_placement == "hybrid":
            self._check_both_sides()
        if self.r_part.kv_placement in ("r", "gpu"):
            self._check_one_side()
        elif self.cache.prefix_cache == "on":
            raise ConfigError(
                Given("prefix_cache", "on"),
                " isn't there with ",
                Given("kv_placement", self.r_part.kv_placement),
                " yet: leave one of the two out, or keep KV on one side (r, gpu)",
            )

    def _check_host_tier(self) -> None:
        kept_gb = self.cache.cache_memory_gb
        if kept_gb is not None and self.r_part.kv_placement not in ("gpu", "auto"):
            raise ConfigError(
                Given("cache_memory_gb", kept_gb),
                " is for KV on the device, whose lower tier the host's memory is: choose ",
                Given("kv_placement", "gpu"),
            )

    def _check_no_spares(self) -> None:
        """Whoever comes in a lost one's place would have nothing to be given."""
        if self.cluster.spare_r_workers:
            raise ConfigError(
                Given("spare_r_workers", self.cluster.spare_r_workers),
                " isn't there with ",
                Given("r_partition", "heads"),
                ", where those that are left share the heads anew: leave one of the two out, or "
                "choose ",
                Given("replicas", 1),
                " too",
            )

    def _check_replicas(self) -> None:
        """Replicas are of R-workers' own sequences, and of no kept blocks."""
        self._check_beside("replicas", _WITHOUT_REPLICAS, _OF_REPLICAS)

    def _check_instances(self) -> None:
        """Instances are of this process, each with R-workers of its own."""
        self._check_beside("prefill_instances", _WITH_INSTANCES, _OF_INSTANCES)

    def _check_controller(self) -> None:
        """Whoever only gives requests to instances has no engine of its own."""
        for group in GROUPS.values():
            for each in declared(group):
                value = self.options[each.name]
                if each.name not in _OF_A_CONTROLLER and value != each.default:
                    raise ConfigError(
                        Given(each.name, value),
                        " is of an engine, and those at ",
                        Given("instance_addresses"),
                        " have their own: give it to fastdecode instance",
                    )

    def _check_chunk(self) -> None:
        """Of a prompt on stages of its own: a single token is decoded."""
        if self.batching.prefill_chunk == 1:
            raise ConfigError(
                Given("prefill_chunk", 1),
                " is what a decoding sequence runs, and ",
                Given("prompt_pp", self.s_part.prompt_pp),
                " runs none: choose 2 or more",
            )

    def _check_swap(self) -> None:
        """Swapping is for a device that keeps KV, and for more lanes than it
        has room for."""
        given = Given("swap", True)
        if self.r_part.kv_placement != "gpu":
            raise ConfigError(
                given,
                " is for KV on the stages' devices; R-workers' is in the host's memory as it is: "
                "choose ",
                Given("kv_placement", "gpu"),
                ", or leave it out",
            )
        lanes = self.batching.lanes
        if min(self.s_part.pp, lanes or LEAST_SWAPPED) < LEAST_SWAPPED:
            name, number = ("pp", self.s_part.pp) if lanes is None else ("lanes", lanes)
            raise ConfigError(
                given,
                f" keeps two lanes' KV on each device, which with fewer than {LEAST_SWAPPED} "
                "stages and lanes is all of it: raise ",
                Given(name, number),
                ", or leave it out",
            )
        self._check_beside("swap", _WITH_SWAP, _OF_SWAP)

    def _check_beside(self, of: str, allowed: Mapping[str, tuple[Any, ...]], why: str) -> None:
        """Some options leave others no choice. ``why``: what is said behind the
        one that is given."""
        given = self.options
        for name, usual in allowed.items():
            if given[name] not in usual:
                raise ConfigError(
                    Given(of, given[of]),
                    f"{why} isn't there with ",
                    Given(name, given[name]),
                    " yet: leave one of the two out",
                )
        addresses = self.cluster.r_worker_addresses
        if len(addresses) % self.s_part.pp:
            raise ConfigError(
                Given("pp", self.s_part.pp),
                f" takes as many R-workers for each stage, and {len(addresses)} addresses aren't "
                f"a multiple of {self.s_part.pp}",
            )

    def _check_of_this_process(self) -> None:
        """R-workers at addresses have memory and threads of their own."""
        if not self.cluster.r_worker_addresses:
            return
        for name, theirs in (
            ("kv_memory_gb", "--kv-memory-gb"),
            ("r_threads", "--threads"),
            ("cache_disk", "--cache-disk and --cache-disk-gb"),
        ):
            if self.options[name] is not None:
                raise ConfigError(
                    Given(name),
                    " is for R-workers that this process starts; those at addresses have their "
                    f"own: give {theirs} to each fastdecode r-worker instead",
                )

    def _check_none_of_r_workers(self) -> None:
        """With the KV cache on the device there are no R-workers; whoever asks
        for some expects others."""
        given = self.options
        for group in GROUPS.values():
            for each in declared(group):
                value = given[each.name]
                if each.name not in _OF_R_WORKERS or value == each.default:
                    continue
                if each.name == "tp":
                    raise ConfigError(
                        Given("tp", value),
                        " shares out layers, and KV heads aren't shared out on devices yet: leave "
                        "out one of it and ",
                        Given("kv_placement", "gpu"),
                    )
                if (each.name, value) != ("prompt_attention", "s"):
                    raise ConfigError(
                        Given(each.name, value),
                        " is for R-workers, and ",
                        Given("kv_placement", "gpu"),
                        " has none: leave one of the two out",
                    )

    def _check_both_sides(self) -> None:
        """With the KV cache on the device and on R-workers, lanes and starts
        are what the rule for it says."""
        given = self.options
        for name, usual in _OF_ONE_SIDE.items():
            if given[name] not in usual:
                raise ConfigError(
                    Given(name, given[name]),
                    " is for KV on one side; with ",
                    Given("kv_placement", "hybrid"),
                    " lanes, starts and places are chosen by what steps take, whole sequences "
                    "and one S-worker only: leave one of the two out",
                )

    def _check_one_side(self) -> None:
        for name in ("device_kv_gb", "away_tpot_s"):
            if getattr(self.r_part, name) is not None:
                raise ConfigError(
                    Given(name),
                    " is for KV on both sides: choose ",
                    Given("kv_placement", "hybrid"),
                )


GROUPS: Mapping[str, type] = {
    "s_part": SPart,
    "r_part": RPart,
    "batching": Batching,
    "cache": Cache,
    "cluster": Cluster,
    "instances": Instances,
}
"""The groups of ``EngineConfig``, by the names of its fields."""
assert list(GROUPS) == [f.name for f in fields(EngineConfig)][1:]
