"""The state of every holder: whether it serves, and what is under way.

===========  ================================================  ==================================
state        means                                             goes to
===========  ================================================  ==================================
OPEN         it serves; sequences may start on it              INTERRUPTED, LEAVING, LOST
INTERRUPTED  lost, or leaving; a copy of it is taken over      ASKED, LOST
             once no step is in flight
ASKED        the R-worker that takes over was asked what it    ADOPTED, OPEN, INTERRUPTED, LOST
             has of each sequence
ADOPTED      a neighbour serves it; nothing starts on it       OPEN, LEAVING, INTERRUPTED, LOST
LEAVING      as ADOPTED, and its replacement has a copy        INTERRUPTED, LOST
LOST         gone, with all that it kept                       OPEN
===========  ================================================  ==================================

Each change goes through ``HolderStates.move``, which refuses any other. The scheduler places
sequences by these states, and recovery decides by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from fastdecode.core.holders import HolderId


class HolderState(Enum):
    """See the module."""

    OPEN = "open"
    INTERRUPTED = "interrupted"
    ASKED = "asked"
    ADOPTED = "adopted"
    LEAVING = "leaving"
    LOST = "lost"


_S: Final = HolderState
TRANSITIONS: Final[Mapping[HolderState, frozenset[HolderState]]] = {
    _S.OPEN: frozenset({_S.INTERRUPTED, _S.LEAVING, _S.LOST}),
    _S.INTERRUPTED: frozenset({_S.ASKED, _S.LOST}),
    _S.ASKED: frozenset({_S.ADOPTED, _S.OPEN, _S.INTERRUPTED, _S.LOST}),
    _S.ADOPTED: frozenset({_S.OPEN, _S.LEAVING, _S.INTERRUPTED, _S.LOST}),
    _S.LEAVING: frozenset({_S.INTERRUPTED, _S.LOST}),
    _S.LOST: frozenset({_S.OPEN}),
}
"""States that a holder may enter from each."""


class HolderStates:
    """States of all holders, which are open at first."""

    def __init__(self, num_holders: int) -> None:
        self._states = [HolderState.OPEN] * num_holders
        self.are_lost = False
        """True if all holders are gone."""
        self.returning: set[HolderId] = set()
        """Lost holders that are sure to return."""

    def __getitem__(self, holder: HolderId) -> HolderState:
        return self._states[holder]

    def having(self, state: HolderState) -> list[HolderId]:
        return [HolderId(h) for h, own in enumerate(self._states) if own is state]

    @property
    def open(self) -> list[HolderId]:
        return self.having(HolderState.OPEN)

    @property
    def served(self) -> list[HolderId]:
        """Return the holders that are not lost."""
        lost = HolderState.LOST
        return [HolderId(h) for h, own in enumerate(self._states) if own is not lost]

    def move(self, holder: HolderId, state: HolderState) -> None:
        """Change a holder's state, which ``TRANSITIONS`` has to allow."""
        before = self._states[holder]
        is_known = state is before or state in TRANSITIONS[before]
        assert is_known, f"a holder that is {before.value} can't be {state.value}"
        self._states[holder] = state
        self.returning.discard(holder)
        self.are_lost = not self.served
