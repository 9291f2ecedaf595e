"""Processes that end with whoever started them."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.5


def end_with(parent: int, name: str) -> None:
    """Have this process end when its parent has, of which nobody else tells it.

    Args:
        parent: its process id, as it was when this process was started.
        name: what to call this process.
    """
    args = (parent, name)
    threading.Thread(target=_watch, args=args, name="parent-watch", daemon=True).start()


def _watch(parent: int, name: str) -> None:
    while os.getppid() == parent:  # it is somebody else's child then
        time.sleep(_INTERVAL_S)
    logger.error("the process that started %s has ended, and so does it", name)
    logging.shutdown()
    os._exit(0)
