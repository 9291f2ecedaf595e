"""Step times of instances that run, fitted to their totals: what they did
between two looks at them, and how long that took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import numpy as np

from cost_model.fit import non_negative
from fastdecode.schedule.times import Prompts, StepTime

_MOST_ROWS = 2000
_LEAST_ROWS = 20
_LEAST_S = 1e-3
"""Of steps, between two looks: less says nothing."""


@dataclass(frozen=True)
class InstanceTotals:
    """Of one instance, since it began."""

    steps: float = 0.0
    tokens: float = 0.0
    """Drawn: a sequence's in a step."""
    load: float = 0.0
    """Cached tokens of all that ran, summed over steps."""
    prompt_tokens: float = 0.0
    seconds: float = 0.0
    """Of all steps."""
    fetched_tokens: float = 0.0
    fetching_s: float = 0.0
    """In which any were being fetched."""

    def since(self, before: InstanceTotals) -> InstanceTotals:
        names = [field.name for field in fields(self)]
        return InstanceTotals(*(getattr(self, name) - getattr(before, name) for name in names))


@dataclass(frozen=True)
class LinearTimes(StepTime):
    """Straight lines, of an instance as a whole: the link's time is in its steps."""

    step_s: float
    """Of any step."""
    token_s: float
    """More for each sequence that draws a token."""
    cached_s: float
    """More for each token that is attended to."""
    prompt_s: float
    """More for each token of a prompt."""
    fetched_s: float = 0.0
    """To fetch K and V of a token from another instance; 0: none were fetched."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        """Prompts alone draw a token each."""
        num_drawn, run = num_decoding or len(prompts), sum(new for _, new in prompts)
        return self.step_s + self.token_s * num_drawn + self.prompt_s * run

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.cached_s * load_tokens

    def transfer_s(self, num_tokens: float) -> float:
        return self.fetched_s * num_tokens


@dataclass(frozen=True)
class Measured:
    times: LinearTimes
    num_looks: int


class StepLog:
    """What instances did between looks at them; the latest."""

    def __init__(self) -> None:
        self._last: dict[str, InstanceTotals] = {}
        self._rows: deque[InstanceTotals] = deque(maxlen=_MOST_ROWS)

    def look(self, name: str, totals: InstanceTotals) -> None:
        """An instance's totals as they are now. They fall where it is another
        process than before."""
        before = self._last.get(name)
        self._last[name] = totals
        if before is None or totals.steps < before.steps:
            return
        row = totals.since(before)
        if row.steps > 0 and row.seconds >= _LEAST_S:
            self._rows.append(row)

    def measured(self) -> Measured | None:
        """None: too little has run, or none of prompts, or of what decodes."""
        rows = list(self._rows)
        drew = sum(row.tokens for row in rows)
        ran = sum(row.prompt_tokens for row in rows)
        if len(rows) < _LEAST_ROWS or not (drew and ran):
            return None
        table = np.array([[row.steps, row.tokens, row.load, row.prompt_tokens] for row in rows])
        seconds = np.array([row.seconds for row in rows])
        found = non_negative(table / seconds[:, None], np.ones(len(rows)))
        # What took long by chance counted too little there: again, by what it should have taken.
        weights = 1 / np.sqrt(np.maximum(table @ np.array(found), _LEAST_S))
        found = non_negative(table * weights[:, None], seconds * weights)
        step_s, token_s, cached_s, prompt_s = found
        fetched = sum(row.fetched_tokens for row in rows)
        fetching_s = sum(row.fetching_s for row in rows)
        fetched_s = fetching_s / fetched if fetched > 0 else 0.0
        return Measured(LinearTimes(step_s, token_s, cached_s, prompt_s, fetched_s), len(rows))
