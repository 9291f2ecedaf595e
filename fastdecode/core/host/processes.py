"""Python processes that this program starts, and how they end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import Final

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.5


def python_command(code: str, given: object) -> list[str]:
    """Return a command that executes ``code`` in a Python process, where ``given`` is a text.

    The process finds modules where this one does, and nowhere else: not in the working directory.
    """
    boot = f"import sys; given = sys.argv[1]; sys.path[:] = sys.argv[2:]; {code}"
    return [sys.executable, "-I", "-c", boot, str(given), *sys.path]


def end_with(parent: int, name: str) -> None:
    """End this process, which messages call ``name``, when its parent has ended."""
    args = (parent, name)
    threading.Thread(target=_watch, args=args, name="parent-watch", daemon=True).start()


def _watch(parent: int, name: str) -> None:
    while os.getppid() == parent:  # then another process adopts this one
        time.sleep(_INTERVAL_S)
    logger.error("the process that started %s has ended, and so does it", name)
    logging.shutdown()
    os._exit(0)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to stop its work.

    CPython compares types for identity: after a caught KeyboardInterrupt within ``exec``, as of
    dataclasses in an import, ``python -m`` ends by SIGINT (``pymain_run_python``)."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal. Raises: Interrupted."""
    raise Interrupted
