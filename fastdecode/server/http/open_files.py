"""How many connections a process may have open at once."""

from __future__ import annotations

import contextlib
import resource

SPARE_FILES = 128
"""For what is no connection: the listener, logs, pipes to children, modules."""


def room_for_connections(wanted: int) -> int:
    """How many of ``wanted`` connections this process may hold, 1 or more; its
    soft limit of open files is raised towards the hard one for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # the system has bounds of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, soft - SPARE_FILES)
