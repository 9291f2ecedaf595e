"""Replicas as they were configured: of all R-workers, or of each stage's."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pending import GREETING_TIMEOUT_S
from fastdecode.engine.fleet.replicas import Replicas, replicate
from fastdecode.engine.fleet.ring import DISK, LinkOptions
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.stages.pool import StagePool
from fastdecode.wire.messages import Hello, Welcome
from fastdecode.wire.stages import StageWelcome
from rworker.stream.chunk_endpoints import LINK_BYTES

Welcomes = Mapping[HolderId, Welcome]


def make_replicas(
    fleet: HolderPool, hello: Hello, welcomes: Welcomes, workers: Reached, config: EngineConfig
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every holder offer what leaves room for the replicas. With R-workers, a cache
    on the device has none.

    Raises:
        ConfigError, WorkerError: see ``replicate``.
    """
    keepers = keepers_of(workers, config)
    options = _options(hello.session, workers.addresses, config, keepers)
    circle = fleet.members.holders[: workers.num_holders]
    return replicate(fleet, hello, welcomes, options, circle=circle)


def make_stage_replicas(
    fleet: HolderPool,
    session: int,
    workers: Reached,
    config: EngineConfig,
    others: Seq[StageWelcome],
) -> Replicas:
    """The same, of each stage's R-workers, which have offered half of their room.
    ``others``: later stages."""
    assert isinstance(fleet.members, StagePool)
    members, rings = fleet.members, []
    stages = [(0, workers.addresses, session)]
    stages += [(other.stage, other.addresses, other.session) for other in others]
    for stage, addresses, each in stages:
        circle = [members.member(stage, column) for column in range(members.num_columns)]
        keepers = {
            members.member(stage, holder): DISK if keeper == DISK else members.member(stage, keeper)
            for holder, keeper in keepers_of(workers, config).items()
        }
        named = zip([*circle, *(x for x in keepers.values() if x != DISK)], addresses, strict=True)
        if stage:
            members.addresses.update(named)
        names = members.addresses if stage else addresses
        rings.append((circle, _options(each, names, config, keepers)))
    return Replicas(fleet, rings)


def keepers_of(workers: Reached, config: EngineConfig) -> Mapping[HolderId, HolderId]:
    """Where each holder's replica is; see ``LinkOptions``."""
    if config.r_part.is_replicated_on_disk:
        return dict.fromkeys(map(HolderId, range(workers.num_holders)), DISK)
    return workers.keepers


def about_replicas(
    welcomes: Welcomes, again: Welcomes, workers: Reached, config: EngineConfig
) -> str:
    """What room replicas leave, for people."""
    keeps = "each R-worker keeps its neighbour's in as many"
    if config.r_part.is_replicated_on_disk:
        keeps = "they are in files"
    if workers.keepers:
        keeps = "the host's memory has a replica of all of them"
    num_blocks = sum(welcome.num_blocks for welcome in welcomes.values())
    offered = sum(welcome.num_blocks for welcome in again.values())
    return f"replicas: sequences have {offered} of {num_blocks} KV blocks; {keeps}"


def _options(
    session: int,
    addresses: Seq[str] | Mapping[HolderId, str],
    config: EngineConfig,
    keepers: Mapping[HolderId, HolderId],
) -> LinkOptions:
    timeout_s = config.cluster.worker_timeout_s
    # A device that failed before its replica is there leaves nobody who could recompute.
    on_host = keepers and DISK not in keepers.values()
    begin_s = max(timeout_s, GREETING_TIMEOUT_S) if on_host else 0.0
    return LinkOptions(addresses, LINK_BYTES, timeout_s, session, keepers, begin_s)
