"""What a user may choose about an engine. Frozen, and valid from construction on.

Options are declared here, with their help, ranges and defaults, and nowhere else: ``LLM(model,
**options)``, the command line and the checks read them from the fields
(``fastdecode.core.config.options``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastdecode.core.config.cache import Cache
from fastdecode.core.config.features import check_features
from fastdecode.core.config.groups import Batching, Cluster, RPart
from fastdecode.core.config.instances import InstanceRole, Instances, PlacedInstance
from fastdecode.core.config.options import declared, group_options
from fastdecode.core.config.s_part import SPart
from fastdecode.core.errors import ConfigError, Given

LEAST_SWAPPED = 3  # stages, and lanes: two lanes would find all their KV on the device
_PRESET = (InstanceRole.PREFILL, InstanceRole.DECODE)  # of prompt_pp

_OF_A_CONTROLLER = frozenset(
    (
        "instances", "key", "worker_silence_s", "worker_timeout_s",
        "max_model_len", "load_format", "max_num_sequences",
        "length_quantile", "expected_output_tokens", "dtype", "kv_dtype",
        "replan_slo",
    )
)  # fmt: skip
"""Options that a controller of instances at addresses has."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, in groups. ``resolve`` in the engine decides what
    is left open, in one place.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """

    model: str  # A Hugging Face model directory
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
        """Return whether KV blocks outlive requests, once the place of the KV cache is known."""
        if self.cache.prefix_cache != "auto":
            return self.cache.prefix_cache == "on"
        return self.r_part.kv_placement != "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model is empty: give the path of a Hugging Face model directory")
        check_features(self.options)
        if self.s_part.prompt_pp and not self.instances.instances and self.s_part.tp == 1:
            apart = replace(self.instances, instances=("prefill", "decode"))
            object.__setattr__(self, "instances", apart)
        if self.s_part.prompt_pp and InstanceRole.PREFILL not in (self.instances.roles or _PRESET):
            raise ConfigError(
                Given("prompt_pp", self.s_part.prompt_pp),
                " is for an instance of the role prefill: add one to ",
                Given("instances", ",".join(self.instances.instances)),
            )
        self._check_addresses()
        self._check_tiers()
        self._check_stages()
        for number in range(len(self.instances.placed)):
            self.of_instance(number).check_reached()
        for role in set(self.instances.roles):
            self.of_role(role).check_reached()
        if self.instances.addresses:
            self._check_controller()
        self._check_placement()

    def _check_addresses(self) -> None:
        """Check what goes with addresses: R-workers there have their own memory and threads."""
        addresses = self.cluster.r_worker_addresses
        for name, value, instead in (
            ("kv_memory_gb", None, "give --kv-memory-gb to each `fastdecode r-worker` instead"),
            ("r_threads", None, "give --threads to each `fastdecode r-worker` instead"),
            ("r_workers", 1, "remove it, or the addresses"),
        ):
            if addresses and self.options[name] != value:
                raise ConfigError(
                    Given(name), f" is for R-workers that this process starts: {instead}"
                )
        if self.cluster.key is not None and not (addresses or self.instances.addresses):
            either = Given("r_worker_addresses"), " or ", Given("instances")
            raise ConfigError(
                Given("key"), " is for R-workers and instances at addresses: add ", *either
            )

    def _check_tiers(self) -> None:
        """Check after the features: a pair that is refused needs no size first."""
        if (self.cache.cache_disk is None) != (self.cache.cache_disk_gb is None):
            both = Given("cache_disk"), " and ", Given("cache_disk_gb")
            raise ConfigError(*both, " belong together: give both, or neither")
        kept_gb = self.cache.cache_memory_gb
        if kept_gb is not None and self.r_part.kv_placement not in ("gpu", "auto"):
            what, instead = Given("cache_memory_gb", kept_gb), Given("kv_placement", "gpu")
            raise ConfigError(what, " is the host tier of KV on the device: add ", instead)

    def _check_stages(self) -> None:
        addresses, pp, lanes = self.cluster.r_worker_addresses, self.s_part.pp, self.batching.lanes
        if len(addresses) % pp:
            raise ConfigError(
                Given("pp", pp),
                f" needs as many R-workers for each stage, and {len(addresses)} addresses are "
                f"not a multiple of {pp}: add or remove addresses",
            )
        if self.r_part.swaps and min(pp, lanes or LEAST_SWAPPED) < LEAST_SWAPPED:
            raise ConfigError(
                Given("kv_placement", "swap"),
                f" needs at least {LEAST_SWAPPED} stages and lanes, since two lanes' KV stay on "
                "each device: raise ",
                Given("pp", pp) if lanes is None else Given("lanes", lanes),
                ", or remove it",
            )

    def _check_placement(self) -> None:
        placement, num_r_workers = self.r_part.kv_placement, self.r_part.r_workers
        if self.r_part.is_on_device and num_r_workers > 1:
            both = (
                Given("r_workers", num_r_workers),
                " contradicts ",
                Given("kv_placement", placement),
            )
            raise ConfigError(*both, ": KV on the device needs no R-workers. Remove one of them")
        if self.r_part.device_kv_gb is not None and placement not in ("hybrid", "auto"):
            raise ConfigError(Given("device_kv_gb"), " needs ", Given("kv_placement", "hybrid"))

    def of_instance(self, number: int) -> EngineConfig:
        """Return the options of an instance that is ranks of this MPI job. Raises ConfigError: If
        its S-workers do not go with the others."""
        placed, r_part = self.instances.placed[number], self.r_part
        if r_part.is_on_device and placed.num_r_workers:
            raise ConfigError(
                Given("kv_placement", r_part.kv_placement),
                f" needs no R-workers, and the instance {placed} has {placed.num_r_workers}: "
                f"Remove them ({placed.role.value}:0)",
            )
        if not placed.num_r_workers and (placed.tp > 1 or r_part.replicas):
            raise ConfigError(
                Given("instances", str(placed)),
                ": with KV on its devices an instance of ranks has no tp or replicas yet: others "
                "reach one device of each stage. Remove them, or give it R-workers",
            )
        if r_part.kv_placement == "auto" or not placed.num_r_workers:
            r_part = replace(r_part, kv_placement="r" if placed.num_r_workers else "gpu")
        if placed.role is InstanceRole.PREFILL and placed.num_r_workers == placed.pp:
            r_part = replace(r_part, replicas=0)  # prompts of a lost R-worker are run again
        return replace(
            self,
            s_part=replace(self.s_part, tp=placed.tp, pp=placed.pp),
            r_part=r_part,
            instances=replace(self.instances, instances=(), replan_slo=None),
        )

    def of_role(self, role: InstanceRole) -> EngineConfig:
        """Return the options of an instance of this process."""
        s_part = replace(self.s_part, prompt_pp=0)
        r_part = self.r_part
        if role is InstanceRole.PREFILL and (pp := self.s_part.prompt_pp):
            layers = s_part.pp_layers if pp == s_part.pp else None
            s_part = replace(s_part, pp=pp, pp_layers=layers)
            if r_part.swaps:  # prompts leave room: an offer stays for a moment
                r_part = replace(r_part, kv_placement="gpu")
        alone = replace(self.instances, instances=(), replan_slo=None)
        return replace(self, s_part=s_part, r_part=r_part, instances=alone)

    def in_job(self, num_ranks: int) -> EngineConfig:
        """Return the options with ``prompt_pp`` as instances of an MPI job's ranks.

        Prompts have an R-worker a stage, or KV is on the devices. The other R-workers are of the
        stages of ``pp``."""
        prompt_pp, pp, tp = self.s_part.prompt_pp, self.s_part.pp, self.s_part.tp
        if not prompt_pp:
            return self
        if self.s_part.pp_layers is not None:
            raise ConfigError(
                Given("pp_layers", self.s_part.pp_layers),
                " is not supported in an MPI job with ",
                Given("prompt_pp", prompt_pp),
                " yet: each instance balances its own. Remove one of them",
            )
        if self.instances.roles not in ((), _PRESET):
            raise ConfigError(
                Given("instances", ",".join(self.instances.instances)),
                " is not supported in an MPI job with ",
                Given("prompt_pp", prompt_pp),
                ": write ROLE:R_WORKERS:pp=N for each instance",
            )
        of_prompts = 0 if self.r_part.is_on_device else prompt_pp
        of_tokens = num_ranks - 1 - of_prompts - tp * (prompt_pp + pp)
        if of_tokens < 0 or of_tokens % pp or bool(of_tokens) is self.r_part.is_on_device:
            raise ConfigError(
                Given("prompt_pp", prompt_pp),
                f" takes {num_ranks - of_tokens} MPI ranks, and as many R-workers for each of the "
                f"{pp} stages that decode; {num_ranks} were started",
                code="too_few_ranks",
            )
        placed = (
            PlacedInstance(InstanceRole.PREFILL, of_prompts, tp, prompt_pp),
            PlacedInstance(InstanceRole.DECODE, of_tokens, tp, pp),
        )
        return replace(
            self,
            s_part=replace(self.s_part, tp=1, pp=1, pp_layers=None, prompt_pp=0),
            instances=replace(self.instances, instances=tuple(map(str, placed))),
        )

    def check_reached(self) -> None:
        """
        Raises:
            ConfigError: an instance that is made so can't be reached by others.
        """
        pp = self.s_part.pp
        if pp > 1 and self.r_part.r_partition == "heads":
            raise ConfigError(
                Given("r_partition", "heads"),
                f" is not supported by an instance of {pp} stages yet: other instances do not "
                "learn which heads the R-workers of later stages keep. Remove one of them",
            )

    def _check_controller(self) -> None:
        defaults = {each.name: each.default for kind in GROUPS.values() for each in declared(kind)}
        for name, value in self.options.items():
            if value != defaults[name] and name not in _OF_A_CONTROLLER:
                raise ConfigError(
                    Given(name, value),
                    " cannot be set by the controller of ",
                    Given("instances"),
                    ": set it on each `fastdecode instance`",
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
