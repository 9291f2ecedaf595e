"""Python's cyclic garbage collector, and what an engine is made of."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Leave out all objects that there are when an engine has been set up.

    Modules, the model and the engine's own parts live as long as it does; a
    full collection would visit each of them every time, in the middle of a
    step. What is garbage by now is collected first: else it would stay.
    ``gc.unfreeze`` undoes this.
    """
    gc.collect()
    gc.freeze()
