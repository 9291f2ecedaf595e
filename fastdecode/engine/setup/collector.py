"""Python's garbage collector, while an engine is open."""

from __future__ import annotations

import gc
from collections.abc import Callable


def freeze_objects() -> Callable[[], None]:
    """Leave out all objects that there are when an engine has been set up.

    Modules, the model and the engine's own parts live as long as it does; a
    full collection would visit each of them every time, in the middle of a
    step. What is garbage by now is collected first: else it would stay.

    Where objects are frozen already, by another engine or by the application,
    nothing is done: to thaw them is its owner's decision.

    Returns:
        What undoes it, for when the engine is closed: else what the engine
        leaves would stay.
    """
    if gc.get_freeze_count():
        return _leave
    gc.collect()
    gc.freeze()
    return gc.unfreeze


def _leave() -> None:
    """Nothing was frozen here."""
