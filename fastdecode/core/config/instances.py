"""Instances: engines of which some run prompts and others go on with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given

MAX_INSTANCES = 64
MAX_R_RANKS: Final = 1024  # of an instance
_FORM: Final = "ROLE:R_WORKERS[:tp=N][:pp=N]"
_RANKS: Final = re.compile(
    "(prefill|decode|both):(0|[1-9][0-9]{0,3})"
    + "".join(f"(?::{name}=([1-9][0-9]{{0,3}}))?" for name in ("tp", "pp"))
)


class InstanceRole(Enum):
    """What an instance runs. Instances differ in nothing else."""

    PREFILL = "prefill"  # prompts, which other instances continue
    DECODE = "decode"  # requests whose prompts others have run
    BOTH = "both"  # whole requests; prompts alone where it has no room for more

    @property
    def prefills(self) -> bool:
        return self is not InstanceRole.DECODE

    @property
    def decodes(self) -> bool:
        return self is not InstanceRole.PREFILL


_ROLES: Final = frozenset(role.value for role in InstanceRole)


@dataclass(frozen=True)
class PlacedInstance:
    """An instance that is ranks of an MPI job: S-workers, and R-workers."""

    role: InstanceRole
    num_r_workers: int  # in all its stages together; 0 if KV is on its devices
    tp: int = 1  # S-workers of each stage that act as one
    pp: int = 1  # pipeline stages

    @property
    def num_s_workers(self) -> int:
        return self.tp * self.pp

    @property
    def num_places(self) -> int:
        """That it takes of a job's hosts: one for each R-worker, or for each stage."""
        return self.num_r_workers or self.pp

    def __str__(self) -> str:
        degrees = (("tp", self.tp), ("pp", self.pp))
        suffix = "".join(f":{name}={value}" for name, value in degrees if value > 1)
        return f"{self.role.value}:{self.num_r_workers}{suffix}"


@dataclass(frozen=True)
class Instances:
    """How many there are, and what each is given."""

    instances: tuple[str, ...] = option(
        (),
        "engines that share the requests. Each is an address tcp://HOST:PORT, as given to "
        "fastdecode instance --bind; or a role (prefill, decode, both): a process that this "
        f"one starts, with its own weights and R-workers; or {_FORM}: ranks of this MPI job, whose "
        "rank 0 is the controller (see fastdecode launch --placement); with ROLE:0 KV is on its "
        "devices. Repeatable, or separated by commas",
        metavar="INSTANCES",
        common=True,
    )
    fetch_gbps: float | None = option(
        None,
        "most Gbit/s that each R-worker of a decode instance fetches; default: all it can while "
        "it attends nothing, a twentieth of its time while it attends",
        low=1e-3,
        high=1e5,
        unit="Gbit/s",
        metavar="GBPS",
    )
    replan_slo: str | None = option(
        None,
        "change the instances' roles as traffic shifts, so that requests keep these limits, such "
        "as ttft=400ms,tpot=40ms; default: roles stay",
        metavar="LIMITS",
    )

    def __post_init__(self) -> None:
        check_options(self)
        several = tuple(each for given in self.instances for each in given.split(","))
        object.__setattr__(self, "instances", several)
        given = Given("instances", ",".join(several))
        if len(several) > MAX_INSTANCES:
            raise ConfigError(given, f" are more than {MAX_INSTANCES} instances")
        if len(set(self.addresses)) < len(self.addresses):
            raise ConfigError(Given("instances"), ": give each address once")
        if sum(map(bool, (self.addresses, self.roles, self.placed))) > 1:
            raise ConfigError(
                given, ": instances are all addresses, all roles, or all ranks. Remove the others"
            )
        self._check_roles(given)
        if self.replan_slo is not None and not several:
            raise ConfigError(
                Given("replan_slo", self.replan_slo), " changes roles of instances, and there is "
                "one engine: give ", Given("instances"), ", or leave it out",
            )  # fmt: skip

    def _check_roles(self, given: Given) -> None:
        roles = self.roles or tuple(each.role for each in self.placed)
        prefills = any(role.prefills for role in roles)
        if roles and not (prefills and any(role.decodes for role in roles)):
            missing = "decodes" if prefills else "runs prompts"
            raise ConfigError(given, f": none of these instances {missing}; give one that does")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of instances that run already."""
        return tuple(each for each in self.instances if "://" in each)

    @property
    def roles(self) -> tuple[InstanceRole, ...]:
        """Roles of the instances that this process starts."""
        return tuple(InstanceRole(each) for each in self.instances if each in _ROLES)

    @property
    def placed(self) -> tuple[PlacedInstance, ...]:
        """The instances that are ranks of an MPI job. Raises ConfigError: one is no instance."""
        found: list[PlacedInstance] = []
        for each in self.instances:
            if "://" in each or each in _ROLES:
                continue
            match = _RANKS.fullmatch(each)
            if match is None or int(match[2]) > MAX_R_RANKS:
                raise ConfigError(
                    Given("instances", each),
                    " is neither an address tcp://HOST:PORT, nor prefill, decode or both, nor of "
                    f"the form {_FORM}, such as decode:2 or prefill:1:tp=2, with 0 to "
                    f"{MAX_R_RANKS} R-workers",
                )
            role, num_r_workers = InstanceRole(match[1]), int(match[2])
            tp, pp = int(match[3] or 1), int(match[4] or 1)
            if num_r_workers % pp:
                raise ConfigError(
                    Given("instances", each),
                    f": each of the {pp} stages needs as many R-workers, and {num_r_workers} are "
                    f"no multiple of {pp}",
                )
            found.append(PlacedInstance(role, num_r_workers, tp, pp))
        return tuple(found)

    @property
    def most_decoding(self) -> int:
        """Instances that may decode."""
        return sum(each.partition(":")[0] != InstanceRole.PREFILL.value for each in self.instances)
