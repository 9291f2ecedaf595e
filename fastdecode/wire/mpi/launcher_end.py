"""Sees a launcher off that doesn't end though it was asked to, and its ranks.

Open MPI's has been seen to wait for ever after MPI_Abort: where ranks that had
been stopped were killed meanwhile, and where one was stopped and the launcher
got no further than the rank that asked, so that others stayed. The output is
whole by then, and whoever waits for the job waits for nothing. A rank that asks
a launcher to end has this file run beside it::

    python launcher_end.py PID

It imports nothing of ours: it isn't a rank.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil

NAMES: Final = ("mpirun", "mpiexec", "orterun", "prterun")
"""Of processes that were started for one job. A daemon that serves others as
well, as srun's, isn't ours to end."""
PATIENCE_S: Final = 20.0
TERMINATING_S: Final = 5.0
RANK_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
"""As ``launcher`` has them."""
LOOK_S: Final = 5.0
LEADING_RANK: Final = "0"


def see_off(names: tuple[str, ...] = NAMES) -> int | None:
    """Start to wait for this rank's launcher to end, in a process that outlives
    this one. Returns the launcher's; None: it isn't on this host, or none that
    we may end."""
    # Whoever calls this ends next, and must: also where no process can be started.
    with contextlib.suppress(psutil.Error, OSError):
        launcher = psutil.Process(os.getppid())
        if launcher.name() in names:
            # The launcher must not find it among what its ranks' output comes from.
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(launcher.pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            return launcher.pid
    return None


def end(
    launcher: psutil.Process,
    patience_s: float = PATIENCE_S,
    terminating_s: float = TERMINATING_S,
    ranks: list[psutil.Process] | None = None,
) -> None:
    """Wait for it to end, then see to it, and to its ranks before. One that was
    stopped hangs because somebody wants it to, and is left alone.

    Args:
        ranks: that it has started; None: those that it has now.
    """
    ranks = ranks_of(launcher) if ranks is None else ranks
    with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
        launcher.wait(patience_s)
        _kill(psutil.wait_procs(ranks, terminating_s)[1])
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        if launcher.status() == psutil.STATUS_STOPPED:
            return
        _kill(ranks)
        for ask in (None, launcher.terminate):
            if ask is not None:
                ask()
            with contextlib.suppress(psutil.TimeoutExpired):
                launcher.wait(terminating_s)
                return
        launcher.kill()


def wait_for(launcher: subprocess.Popen[bytes], look_s: float = LOOK_S) -> int:
    """Wait for a launcher to end. A rank that was stopped after rank 0 had ended would keep
    it for ever, since only rank 0 ends stopped ranks: such a rank is killed when two looks
    have found it so. Returns the launcher's exit code."""
    known = psutil.Process(launcher.pid)
    has_led, stopped_before = False, set[psutil.Process]()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return launcher.wait(look_s)
        ranks = _by_rank(known)
        has_led = has_led or LEADING_RANK in ranks.values()
        stopped = {process for process in ranks if _is_stopped(process)}
        if has_led and LEADING_RANK not in ranks.values():
            _kill([*(stopped & stopped_before)])
        stopped_before = stopped


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """Those that it has started on this host."""
    return [*_by_rank(launcher)]


def _by_rank(launcher: psutil.Process) -> dict[psutil.Process, str]:
    found: dict[psutil.Process, str] = {}
    with contextlib.suppress(psutil.Error):
        for child in launcher.children():
            with contextlib.suppress(psutil.Error):
                environ = child.environ()
                ranks = (environ[name] for name in RANK_VARIABLES if name in environ)
                found.update((child, rank) for rank in [*ranks][:1])
    return found


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(int(sys.argv[1]))
        if launcher.name() in NAMES:  # and not another that has its number by now
            end(launcher)
