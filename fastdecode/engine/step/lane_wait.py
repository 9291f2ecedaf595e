"""Waiting where no lane can go on."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import HolderPool
from fastdecode.engine.step.arrivals import Arrival
from fastdecode.engine.step.lane_step import HostCopy
from fastdecode.engine.step.lanes import Lanes
from fastdecode.wire.patience import look_until_found


class LaneWait:
    """For ``fleet``'s answers and for copies of ``lanes``' steps to the host.

    Args:
        is_hybrid: some lanes wait for R-workers, and one never does.
    """

    def __init__(self, fleet: HolderPool, lanes: Lanes, *, is_hybrid: bool) -> None:
        self._fleet, self._lanes, self._is_hybrid = fleet, lanes, is_hybrid

    def first_to_come(self) -> Arrival | None:
        """No lane can go on: wait for an answer or for a copy to the host,
        whichever is first, for the one while the other is here would keep a
        lane from running. An answer is returned, what is copied is sent."""
        fleet, unsent = self._fleet, self._lanes.first_unsent
        # Others go on by answers alone, and weren't able to when the pipeline looked.
        with_copies = [
            step
            for step in self._lanes.in_flight
            if step.fed_by is not None or step.draws is not None or step.passage is not None
        ]
        copies = [copy for step in with_copies for copy in step.coming] if with_copies else []
        if (with_copies or self._is_hybrid) and self._lanes.any_can_go_on:
            return None  # by now
        if unsent is None and not copies and not self._is_hybrid:
            return fleet.receive()
        if not fleet.is_owed and not copies and unsent is not None:
            unsent.remote.wait_for_copy()
            return None
        if not fleet.is_owed and copies and unsent is None and not self._is_hybrid:
            copies[0].wait()
            return None
        found = look_until_found(partial(self._look, copies, fleet.lost.keys()), None)
        return found[0] if found else None

    def _look(self, copies: Seq[HostCopy], lost: Collection[HolderId]) -> list[Arrival] | None:
        """An answer, if one is here; none: something was sent or drawn, a lane
        can go on, or somebody was lost; None: nothing has happened."""
        fleet = self._fleet
        received = fleet.receive(most_s=0.0) if fleet.is_owed else None
        if received is not None:
            return [received]
        has_come = self._lanes.dispatch() or any(copy.done for copy in copies)
        # Of a lane on the device nobody says so who isn't asked.
        can_go_on = self._is_hybrid and self._lanes.any_can_go_on
        return [] if has_come or can_go_on or fleet.lost.keys() != lost else None
