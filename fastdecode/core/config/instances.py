"""Instances: engines of which some run prompts and others go on with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given

MAX_INSTANCES = 64
MAX_R_RANKS: Final = 1024
"""Of an instance."""
_RANKS: Final = re.compile(
    r"(prefill|decode|both):([1-9][0-9]{0,3})(?::tp=([1-9][0-9]{0,3}))?(?::pp=([1-9][0-9]{0,3}))?"
)


class InstanceRole(Enum):
    """What an instance is given; nothing else tells it from others."""

    PREFILL = "prefill"
    """Prompts, with which others go on."""
    DECODE = "decode"
    """Requests whose prompts others have run."""
    BOTH = "both"
    """Whole requests; prompts alone where it has no room for more."""

    @property
    def prefills(self) -> bool:
        return self is not InstanceRole.DECODE

    @property
    def decodes(self) -> bool:
        return self is not InstanceRole.PREFILL


@dataclass(frozen=True)
class PlacedInstance:
    """An instance that is ranks of an MPI job: S-workers, and R-workers."""

    role: InstanceRole
    num_r_workers: int
    """Of all its stages."""
    tp: int = 1
    """S-workers of each stage that act as one."""
    pp: int = 1
    """Pipeline stages."""

    @property
    def num_s_workers(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        degrees = "".join(
            f":{name}={value}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value > 1
        )
        return f"{self.role.value}:{self.num_r_workers}{degrees}"


@dataclass(frozen=True)
class Instances:
    """How many there are, and what each is given."""

    prefill_instances: int = option(
        0,
        "engines in this process that run prompts, each with its own weights and R-workers",
        low=0,
        high=MAX_INSTANCES,
    )
    decode_instances: int = option(
        0,
        "engines in this process that fetch a prompt's KV and generate the other tokens",
        low=0,
        high=MAX_INSTANCES,
    )
    instance_addresses: tuple[str, ...] = option(
        (),
        "addresses of instances, tcp://HOST:PORT, as given to fastdecode instance --bind; "
        "repeatable, or separated by commas",
        flag="--instances",
        metavar="ADDRESSES",
        common=True,
    )
    instance_ranks: tuple[str, ...] = option(
        (),
        "instances as ranks of this MPI job: ROLE:R_WORKERS[:tp=N][:pp=N] each, such as "
        "prefill:1:tp=2,decode:2; rank 0 is the controller; see fastdecode launch --placement",
        metavar="RANKS",
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
    replan: str = option(
        "off",
        "reconsider the instances' roles as traffic shifts: off, advise (report a better choice),"
        " apply (change roles)",
        choices=("off", "advise", "apply"),
        metavar="WAY",
    )
    replan_slo: str | None = option(
        None,
        "limits that --replan judges by, such as ttft=400ms,tpot=40ms",
        metavar="LIMITS",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("instance_addresses", "instance_ranks"):
            several = [each for given in getattr(self, name) for each in given.split(",")]
            object.__setattr__(self, name, tuple(several))
        several = list(self.instance_addresses)
        listed = Given("instance_addresses")
        if len(set(several)) < len(several) or len(several) > MAX_INSTANCES:
            raise ConfigError(listed, f": give each address once, and {MAX_INSTANCES} at most")
        if several and self.number:
            raise ConfigError(
                listed,
                " contradicts ",
                Given("prefill_instances", self.prefill_instances),
                ": instances are processes or threads. Remove one of them",
            )
        for one, other in (
            ("prefill_instances", "decode_instances"),
            ("decode_instances", "prefill_instances"),
        ):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(
                    Given(one, getattr(self, one)), " needs ", Given(other), ": give at least 1"
                )
        self._check_ranks()
        self._check_replan()

    def _check_replan(self) -> None:
        replan = Given("replan", self.replan)
        if self.replan == "off":
            if self.replan_slo is not None:
                raise ConfigError(
                    Given("replan_slo", self.replan_slo), " is for roles that are looked at again: "
                    "choose ", Given("replan", "advise"), " or ", Given("replan", "apply"),
                )  # fmt: skip
            return
        if not self.is_several:
            raise ConfigError(
                replan, " changes roles of instances, and there is one engine: give ",
                Given("instance_addresses"), " or ", Given("prefill_instances"),
                ", or leave it out",
            )  # fmt: skip
        if self.replan_slo is None:
            raise ConfigError(
                replan, " judges roles by what requests are to keep: give ", Given("replan_slo"),
                " like ttft=400ms,tpot=40ms",
            )  # fmt: skip

    def _check_ranks(self) -> None:
        given, placed = Given("instance_ranks", ",".join(self.instance_ranks)), self.placed
        if not placed:
            return
        if self.number or self.instance_addresses:
            raise ConfigError(
                given, ": instances are ranks, processes or threads. Remove the others"
            )
        if len(placed) > MAX_INSTANCES:
            raise ConfigError(given, f" are more than {MAX_INSTANCES} instances")
        prefills = any(each.role.prefills for each in placed)
        if not (prefills and any(each.role.decodes for each in placed)):
            missing = "decodes" if prefills else "runs prompts"
            raise ConfigError(given, f": none of these instances {missing}; give one that does")

    @property
    def placed(self) -> tuple[PlacedInstance, ...]:
        """Those that are ranks of an MPI job. Raises ConfigError: they can't be."""
        found: list[PlacedInstance] = []
        for each in self.instance_ranks:
            match = _RANKS.fullmatch(each)
            if match is None or int(match[2]) > MAX_R_RANKS:
                raise ConfigError(
                    Given("instance_ranks", each),
                    " is not of the form ROLE:R_WORKERS[:tp=N][:pp=N], such as decode:2 or "
                    "prefill:1:tp=2: the role is prefill, decode or both, and R-workers are 1 to "
                    f"{MAX_R_RANKS}",
                )
            role, num_r_workers = InstanceRole(match[1]), int(match[2])
            tp, pp = int(match[3] or 1), int(match[4] or 1)
            if num_r_workers % pp:
                raise ConfigError(
                    Given("instance_ranks", each),
                    f": each of the {pp} stages needs as many R-workers, and {num_r_workers} are "
                    f"no multiple of {pp}",
                )
            found.append(PlacedInstance(role, num_r_workers, tp, pp))
        return tuple(found)

    @property
    def number(self) -> int:
        """Of this process; 0: it is one engine, or none."""
        return self.prefill_instances + self.decode_instances

    @property
    def is_several(self) -> bool:
        """Whether requests go from one instance to another, wherever those are."""
        return bool(self.number or self.is_elsewhere)

    @property
    def is_elsewhere(self) -> bool:
        """Whether all of them are other processes, which this one controls."""
        return bool(self.instance_addresses or self.instance_ranks)

    @property
    def most_decoding(self) -> int:
        """Instances that may decode."""
        return self.decode_instances or len(self.instance_addresses) or len(self.instance_ranks)
