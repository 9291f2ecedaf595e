"""A file of slots whose reads wait until they are let, a layer at a time."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from rworker.tiers.slots import SlotFile

WAIT_S = 30.0


class HeldSlots(SlotFile):
    """See the module. Its layers are whole pages."""

    lets: list[threading.Event]
    damaged: set[tuple[int, int]]  # slot and layer of what is read with a flipped bit

    def let(self, layer: int) -> None:
        """From now on reads of this layer don't wait."""
        self.lets[layer].set()

    def read(self, slot: int, first: int, into: NDArray[np.uint8]) -> None:
        layer = first // self.shape.layer_bytes
        assert self.lets[layer].wait(WAIT_S), "nobody has let it"
        super().read(slot, first, into)
        if (slot, layer) in self.damaged:
            into[7] ^= 1


def held(slots: SlotFile) -> HeldSlots:
    """The same file, with all layers held."""
    slots.__class__ = HeldSlots
    assert isinstance(slots, HeldSlots)
    slots.lets = [threading.Event() for _ in range(slots.shape.num_layers)]
    slots.damaged = set()
    return slots
