"""The other ranks on this host, as the system knows them: asked when MPI
doesn't return, and can't say for whom it waits. Where the system doesn't tell,
there are none."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdecode.wire.mpi.launcher import RANK_VARIABLES

_PROC = Path("/proc")
_STOPPED = ("T", "t")  # by a signal; by whoever traces it
_ENDED = ("Z", "X", "x")

JOINING_TIMEOUT_S: Final = 120.0
"""How long ranks wait for each other in MPI_Init."""
_LOOK_S: Final = 0.25
_MISSING_S: Final = 5.0
"""The launcher starts all ranks of a host at once: one that hasn't been seen by
then has ended already."""
_STOPPED_S: Final = 10.0
"""A rank that has been stopped for so long isn't waited for any more."""


@dataclass(frozen=True)
class Sibling:
    """A process that this one's launcher started on this host."""

    rank: str
    """Empty: it doesn't say."""
    pid: int
    is_stopped: bool

    def __str__(self) -> str:
        return f"{f'rank {self.rank}' if self.rank else 'a process beside it'} (process {self.pid})"


def siblings() -> Iterator[Sibling]:
    """This process among them."""
    parent = os.getppid()
    for path in _PROC.glob("[0-9]*"):
        # pid (name) state ppid ...; the name may have spaces and parentheses in it.
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is somebody else's
            state, ppid = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state not in _ENDED:
                yield Sibling(_rank(path / "environ"), int(path.name), state in _STOPPED)


def stopped_siblings() -> list[str]:
    """Those that have been stopped, like "rank 2 (process 81)"."""
    return [str(sibling) for sibling in siblings() if sibling.is_stopped]


def ranks_here() -> frozenset[int]:
    """The processes of ranks on this host, this one's among them."""
    return frozenset(sibling.pid for sibling in siblings() if sibling.rank)


def end_siblings(*, stopped: bool = False, at_least: int = 1) -> None:
    """Kill the other ranks on this host.

    Args:
        stopped: only those that have been stopped.
        at_least: and only if there are so many.
    """
    others = [x for x in siblings() if x.rank and x.pid != os.getpid()]
    meant = [x for x in others if x.is_stopped or not stopped]
    for sibling in meant if len(meant) >= at_least else ():
        with contextlib.suppress(OSError):
            os.kill(sibling.pid, signal.SIGKILL)


def end_ranks(ranks: Collection[int]) -> set[int]:
    """Kill those of these ranks that are on this host. Which they were."""
    ended: set[int] = set()
    for sibling in siblings():
        if sibling.rank.isdecimal() and int(sibling.rank) in ranks and sibling.pid != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(sibling.pid, signal.SIGKILL)
            ended.add(int(sibling.rank))
    return ended


class JoinWatch(threading.Thread):
    """Inside, this process waits for all ranks of its job. One that has ended,
    or doesn't come, would keep it there.

    Args:
        num_local: ranks on this host.
        num_ranks: of the whole job.
        give_up: told why, once.
        among: of these ranks it is looked whether they are stopped, and of nobody
            whether it has ended: that is heard otherwise; None: both, of all ranks.
    """

    def __init__(
        self,
        num_local: int,
        num_ranks: int,
        give_up: Callable[[str], None],
        among: Collection[int] | None = None,
    ) -> None:
        super().__init__(name="join-watch", daemon=True)
        self._num_local = num_local
        self._num_ranks = num_ranks
        self._give_up = give_up
        self._among = None if among is None else {str(rank) for rank in among}
        self._joined = threading.Event()
        self._seen: dict[int, Sibling] = {}
        self._stopped_looks: dict[int, int] = {}

    def __enter__(self) -> JoinWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._joined.set()

    def run(self) -> None:
        num_looks = 0  # looks are counted, not time: a process that was stopped has missed both
        while not self._joined.wait(_LOOK_S):
            num_looks += 1
            reason = self._look(num_looks)
            if reason is not None and not self._joined.wait(_LOOK_S):
                self._give_up(reason)
                return

    def _look(self, num_looks: int) -> str | None:
        """Why this process would wait for ever, if it would."""
        ranks = (sibling for sibling in siblings() if sibling.rank)
        present = {x.pid: x for x in ranks if self._among is None or x.rank in self._among}
        self._seen.update(present if self._among is None else {})
        for sibling in self._seen.values():
            if sibling.pid not in present:
                return f"{sibling} has ended before it joined, as its own output then says"
        self._stopped_looks = {
            pid: self._stopped_looks.get(pid, 0) + 1 for pid, x in present.items() if x.is_stopped
        }
        for pid, num_stopped in self._stopped_looks.items():
            if num_stopped * _LOOK_S >= _STOPPED_S:
                return f"{present[pid]} has been stopped before it joined"
        return None if self._among is not None else self._who_never_came(num_looks * _LOOK_S)

    def _who_never_came(self, waited_s: float) -> str | None:
        missing = self._num_local - len(self._seen)
        if waited_s >= _MISSING_S and missing and _parent_is_launcher():
            who = f"{missing} of {self._num_local} ranks on this host"
            if self._num_local == self._num_ranks:
                absent = {str(rank) for rank in range(self._num_ranks)} - {
                    x.rank for x in self._seen.values()
                }
                who = f"rank {', '.join(sorted(absent, key=int))}"
            return f"{who} has ended before it joined, as its own output then says"
        if waited_s >= JOINING_TIMEOUT_S:
            return (
                f"some rank hasn't joined for {JOINING_TIMEOUT_S:g} s: it has ended, hangs, or "
                "can't be reached"
            )
        return None


def _parent_is_launcher() -> bool:
    """Not, where each rank is started by a script of its own."""
    try:
        return not _rank(_PROC / str(os.getppid()) / "environ")
    except OSError:
        return False


def _rank(environ: Path) -> str:
    variables = dict(
        entry.partition("=")[::2] for entry in environ.read_text(errors="replace").split("\0")
    )
    return next((variables[name] for name in RANK_VARIABLES if name in variables), "")
