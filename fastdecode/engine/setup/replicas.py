"""Replicas as they were configured: of all R-workers, or of each stage's."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from fastdecode.core.config.groups import Cluster
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pending import GREETING_TIMEOUT_S
from fastdecode.engine.fleet.replicas import Replicas, replicate
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.stages.pool import StagePool
from fastdecode.wire.messages import Hello, Welcome
from fastdecode.wire.stages import StageWelcome
from rworker.stream.chunk_endpoints import LINK_BYTES

Welcomes = Mapping[HolderId, Welcome]


def make_replicas(
    fleet: HolderPool, hello: Hello, welcomes: Welcomes, workers: Reached, cluster: Cluster
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every holder offer what leaves room for the replicas. With R-workers, a cache
    on the device has none.

    Raises:
        ConfigError, WorkerError: see ``replicate``.
    """
    options = _options(hello.session, workers.addresses, cluster, workers.keepers)
    circle = fleet.members.holders[: workers.num_holders]
    return replicate(fleet, hello, welcomes, options, circle=circle)


def make_stage_replicas(
    fleet: HolderPool, session: int, workers: Reached, cluster: Cluster, others: Seq[StageWelcome]
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
            members.member(stage, holder): members.member(stage, keeper)
            for holder, keeper in workers.keepers.items()
        }
        named = zip([*circle, *keepers.values()], addresses, strict=True)
        if stage:
            members.addresses.update(named)
        names = members.addresses if stage else addresses
        rings.append((circle, _options(each, names, cluster, keepers)))
    return Replicas(fleet, rings)


def about_replicas(welcomes: Welcomes, again: Welcomes, workers: Reached) -> str:
    """What room replicas leave, for people."""
    keeps = "each R-worker keeps its neighbour's in as many"
    if workers.keepers:
        keeps = "the host's memory has a replica of all of them"
    num_blocks = sum(welcome.num_blocks for welcome in welcomes.values())
    offered = sum(welcome.num_blocks for welcome in again.values())
    return f"replicas: sequences have {offered} of {num_blocks} KV blocks; {keeps}"


def _options(
    session: int,
    addresses: Seq[str] | Mapping[HolderId, str],
    cluster: Cluster,
    keepers: Mapping[HolderId, HolderId],
) -> LinkOptions:
    timeout_s = cluster.worker_timeout_s
    # A device that failed before its replica is there leaves nobody who could recompute.
    begin_s = max(timeout_s, GREETING_TIMEOUT_S) if keepers else 0.0
    return LinkOptions(addresses, LINK_BYTES, timeout_s, session, keepers, begin_s)
