"""Replicas as they were configured: of all R-workers, or of each stage's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastdecode.core.config.groups import Cluster
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.group_replicas import GroupReplicas, replicate_heads
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.pool import HolderPool, WorkerPool
from fastdecode.engine.fleet.replicas import Replicas, offer_halves, replicate
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.stages.replicas import ColumnReplicas, StageReplicas
from fastdecode.wire.messages import Hello, Welcome

Welcomes = Mapping[HolderId, Welcome]


def begin_replicas(
    fleet: HolderPool,
    hello: Hello,
    welcomes: Welcomes,
    workers: Reached,
    cluster: Cluster,
    tell: Callable[[str], None],
) -> tuple[dict[HolderId, Welcome], Replicas | GroupReplicas | ColumnReplicas]:
    """Have every R-worker keep its neighbour's replica; with several stages,
    those of the first one do.

    Raises:
        ConfigError: there is to be a single one, or one hasn't the memory.
    """
    replicas: Replicas | GroupReplicas | ColumnReplicas
    options = _options(hello, workers, cluster)
    if isinstance(fleet, GroupPool):
        again, replicas = replicate_heads(fleet, hello, welcomes, options)
    elif workers.stages is None:
        assert isinstance(fleet, WorkerPool)
        again, replicas = replicate(fleet, hello, welcomes, options)
    else:
        assert isinstance(fleet, WorkerPool)
        again, own = begin_stage_replicas(fleet, hello, welcomes, workers, cluster)
        replicas = ColumnReplicas(own, fleet, time.monotonic)
    num_blocks = sum(welcome.num_blocks for welcome in welcomes.values())
    offered = sum(welcome.num_blocks for welcome in again.values())
    tell(
        f"replicas: sequences have {offered} of {num_blocks} KV blocks; each R-worker keeps its "
        "neighbour's in as many"
    )
    return again, replicas


def begin_stage_replicas(
    fleet: WorkerPool, hello: Hello, welcomes: Welcomes, workers: Reached, cluster: Cluster
) -> tuple[dict[HolderId, Welcome], StageReplicas]:
    """The same, of one stage's R-workers."""
    again = offer_halves(fleet, hello, welcomes)
    replicas = StageReplicas(fleet, _options(hello, workers, cluster))
    replicas.begin(sorted(again))
    return again, replicas


def _options(hello: Hello, workers: Reached, cluster: Cluster) -> LinkOptions:
    return LinkOptions(
        workers.addresses, cluster.link_bytes, cluster.worker_timeout_s, hello.session
    )
