"""How long an R-worker waits for S-workers that it has lost."""

from __future__ import annotations

import time
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from rworker.instructions import Instruction, Stop
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState


class GracePeriod:
    """Runs since the last S-worker was lost without ``Shutdown``, and for each kept cache since its
    own was."""

    def __init__(self, serving: ServingTerms, clock: Clock = time.monotonic) -> None:
        self._serving: Final = serving
        self._clock = clock
        self._num_lost = 0
        self._lost_s = 0.0
        self._kept_until_s: dict[HolderId, float] = {}

    def look(self, state: RWorkerState) -> None:
        """Note which S-workers were lost, and which have returned."""
        now_s = self._clock()
        if state.num_lost != self._num_lost:
            self._num_lost = state.num_lost
            self._lost_s = now_s
        before, self._kept_until_s = self._kept_until_s, {}
        for cache in state.kept:
            until_s = before.get(cache.holder, now_s + self._serving.keep_s)
            self._kept_until_s[cache.holder] = until_s
            cache.kept_for_s = max(0.0, until_s - now_s)

    def wait_s(self, state: RWorkerState) -> float | None:
        """Return the time until something is to be done. None if nothing will be."""
        self.look(state)
        until_s = self._until_s(state)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def end(self, state: RWorkerState) -> tuple[Instruction, ...]:
        """Return what is to be done now, if the time is over."""
        self.look(state)
        until_s, now_s = self._until_s(state), self._clock()
        if until_s is None or until_s > now_s:
            return ()
        if not self._kept_until_s:
            return (Stop(),)
        return state.forget_kept([one for one, s in self._kept_until_s.items() if s <= now_s])

    def _until_s(self, state: RWorkerState) -> float | None:
        if self._kept_until_s:
            return min(self._kept_until_s.values())
        return self._lost_s + self._serving.return_s if state.is_deserted else None
