"""Being interrupted, by an exception that leaves nothing behind once it was caught."""

from __future__ import annotations

from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to stop what it does.

    Not KeyboardInterrupt itself: where that leaves an ``exec`` of text, as
    dataclasses have it when a library is imported, CPython notes it, and a
    process run by ``python -m`` ends by SIGINT in place of its exit code,
    though the exception was caught (``pymain_run_python``; it compares types
    for identity).
    """


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal's handler. Raises Interrupted."""
    raise Interrupted
