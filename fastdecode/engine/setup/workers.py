"""Where an engine's R-workers come from, and how they are stopped again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given, WorkerError, imports_for
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.host.cpus import available_cores
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import MixedPool, RConnection, RHub, WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements, SpareHub
from fastdecode.engine.fleet.resharing import in_heads
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.pool import ColumnPool, StagePool
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, Hello, Shutdown, ToRWorker
from fastdecode.wire.transport import Connection, Hub, JoinedHub
from rworker.tiers.disk import Disk
from rworker.transfers.neighbours import Neighbourhood, ThreadNeighbours
from rworker.worker import start_worker_thread

if TYPE_CHECKING:
    from fastdecode.engine.step.device import DeviceAttention
    from fastdecode.wire.ranks import StageRanks
    from sworker.worker import SWorker

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 20.0  # for R-workers that are being started at the same time
Close: TypeAlias = Callable[[Collection[int], float], None]
"""Stops R-workers and closes their connections, once. ``(lost, timeout_s)``: lost ones aren't
waited for, they may hang for ever. Raises WorkerError if another one did not stop in time."""


@dataclass(frozen=True)
class Reached:
    """R-workers that have been reached, or what is in their place."""

    hub: RHub  # one connection a holder
    close: Close
    absent: Mapping[int, WorkerError] = field(default_factory=dict)
    """Those that couldn't be reached, by their connection's index, and why."""
    replacements: Callable[[Hello, Deadlines], Replacements] | None = None
    """Makes what looks for replacements of lost ones. None if those have none."""
    kind: HolderKind = HolderKind.R_WORKER
    answers_at_once: bool = False
    addresses: Sequence[str] = ()
    """What R-workers call each other, where they can reach one another; kept up
    to date where others come in their places."""
    num_spares: int = 0
    """R-workers beside those of the hub, that come when one is lost."""
    attention: Callable[[HolderPool, Holder, SWorker], DeviceAttention] | None = None
    """Makes what attends, where that isn't done by sending q, k and v."""
    stages: StageLinks | None = None
    """Other stages of the pipeline: the hub's last connections."""
    keepers: Mapping[HolderId, HolderId] = field(default_factory=dict)
    """Which of the hub's last R-workers keep the holders' replicas, and nothing else."""

    @property
    def num_holders(self) -> int:
        """R-workers, or what is in their place; of several stages, this one's."""
        return len(self._r_workers) - len(self.keepers)

    @property
    def _r_workers(self) -> Sequence[RConnection]:
        connections = self.hub.connections
        return connections[: len(connections) - len(self.stages or ())]

    def places(
        self, config: EngineConfig, hello: Hello, deadlines: Deadlines
    ) -> Replacements | None:
        """R-workers that may replace lost ones; None: there are none, or the R-workers
        that are left share the heads anew at once."""
        waits = config.r_part.replicas or config.cluster.spare_r_workers
        if self.replacements is None or (config.r_part.r_partition == "heads" and not waits):
            return None
        return self.replacements(hello, deadlines)

    @property
    def greeting(self) -> str:
        peers = [connection.peer for connection in self._r_workers]
        if self.kind is HolderKind.DEVICE:
            return f"no R-workers: {', '.join(peers)}"
        spare = f"; {self.num_spares} more to spare" if self.num_spares else ""
        whose = " of the first stage" if self.stages is not None else ""
        return f"greeting {len(peers)} R-worker(s){whose}: {', '.join(peers)}{spare}"


def pools_of(
    workers: Reached,
    config: EngineConfig,
    device: RConnection | None = None,
    layers: Sequence[range] = (),
) -> tuple[WorkerPool, HolderPool]:
    """Return a stage's R-workers and its holders, which in the first one are columns of all stages.

    Args:
        device: With a cache beside R-workers'. None if there is none.
        layers: Of each stage, in the first one. Empty in later ones.
    """
    cluster, hub = config.cluster, workers.hub
    given = hub, cluster.worker_timeout_s, cluster.worker_silence_s
    shares_heads, num_keepers = config.r_part.r_partition == "heads", len(workers.keepers)
    if workers.stages is not None:
        members = StagePool(
            *given,
            absent=workers.absent,
            stages=workers.stages,
            relayed=range(1, len(layers)),
            num_columns=1 if shares_heads else None,
            num_keepers=num_keepers,
        )
        if layers:
            return members, ColumnPool(members, workers.stages, layers, shares_heads=shares_heads)
        return members, in_heads(members) if shares_heads else members
    keepers = range(len(hub.connections) - num_keepers, len(hub.connections))
    make = MixedPool if device is not None or keepers else WorkerPool
    pool = make(*given, absent=workers.absent, device=device, keepers=keepers)
    return pool, in_heads(pool) if shares_heads else pool


def start_threads(
    names: Sequence[str],
    kv_bytes: int,
    num_threads: int,
    hub: InprocHub[ToRWorker, FromRWorker],
    neighbours: Neighbourhood,
    disk: Disk | None = None,
    first: int = 0,
) -> Close:
    """Start R-workers as threads of this process. Return what stops them.

    Args:
        names: Of each, among their neighbours.
        first: The first one's index in the hub that they are known by.
    """
    given: Any = {"kv_bytes": kv_bytes, "num_threads": num_threads, "disk": disk}
    threads = [start_worker_thread(x, hub=hub, neighbours=neighbours, **given) for x in names]

    def close(lost: Collection[int], timeout_s: float) -> None:
        for thread in threads:
            thread.stop()
        for index, thread in enumerate(threads, first):
            if index in lost:
                thread.connection.close()
            else:
                thread.join(timeout_s)

    return close


def name_prefix(beside: Colocation | None, stage: int) -> str:
    """Return what names of an engine's R-workers begin with, of a later stage's too."""
    engine = "" if beside is None else f"{beside.name}-"
    return f"{engine}s{stage}-" if stage else engine


def reach_threads(
    num_workers: int,
    *,
    kv_bytes: int,
    num_threads: int,
    disk: Disk | None = None,
    hub: InprocHub[ToRWorker, FromRWorker] | None = None,
    stage: int = 0,
    beside: Colocation | None = None,
) -> Reached:
    """Reach R-workers as threads of this process.

    Args:
        hub: None for one that has no others.
        beside: Other engines' in this process. If None, they reach each other alone.
    """
    hub = InprocHub() if hub is None else hub
    neighbours = ThreadNeighbours() if beside is None else beside.neighbours
    names = [f"{name_prefix(beside, stage)}r{index}" for index in range(num_workers)]
    close = start_threads(names, kv_bytes, num_threads, hub, neighbours, disk)
    return Reached(hub, close, addresses=tuple(map(neighbours.address_of, names)))


def reach_stage_ranks(
    stage: int, ranks: StageRanks, *, elsewhere: Reached | None = None
) -> Reached:
    """Reach a stage's R-workers as ranks of this MPI job, and the other stages, if there are any.
    This process leads the stage of that number. Each decides its own memory and threads.

    Args:
        elsewhere: The stage's R-workers, or what is in their place, if these aren't ranks.

    Raises:
        ConfigError: If no launcher has started this, or ranks can't be shared out to the stages.
        MissingExtraError: If mpi4py or an MPI library is missing.
    """
    from fastdecode.wire.mpi.hub import connect_stage
    from fastdecode.wire.mpi.job import join
    from fastdecode.wire.ranks import link_address

    job = join()
    r_ranks: Sequence[int] = ()
    if elsewhere is None:
        r_ranks = ranks.r_workers(job.size, stage)
    else:
        ranks.check_none_left(job.size)
    hub, others = connect_stage(job, ranks, stage, r_ranks)
    links = StageLinks(others, is_asked=stage > 0)
    num_r_workers = len(hub.connections) - len(others)

    def close(lost: Collection[int], timeout_s: float) -> None:
        if not stage:
            links.shut_down()
        for index, connection in enumerate(hub.connections[:num_r_workers]):
            if index in lost:
                connection.give_up()
            else:
                _shut_down(connection)
        for other in links.gone:
            others[other].give_up()
        hub.close()

    if elsewhere is not None:
        return beside_stages(elsewhere, hub, links, close)
    addresses = tuple(map(link_address, r_ranks))
    return Reached(hub, close, addresses=addresses, stages=links if others else None)


def beside_stages(workers: Reached, hub: Hub[Any, Any], links: StageLinks, close: Close) -> Reached:
    """Return a stage's R-workers, and the other stages, to which it is connected over
    another transport. ``close`` lets go of those."""

    def close_all(lost: Collection[int], timeout_s: float) -> None:
        try:
            workers.close(lost, timeout_s)
        finally:
            close(lost, timeout_s)

    # A column answers when all stages have.
    hub = JoinedHub(workers.hub, hub)
    return replace(workers, hub=hub, close=close_all, answers_at_once=False, stages=links)


def reach_addresses(
    addresses: Sequence[str],
    *,
    key_file: str | None,
    silence_s: float,
    min_workers: int = 1,
    reach_timeout_s: float = REACH_TIMEOUT_S,
    ends_them: bool = True,
    retries: bool = True,
) -> Reached:
    """Reach R-workers at addresses, and wait for all of them for a while. Each decides its own
    memory and threads.

    Args:
        addresses: tcp://HOST:PORT, one a worker.
        key_file: With the cluster's key. None for R-workers of this host only.
        silence_s: Longest silence of one that is not lost.
        min_workers: Fewest that have to be present.
        ends_them: Closing shuts them down.
        retries: See ``ZmqHub.reach``.

    Raises:
        ConfigError: If an address or the key can't be used.
        MissingExtraError: If pyzmq is missing.
        WorkerError: If fewer could be reached in time: others are absent, or refused the key.
    """
    with imports_for("the ZeroMQ transport"):
        from fastdecode.wire.zmq.hub import ZmqHub, io_threads_for
        from fastdecode.wire.zmq.keys import read_key
    key = read_key(key_file)
    num_threads = io_threads_for(len(addresses), available_cores())
    hub = ZmqHub(key, silence_s=silence_s, num_io_threads=num_threads)
    try:
        for address in addresses:
            hub.add(address)
        absent = hub.reach(reach_timeout_s, retries=retries)
        if len(addresses) - len(absent) < min_workers:
            raise next(iter(absent.values()))
    except BaseException:
        hub.close()
        raise

    def close(lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(hub.connections):
            if ends_them and index not in lost:
                _shut_down(connection)
        hub.close()

    return Reached(hub, close, absent, partial(HubReplacements, hub), addresses=tuple(addresses))


def _shut_down(connection: Connection[ToRWorker, FromRWorker]) -> None:
    try:
        connection.send(Shutdown())
    except WorkerError:
        logger.debug("%s has ended already", connection.peer)


def with_spares(workers: Reached, num_spares: int) -> Reached:
    """Return the R-workers with the last ``num_spares`` as spare ones.

    Raises:
        ConfigError: If no other one is left.
    """
    if not num_spares:
        return workers
    num_workers = len(workers.addresses)
    if num_spares >= num_workers:
        raise ConfigError(
            Given("spare_r_workers", num_spares),
            f": there are {num_workers} R-workers, of which one at least has to be there from the "
            "beginning: start more",
        )
    hub = SpareHub(workers.hub, num_spares, workers.addresses)

    def close(lost: Collection[int], timeout_s: float) -> None:
        workers.close(hub.given_up(lost), timeout_s)

    return replace(
        workers,
        hub=hub,
        close=close,
        replacements=partial(HubReplacements, hub),
        addresses=hub.addresses,
        num_spares=num_spares,
    )
