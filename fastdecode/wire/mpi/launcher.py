"""What the launcher of an MPI job tells its ranks, by the environment and by
signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from fastdecode.core.host.processes import interrupt

# Where launchers say how many ranks they start: Open MPI, MPICH and Intel MPI
# (Hydra), MVAPICH, Slurm's srun with PMI.
_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
RANK_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_PREFIXES: Final = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDRA_", "MV2_")
_LOCAL_SIZE_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)

LAUNCH_LINE: Final = "FASTDECODE_LAUNCH_LINE"
"""``fastdecode launch`` has started the job: its own words, in JSON. A launcher may
keep that from ranks of other hosts."""


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks an MPI launcher says it started, this process among them;
    None: started without a launcher."""
    for name in (*_SIZE_VARIABLES, *_slurm_variables(environ)):
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which rank this process is, as far as the launcher says; None: it
    doesn't, or there is none."""
    for name in RANK_VARIABLES:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def repeats_other_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a rank before this one has the same command line, as far as the launcher
    says (Open MPI does)."""
    rank, size = launched_rank(environ), launched_size(environ)
    if rank is None or "OMPI_COMM_WORLD_SIZE" not in environ:
        return False
    sizes = environ.get("OMPI_APP_CTX_NUM_PROCS", str(size)).split()
    if not all(each.isdecimal() for each in sizes):
        return False
    return rank not in accumulate(map(int, sizes), initial=0)


def local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks on this host, as far as the launcher says; else 1."""
    for name in _LOCAL_SIZE_VARIABLES:
        value = environ.get(name, "")
        if value.isdecimal() and int(value) >= 1:
            return int(value)
    return 1


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's place among the ranks on this host, as far as the launcher says; else 0."""
    for name in _LOCAL_RANK_VARIABLES:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is no rank of the job."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES)}


def _slurm_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    # An interactive allocation sets SLURM_NTASKS too; only a step's tasks have
    # a PMI or PMIx server to talk to.
    return ("SLURM_STEP_NUM_TASKS",) if "PMIX_RANK" in environ or "PMI_RANK" in environ else ()


def stop_on_request(environ: Mapping[str, str] = os.environ) -> None:
    """In an MPI job SIGUSR1, which launchers pass on to all ranks, asks it to
    stop, as Ctrl-C does elsewhere: with Ctrl-C or SIGTERM they kill the
    ranks."""
    if launched_size(environ) is not None:
        signal.signal(signal.SIGUSR1, interrupt)


def let_rank_0_stop() -> None:
    """A whole job is told to stop, by signals to all its ranks. Rank 0 then
    decides when, and needs this one until it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
