"""Replacements of lost R-workers of a pipeline: a column whose lost members have all
been replaced, each in its own stage, is greeted again in every stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import CacheGroup
from fastdecode.engine.fleet.replacements import Replacements, limited
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.wire.messages import Hello, Welcome


class ColumnReplacements:
    """See the module, and ``fastdecode.engine.fleet.replacements.Replacements``.

    A lost column is looked at once no sequence is on it. No step on it is under way
    then, in any stage, so its R-workers may forget what they have.

    Args:
        fleet: the columns.
        hello: what R-workers of the first stage are greeted with.
        places: R-workers that may replace these.
        timeout_s: how long to go on looking when all columns are lost.
    """

    def __init__(
        self, fleet: ColumnPool, hello: Hello, places: Replacements, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._hello = hello
        self._places = places
        self._timeout_s = timeout_s
        self._greeting: set[HolderId] = set()
        self._most_blocks: Mapping[int, int] = {}

    @property
    def timeout_s(self) -> float:
        """See ``Replacements``; 0: each lost column lacks a member that has no replacement."""
        groups = (self._fleet.groups[holder] for holder in self._fleet.lost)
        return 0.0 if all(map(self._is_vacant, groups)) else self._timeout_s

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """See ``Replacements``. The members that are left offer no more, either."""
        self._most_blocks = num_blocks
        self._places.limit(num_blocks)

    def look(self, lost: Collection[int]) -> dict[int, Welcome]:
        if not self._fleet.later.are_welcome:
            return {}  # the job begins
        if len(self._fleet.lost) == len(self._fleet):
            self._fleet.look()  # no step waits for answers meanwhile
        for holder in map(HolderId, lost):
            group = self._fleet.groups[holder]
            if group.broken is not None:
                self._greeting.discard(holder)
            if holder not in self._greeting and self._let_in(group):
                self._greeting.add(holder)
                self._fleet.send(holder, limited(self._hello, self._most_blocks, holder))
        found = {holder: self._fleet.groups[holder].welcome for holder in self._greeting}
        return {holder: welcome for holder, welcome in found.items() if welcome is not None}

    def admit(self, worker: int) -> None:
        self._greeting.discard(HolderId(worker))

    def _is_vacant(self, group: CacheGroup) -> bool:
        """Whether a member is lost that has no replacement."""
        members = self._fleet.of_stages
        lost = filter(members.is_lost, group.shards)
        has_places = bool(self._places.timeout_s)
        may_come = (
            has_places if members.is_here(x) else members.has_replacement.get(x, True) for x in lost
        )
        return not all(may_come)

    def _let_in(self, group: CacheGroup) -> bool:
        """Whether each lost member of a column has been replaced: from now on its
        replacement is the member."""
        members = self._fleet.of_stages
        here = [x for x in group.shards if members.is_here(x) and members.is_lost(x)]
        if not set(here) <= self._places.look(here).keys():
            return False
        if not members.revive_elsewhere(group.shards):
            return False
        for member in here:
            self._places.admit(member)
            members.revive(member)
        return True
