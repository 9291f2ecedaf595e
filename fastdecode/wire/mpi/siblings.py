"""Which ranks on this host have been stopped? Asked when MPI doesn't return: it can't say for whom it waits."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_STOPPED = ("T", "t")  # by a signal; by whoever traces it


def stopped_siblings() -> list[str]:
    """Processes that this one's launcher started on this host and that have been stopped, like "rank 2 (process 81)".
    Nothing where the system doesn't tell."""
    parent = os.getppid()
    found = []
    for path in _PROC.glob("[0-9]*"):
        try:
            # pid (name) state ppid ...; the name may have spaces and parentheses in it.
            state, ppid = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state in _STOPPED:
                found.append(f"{_rank(path / 'environ')} (process {path.name})")
        except (OSError, ValueError):
            continue  # it has ended, or is somebody else's
    return found


def _rank(environ: Path) -> str:
    variables = dict(entry.partition("=")[::2] for entry in environ.read_text(errors="replace").split("\0"))
    return next((f"rank {variables[name]}" for name in _RANK_VARIABLES if name in variables), "a process beside it")
