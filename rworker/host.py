"""What an R-worker takes of its host: threads, memory, CPUs. And how it serves as an MPI rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.host.machine import default_kv_bytes
from fastdecode.wire import ranks as mpi_ranks
from fastdecode.wire.messages import MAX_THREADS
from rworker.binding import bind, is_bound, numa_node_cpus, parse_cpu_list, usable_nodes
from rworker.serving_terms import ANYBODY_ONCE, ServingTerms
from rworker.tiers.disk import Disk, disk_of

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiJob
    from fastdecode.wire.ranks import InstanceRanks
    from rworker.attention import AttentionExecutor
    from rworker.state import RWorkerState

logger = logging.getLogger(__name__)


def make_worker(
    name: str,
    *,
    kv_memory_gb: float | None,
    num_threads: int | None,
    num_sharing: int = 1,
    disk: Disk | None = None,
    serving: ServingTerms = ANYBODY_ONCE,
) -> tuple[RWorkerState, AttentionExecutor]:
    """Make an R-worker's state and executor, for its share of a host of ``num_sharing`` processes.

    Args:
        kv_memory_gb: KV cache in GB. None for its share of half the free memory.
        num_threads: CPU threads. None for its CPUs, or its share of the host's.
        disk: where cached blocks may go. None if nowhere.
        serving: which S-workers to serve, and for how long.

    Raises:
        ConfigError: If an option is out of range.
    """
    # Numba counts CPUs when it is imported, so that comes after they have been bound.
    from rworker.attention import AttentionExecutor
    from rworker.state import RWorkerState
    from rworker.tiers.tiers import Tiers

    threads = num_threads
    if threads is None:
        threads = available_cores(num_sharing, 1 if is_bound() else None)
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(
            Given("threads", threads), f" is not a whole number from 1 to {MAX_THREADS}"
        )
    state = RWorkerState(
        name,
        kv_bytes=kv_bytes_of(kv_memory_gb, num_sharing),
        num_threads=threads,
        has_tier=disk is not None,
        serving=serving,
    )
    return state, AttentionExecutor(num_threads=threads, tiers=Tiers(disk))


def kv_bytes_of(kv_memory_gb: float | None, num_sharing: int) -> int:
    """Return the KV memory of one of ``num_sharing`` R-workers on this host.

    Raises:
        ConfigError: If it is out of range.
    """
    if kv_memory_gb is None:
        return default_kv_bytes(num_sharing)
    if not 0 < kv_memory_gb <= 1e6:
        raise ConfigError(
            Given("kv_memory_gb", kv_memory_gb), " is not a number of GB above 0 and at most 1e6"
        )
    return int(kv_memory_gb * 1e9)


def bind_cpus(cpus: str | None, numa_node: str | None) -> int | None:
    """Run on these CPUs only, or on those of a NUMA node. With ``auto`` the ranks on this host
    take turns on its nodes, and keep to the CPUs that they were given.

    Returns:
        How many ranks share the CPUs, if that is known.

    Raises:
        ConfigError: If both are given, or there are no such CPUs.
    """
    if cpus is not None and numa_node is not None:
        raise ConfigError("give --cpus or --numa-node, not both")
    if cpus is not None:
        bind(parse_cpu_list(cpus))
    elif numa_node == "auto":
        has_own, nodes = is_bound(), usable_nodes()
        if nodes:
            bind(nodes[mpi_ranks.local_rank() % len(nodes)])
        return 1 if has_own else max(1, mpi_ranks.local_size() // max(1, len(nodes)))
    elif numa_node is not None:
        if not (numa_node.isascii() and numa_node.isdigit() and len(numa_node) <= 5):
            raise ConfigError(f"--numa-node={numa_node!r} is neither a number nor auto")
        bind(numa_node_cpus(int(numa_node)))
    return None


def serve_rank(
    job: MpiJob,
    *,
    kv_memory_gb: float | None,
    num_threads: int | None,
    num_sharing_cpus: int | None = None,
    cache_disk: str | None = None,
    cache_disk_gb: float | None = None,
    instances: InstanceRanks | None = None,
    silence_s: float = 5.0,
) -> NoReturn:
    """Serve the S-worker of an MPI job until it sends Shutdown or is gone. Then leave the job.

    Args:
        kv_memory_gb, num_threads: see ``make_worker``.
        num_sharing_cpus: ranks on this one's CPUs. None for all of its host, unless it is bound.
        cache_disk, cache_disk_gb: see ``disk_of``.
        instances: the job's instances. None for one S-worker, or stages.
        silence_s: longest silence of an R-worker of another instance. Then it is read no more.

    Raises:
        ConfigError: If an option is out of range, or this is the S-worker's rank.
    """
    mpi_ranks.let_rank_0_stop()
    from fastdecode.wire.mpi.hub import neighbour_hub, r_worker_hub
    from fastdecode.wire.mpi.job import leave
    from rworker.worker import serve

    if num_threads is None and num_sharing_cpus is not None:
        num_threads = available_cores(mpi_ranks.local_size(), num_sharing_cpus)
    _check_rank(job, instances)
    hub = r_worker_hub(job)  # gives signs of life, while kernels are compiled too
    neighbours = neighbour_hub(job, 0.0 if instances is None else silence_s)
    state, executor = make_worker(
        f"rank {job.rank} on {job.host}",
        kv_memory_gb=kv_memory_gb,
        num_threads=num_threads,
        num_sharing=mpi_ranks.local_size(),
        disk=disk_of(cache_disk, cache_disk_gb),
    )
    serve(hub, state, executor, neighbours=neighbours)
    neighbours.close()
    hub.close()
    if instances is not None:
        job.wait_for_end()  # the other instances continue
    if mpi_ranks.S_RANK in job.dead:
        # It can't say itself that the job has failed, and mpirun doesn't.
        code = WorkerError.exit_code
        logger.critical("the S-worker has died: the job ends, with exit code %d", code)
        leave(code)
    leave(0)


def _check_rank(job: MpiJob, instances: InstanceRanks | None) -> None:
    """Raise ConfigError if this rank is not an R-worker's."""
    if job.rank == mpi_ranks.S_RANK:
        raise ConfigError(
            f"an R-worker was started as rank {job.rank}, the S-worker's: begin the mpirun line "
            "with -n 1 fastdecode generate ... and let the R-workers follow behind a colon"
        )
    if instances is not None:
        instances.check(job.size)
        if instances.role(job.rank) is not mpi_ranks.RankRole.R_WORKER:
            raise ConfigError(
                f"an R-worker was started as rank {job.rank}, an S-worker's: fastdecode launch "
                "--placement has the ranks in their order"
            )
