"""Leaving an MPI job without hanging, whatever the other ranks do."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final, NoReturn

from fastdecode.core.errors import WorkerError
from fastdecode.wire.mpi import launcher_end
from fastdecode.wire.mpi.job import DEFAULT_TAG, S_RANK, joined
from fastdecode.wire.mpi.siblings import end_siblings, stopped_siblings

logger = logging.getLogger(__name__)

LEAVING_TIMEOUT_S: Final = 5.0

_last_acts: Final[list[Callable[[int], None]]] = []
"""What this process does last, if it must end in the middle of something."""


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
        if end_job or any(job.hanging for job in joined):
            _abort(exit_code or WorkerError.exit_code, timeout_s, says_goodbye=True)
        part(exit_code, timeout_s)
    _exit(exit_code)


def before_leaving_stuck(act: Callable[[int], None]) -> None:
    """Have ``act(exit_code)`` called before ``leave_stuck`` ends this process;
    in a thread of its own, while what the process was at hangs."""
    _last_acts.append(act)


def leave_stuck(waited_s: float) -> None:
    """End this process, and have the launcher end the others: MPI has kept one
    of its threads for far too long."""
    exit_code = WorkerError.exit_code
    _exit_later(exit_code, LEAVING_TIMEOUT_S, end_job=True)  # whatever becomes of logs and files
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


def give_up_joining(reason: str) -> None:
    """End this process: the job can't begin."""
    exit_code = WorkerError.exit_code
    logger.critical("the MPI job can't begin: %s; exit code %d", reason, exit_code)
    for act in _last_acts:
        with contextlib.suppress(Exception):
            act(exit_code)
    end_siblings(stopped=True)  # nobody else would
    _exit(exit_code)


def part(exit_code: int = 1, timeout_s: float = LEAVING_TIMEOUT_S) -> None:
    """Say goodbye, and finalize MPI; end the process with that exit code if MPI
    doesn't let it go.

    Without the goodbye, ranks would wait for one that never got as far as
    connecting to them. MPI_Finalize waits for all ranks, and after one has
    failed it may never return.
    """
    from fastdecode.wire.mpi.library import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        return
    timer = _exit_later(exit_code, timeout_s)
    _silence_threads()
    if MPI.COMM_WORLD.rank == S_RANK:
        end_siblings(stopped=True)  # they don't hear the goodbye, and the launcher waits for them
    _say_goodbye()
    _finalize()
    timer.cancel()


def _say_goodbye() -> None:
    from fastdecode.wire.mpi.library import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    waiting = set(range(1, size)) if rank == S_RANK else {S_RANK}
    for job in joined:
        waiting |= job.peers
    for peer in sorted(waiting):
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_WORLD.Isend([b"", MPI.BYTE], peer, DEFAULT_TAG)


def _abort(exit_code: int, timeout_s: float, *, says_goodbye: bool = False) -> None:
    """``says_goodbye``: MPI still works. Open MPI's launcher has been seen to end
    no rank that is left, where it tells them of failures itself."""
    from fastdecode.wire.mpi.library import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        _exit_later(exit_code, timeout_s, end_job=True)
        _silence_threads()
        if says_goodbye and MPI.COMM_WORLD.rank == S_RANK:
            _say_goodbye()
        # Open MPI's launcher would end one, too. Where there are two it gets no
        # further than this rank, and waits for them for ever.
        end_siblings(stopped=True, at_least=2)
        _abort_world(exit_code)


def _silence_threads() -> None:
    """Hubs that weren't closed have threads that call MPI."""
    for job in joined:
        has_lock = job.lock.acquire(timeout=1.0)
        job.over.set()
        if has_lock:
            job.lock.release()


def _exit_later(exit_code: int, timeout_s: float, *, end_job: bool = False) -> threading.Timer:
    """End this process in a while, unless the timer is cancelled.

    Args:
        end_job: and the other ranks on this host, not only those that have been
            stopped, which the launcher is asked to; and the launcher, should that
            hang. It may end this process before the time is over, and nobody else.
    """

    def give_up() -> None:
        logger.warning("MPI doesn't let this rank go; it leaves all the same")
        end_siblings(stopped=not end_job)  # the launcher would wait for those for ever
        _exit(exit_code)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    if end_job:  # which looks at processes, and starts one: that may hang, too
        launcher_end.see_off()
    return timer


def _exit(exit_code: int) -> NoReturn:
    logging.shutdown()
    _flush()
    os._exit(exit_code)


def _abort_world(exit_code: int) -> None:
    """MPI_Abort of all ranks, while other threads of this one run: it waits for
    the launcher, which may hang."""
    from fastdecode.wire.mpi.library import MPI

    abort = _without_pythons_lock("MPI_Abort")
    if abort is None:
        MPI.COMM_WORLD.Abort(exit_code)
    else:
        handle = ctypes.c_void_p if MPI._sizeof(MPI.COMM_WORLD) == 8 else ctypes.c_int
        world = handle.from_address(MPI._addressof(MPI.COMM_WORLD))
        abort(world, ctypes.c_int(exit_code))


def _finalize() -> None:
    """MPI_Finalize, while other threads of this process run."""
    from fastdecode.wire.mpi.library import MPI

    (_without_pythons_lock("MPI_Finalize") or MPI.Finalize)()


def _without_pythons_lock(function: str) -> Callable[..., object] | None:
    """MPI's function itself: mpi4py's keeps Python's lock, so that no deadline
    of ours would pass while it hangs. None: it can't be found."""
    from fastdecode.wire.mpi.library import MPI

    try:
        found: Callable[..., object] = getattr(ctypes.CDLL(MPI.__file__), function)
    except (OSError, AttributeError):
        return None
    return found


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
