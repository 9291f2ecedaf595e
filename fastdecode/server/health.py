"""Whether a token could come out."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.server.link import StatusReport

SILENCE_S = 20.0
"""The engine's process says something twice a second, while it runs at all."""
_SLOWER = 10
"""Than the longest step of late; then a step is no longer a long one, but none."""


@dataclass(frozen=True)
class Outlook:
    """What the HTTP process knows of the engine."""

    is_ready: bool = False
    """Requests were welcome once."""
    is_draining: bool = False
    is_lost: bool = False
    """The engine's process has ended."""
    seen: StatusReport | None = None
    seen_s: float = 0.0
    """When that came."""


def trouble(
    outlook: Outlook, waiting_since_s: float | None, now: float, stall_s: float
) -> str | None:
    """Why no token could come out: starting, draining, stalled, broken or
    no_r_worker; None: one could.

    Args:
        waiting_since_s: since when there has been work without a break; None:
            there is none.
        stall_s: work without a step for so long is a stall, unless steps are
            long.
    """
    seen = outlook.seen
    if outlook.is_lost or (seen is not None and _has_failed(seen, outlook.is_draining)):
        return "broken"
    if outlook.is_draining:
        return "draining"
    if not outlook.is_ready or seen is None:
        return "starting"
    is_silent = now - outlook.seen_s > min(SILENCE_S, stall_s)
    if is_silent or _is_stalled(seen, waiting_since_s, now, stall_s):
        return "stalled"
    return None if seen.num_live_r_workers or not seen.num_r_workers else "no_r_worker"


def _has_failed(seen: StatusReport, is_draining: bool) -> bool:
    """An engine that was drained is closed, too, but has done its work."""
    if seen.state == "closed":
        return seen.error is not None or not is_draining
    return seen.state == "broken"


def _is_stalled(
    seen: StatusReport, waiting_since_s: float | None, now: float, stall_s: float
) -> bool:
    if waiting_since_s is None:
        return False
    since_s = max(waiting_since_s, seen.stepped_s or 0.0)
    return now - since_s > max(stall_s, _SLOWER * seen.longest_step_s)
