"""When would all that is known be done? The clock by which plans for KV on both
sides are compared.

Sequences **at home** have their KV in the device's memory and step together in
one lane, which waits for nobody. Sequences that are **away** have it on
R-workers and step in lanes of their own, or among those at home. A forecast
runs all of it to its end, from one end of a sequence to the next, in a
microsecond or two for each: first come, first served, as the scheduler does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from fastdecode.schedule.times import StepTime

if TYPE_CHECKING:
    from fastdecode.core.holders import HolderId

_ROUNDING = 1e-6
"""Of a step: what is that near to its end has ended."""
_ROUNDS = 2
"""In which the mean load of a span, and its length, are found."""


class Layout(Enum):
    """In which lanes sequences step whose KV is on R-workers."""

    MIXED = "mixed"
    """In the home lane: the weights are read once for all."""
    SPLIT = "split-1"
    """In a lane of their own."""


@dataclass(frozen=True)
class Work:
    num_steps: int
    """Tokens that it is still to draw."""
    num_cached: int
    """Tokens that it has cached when it draws the first of them."""
    num_blocks: int
    """KV blocks that it has reserved, or will."""
    num_uncached: int = 1
    """Tokens that are run to draw the first of them: a prompt's, or one."""
    num_reused_away: int = 0
    """Of those, the tokens that R-workers have kept, and the device has not."""


@dataclass(frozen=True)
class Costs:
    """A ``StepTime`` of two sides, the device and R-workers: seconds of a step
    through all layers. No function falls."""

    s_part: Callable[[int], float]
    """The S-part, T_S, of so many sequences."""
    device: Callable[[float], float]
    """The device's attention, A, to so many cached tokens."""
    r_part: Callable[[int, float], float]
    """The busiest R-worker's attention, R, where R-workers together have so
    many sequences with so many cached tokens."""
    round_trip_s: float
    """L: the trip to R-workers and back."""
    away_weight: float = 1.0
    """What sequences that are away cost of the S-part counts so many times."""

    @classmethod
    def of(cls, times: StepTime, device: HolderId, room: Mapping[HolderId, int]) -> Costs:
        """From step times.

        Args:
            room: of each R-worker. They are filled evenly by it, up to a sequence.
        """
        in_all = max(1, sum(room.values()))

        def r_part(num_sequences: int, load: float) -> float:
            one = load / max(1, num_sequences)
            shares = {w: min(load, load * own / in_all + one) for w, own in room.items()}
            return max((times.r_part_s(w, round(load)) for w, load in shares.items()), default=0.0)

        def device_s(load: float) -> float:
            return times.r_part_s(device, round(load))

        return cls(times.s_part_s, device_s, r_part, times.trip_s(1))

    def home_s(self, num_sequences: int, load: float) -> float:
        """A step of those at home, alone on the device."""
        return self.s_part(num_sequences) + self.device(load)

    def scaled(self, s_part: float, device: float, away: float) -> Costs:
        """The S-part, the device's attention, and the way to R-workers with
        what they do, times so much each."""
        costs = self
        return replace(
            self,
            s_part=lambda n: s_part * costs.s_part(n),
            device=lambda load: device * costs.device(load),
            r_part=lambda n, load: away * costs.r_part(n, load),
            round_trip_s=away * self.round_trip_s,
        )


@dataclass(frozen=True)
class Known:
    home: tuple[Work, ...]
    away: tuple[Work, ...]
    waiting: tuple[Work, ...]
    """In the order in which they start."""
    home_blocks: int
    """KV blocks of the device, in all."""
    away_blocks: tuple[int, ...]
    """KV blocks of each R-worker, in all."""
    away_free: tuple[int, ...]
    """Of each R-worker, the blocks that nobody has reserved."""
    most_running: int
    """Sequences that run at once, at most."""


@dataclass(frozen=True)
class Course:
    layout: Layout
    num_away: int = 0
    """So many waiting sequences, the first ones, go to R-workers now, up to
    one for which the device has room, and of which R-workers have kept no more. The
    others wait for the device."""
    home_is_open: bool = True
    """The device takes in new sequences; else R-workers take all of them."""


@dataclass(frozen=True)
class Paces:
    """How long a step takes of those at home and of those that are away, while
    both run; infinite where there are none."""

    home_s: float
    away_s: float


def paces(costs: Costs, layout: Layout, home: tuple[int, float], away: tuple[int, float]) -> Paces:
    """Steps side by side.

    Args:
        home: sequences, and the tokens that they have cached in all.
        away: the same of those on R-workers.
    """
    num_home, load_home = home
    num_away, load_away = away
    if not num_away:
        return Paces(costs.home_s(num_home, load_home) if num_home else math.inf, math.inf)
    r_part_s = costs.r_part(num_away, load_away)
    if layout is Layout.MIXED:
        attention_s = max(costs.device(load_home), r_part_s + costs.round_trip_s)
        alone_s = costs.s_part(num_home) if num_home else 0.0
        added_s = costs.s_part(num_home + num_away) - alone_s
        step_s = alone_s + costs.away_weight * added_s + attention_s
        return Paces(step_s if num_home else math.inf, step_s)
    lane_s = costs.away_weight * costs.s_part(num_away)
    # Before each of its layers the away lane waits for at most one layer of the home lane.
    home_s = costs.home_s(num_home, load_home) if num_home else 0.0
    period_s = lane_s + r_part_s + costs.round_trip_s + home_s
    if not num_home:
        return Paces(math.inf, period_s)
    share = max(1e-6, 1 - lane_s / period_s)  # the away lane may take all the time
    return Paces(home_s / share, period_s)


class _Side:
    """Sequences that step together, each in the room of one holder.

    Args:
        blocks: of each holder, in all.
        is_away: the holders are R-workers.
    """

    def __init__(self, works: Iterable[Work], blocks: Seq[int], *, is_away: bool) -> None:
        self._is_away = is_away
        self.step = 0.0
        self.most_blocks = max(blocks, default=0)
        """That anybody may have here."""
        # When each ends, its blocks, what it has cached but for a token a step,
        # and its holder.
        self.ends: list[tuple[float, int, float, int]] = []
        self._base = 0.0
        self._num_prompt = 0
        self._free = list(blocks)
        for work in works:
            self.add(work)

    def has_room(self, work: Work) -> bool:
        """Whether it may start. An empty side has room for anybody."""
        return not self.ends or work.num_blocks <= self.most_free

    @property
    def most_free(self) -> int:
        """Blocks that one of them has free."""
        return max(self._free, default=0)

    def add(self, work: Work) -> None:
        """It steps from now on, where most is free."""
        holder = max(range(len(self._free)), key=self._free.__getitem__)
        base = work.num_cached - self.step
        heappush(self.ends, (self.step + work.num_steps, work.num_blocks, base, holder))
        self._free[holder] -= work.num_blocks
        self._base += base
        num_reused = work.num_reused_away if self._is_away else 0
        self._num_prompt += work.num_uncached - num_reused - 1

    def load(self, ahead: float) -> float:
        """Cached tokens of all, so many steps ahead."""
        return self._base + len(self.ends) * (self.step + ahead)

    @property
    def num_left(self) -> float:
        """Steps until the next one ends."""
        return self.ends[0][0] - self.step if self.ends else math.inf

    def take_prompts(self) -> int:
        """Tokens of those that have started since the last call, beyond one a
        sequence."""
        num_prompt, self._num_prompt = self._num_prompt, 0
        return num_prompt

    def advance(self, num_steps: float) -> None:
        """Run so many, at most ``num_left``."""
        self.step += num_steps
        while self.ends and self.ends[0][0] <= self.step + _ROUNDING:
            _, num_blocks, base, holder = heappop(self.ends)
            self._free[holder] += num_blocks
            self._base -= base


def coarse(known: Known, num_ends: int) -> Known:
    """The same with sequences' ends drawn together, to about so many that differ."""
    every = (*known.home, *known.away, *known.waiting)
    if len(every) <= num_ends:
        return known
    grain = max(1, max(work.num_steps for work in every) // num_ends)

    def rounded(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(w, num_steps=-(-w.num_steps // grain) * grain) for w in works)

    return replace(
        known,
        home=rounded(known.home),
        away=rounded(known.away),
        waiting=rounded(known.waiting),
    )


def num_leaving(known: Known, course: Course) -> int:
    """How many of the waiting sequences go to R-workers now. One for which the
    device has room starts there, unless R-workers have kept more of it, and the next
    ones wait for that: they might come too late to share the others' steps."""
    home_free = known.home_blocks - sum(work.num_blocks for work in known.home)
    starting = known.waiting[: course.num_away]
    if not course.home_is_open:
        return len(starting)
    for index, work in enumerate(starting):
        if work.num_blocks <= home_free and not work.num_reused_away:
            return index
    return len(starting)


def finish_s(known: Known, course: Course, costs: Costs, limit_s: float = math.inf) -> float:
    """Seconds until everybody is done.

    Args:
        limit_s: later than that is as good as never: infinite.
    """
    home = _Side(known.home, (known.home_blocks,), is_away=False)
    away = _Side(known.away, known.away_blocks, is_away=True)
    queue = deque(known.waiting)
    for _ in range(num_leaving(known, course)):
        away.add(queue.popleft())
    now_s = 0.0
    while now_s <= limit_s:
        _start(known, course, home, away, queue)
        if not home.ends and not away.ends:
            return now_s
        now_s += _prompts_s(costs, course.layout, home, away)
        pace = _paces_of(costs, course.layout, home, away)
        for _ in range(_ROUNDS):
            pace = _paces_of(costs, course.layout, home, away, _span_s(home, away, pace) / 2, pace)
        span_s = _span_s(home, away, pace)
        for side, step_s in ((home, pace.home_s), (away, pace.away_s)):
            if side.ends:
                side.advance(span_s / step_s if step_s else side.num_left)
        now_s += span_s
    return math.inf


def _start(known: Known, course: Course, home: _Side, away: _Side, queue: deque[Work]) -> None:
    """First come, first served, as far as there is room. What one side could
    never hold goes to the other."""
    while queue and len(home.ends) + len(away.ends) < known.most_running:
        fits_home, fits_away = (queue[0].num_blocks <= side.most_blocks for side in (home, away))
        side = home if fits_home and (course.home_is_open or not fits_away) else away
        if not side.has_room(queue[0]):
            return
        side.add(queue.popleft())


def _prompts_s(costs: Costs, layout: Layout, home: _Side, away: _Side) -> float:
    """What the device spends on the prompts of those that have just started,
    beyond a step of theirs. Nobody gets on meanwhile."""
    at_home, at_away = home.take_prompts(), away.take_prompts()
    s_part, num_home, num_away = costs.s_part, len(home.ends), len(away.ends)
    num_lane = num_away + (num_home if layout is Layout.MIXED else 0)
    seconds = 0.0
    if at_home:
        seconds += s_part(num_home + at_home) - s_part(num_home)
    if at_away:
        seconds += costs.away_weight * (s_part(num_lane + at_away) - s_part(num_lane))
    return seconds


def _span_s(home: _Side, away: _Side, pace: Paces) -> float:
    """Until the next end of somebody."""
    at_home = home.num_left * pace.home_s if home.ends else math.inf
    at_away = away.num_left * pace.away_s if away.ends else math.inf
    return min(at_home, at_away)


def _paces_of(
    costs: Costs,
    layout: Layout,
    home: _Side,
    away: _Side,
    ahead_s: float = 0.0,
    before: Paces | None = None,
) -> Paces:
    """At the loads in so many seconds; ``before``: what steps take until then."""
    home_ahead = away_ahead = 0.0
    if before is not None:
        home_ahead = ahead_s / before.home_s if home.ends and before.home_s else 0.0
        away_ahead = ahead_s / before.away_s if away.ends and before.away_s else 0.0
    at_home = len(home.ends), home.load(home_ahead)
    return paces(costs, layout, at_home, (len(away.ends), away.load(away_ahead)))
