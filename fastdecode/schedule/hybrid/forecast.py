"""When all known work would be done with KV on both sides, and what to do by that.

Home sequences step in a lane that waits for no R-worker. Away sequences step in a lane of their
own, or in that lane. A forecast runs all sequences, first come, first served, from one end of a
sequence to the next. The rule compares courses: leave what waits to the device, or send some of it
away now. While costs are guessed, a course must pay under the worst of what they may be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.schedule.times import StepTime

if TYPE_CHECKING:
    from fastdecode.core.holders import HolderId

_ROUNDING = 1e-6  # of a step: work that is that near to its end has ended
_ROUNDS = 3  # in which the mean load of a span, and its length, are found
LEAST_GAIN = 0.06  # by which away sequences count more, and which another layout must save
_MAX_ENDS = 64  # most different ends of sequences in a forecast of the rule


class Layout(Enum):
    """The lanes in which sequences step whose KV is on R-workers."""

    MIXED = "mixed"  # the home lane: the weights are read once for all
    SPLIT = "split-1"  # a lane of their own


@dataclass(frozen=True)
class Work:
    """Remaining work of a sequence."""

    num_steps: int  # tokens that it is still to draw
    num_cached: int  # tokens that it has cached when it draws the first of them
    num_blocks: int  # KV blocks that it has reserved, or will
    num_uncached: int = 1  # tokens that are run to draw the first of them
    num_reused_away: int = 0  # of those, what R-workers have cached and the device has not


@dataclass(frozen=True)
class Guess:
    """Assumed speed of R-workers, a low one, until one has attended anything."""

    token_bytes: float  # bytes of a cached token, over all layers
    bytes_per_s: float = 50e9  # bytes that each R-worker reads in a second
    round_trip_s: float = 0.01  # for all layers


@dataclass(frozen=True)
class Costs:
    """Seconds of a step through all layers, of each side. No function falls."""

    s_part: Callable[[int], float]
    """The S-part of a number of sequences."""
    device: Callable[[float], float]
    """The device's attention to a number of cached tokens."""
    r_part: Callable[[int, float], float]
    """The busiest R-worker's attention, by all R-workers' sequences and cached tokens."""
    round_trip_s: float
    away_weight: float = 1.0
    """Weight of away sequences in the S-part."""

    @classmethod
    def of(
        cls, times: StepTime, device: HolderId, room: Mapping[HolderId, int], guess: Guess
    ) -> Costs:
        """Take costs from step times. R-workers are filled evenly by their ``room``, up to a
        sequence. ``guess`` replaces times of R-workers that are not known."""
        in_all, trip_s = max(1, sum(room.values())), times.trip_s(1)
        guessed_s = guess.token_bytes / guess.bytes_per_s  # of a cached token

        def r_part(num_sequences: int, load: float) -> float:
            one = load / max(1, num_sequences)
            shares = ((w, round(min(load, load * own / in_all + one))) for w, own in room.items())
            return max(times.r_part_s(w, share) or share * guessed_s for w, share in shares)

        trip_s = guess.round_trip_s if trip_s == math.inf else trip_s
        return cls(times.s_part_s, lambda load: times.r_part_s(device, round(load)), r_part, trip_s)

    def home_s(self, num_sequences: int, load: float) -> float:
        """Return the time of a step of home sequences, alone on the device."""
        return self.s_part(num_sequences) + self.device(load)

    def scaled(self, s_part: float, device: float, away: float) -> Costs:
        """Multiply the S-part, the device's attention, and all of R-workers."""
        return replace(
            self,
            s_part=lambda n: s_part * self.s_part(n),
            device=lambda load: device * self.device(load),
            r_part=lambda n, load: away * self.r_part(n, load),
            round_trip_s=away * self.round_trip_s,
        )


@dataclass(frozen=True)
class Known:
    """All unfinished work, and the KV blocks that it has."""

    home: tuple[Work, ...]
    away: tuple[Work, ...]
    waiting: tuple[Work, ...]  # in the order in which they start
    home_blocks: int  # of the device, in all
    away_blocks: tuple[int, ...]  # of each R-worker, in all
    away_free: tuple[int, ...]  # of each R-worker, not reserved
    most_running: int  # most sequences that run at once


@dataclass(frozen=True)
class Course:
    """A choice that the rule compares: the layout, and where waiting sequences go."""

    layout: Layout
    num_away: int = 0
    """Leading waiting sequences that go to R-workers now, up to one that starts at home
    (``num_leaving``). The others wait for the device."""


class Paces(NamedTuple):
    """Seconds of a step of each side while both run. Infinite without sequences there."""

    home_s: float
    away_s: float


def paces(costs: Costs, layout: Layout, home: tuple[int, float], away: tuple[int, float]) -> Paces:
    """Return the time of steps of ``home`` and ``away``: numbers of sequences, and all their cached
    tokens."""
    (num_home, load_home), (num_away, load_away) = home, away
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
    """Sequences that step together, each in the room of one holder."""

    def __init__(self, works: Iterable[Work], blocks: Seq[int], *, is_away: bool = False) -> None:
        self._is_away = is_away
        self.step = 0.0
        # End, blocks, cached tokens less one per step, and holder of each.
        self.ends: list[tuple[float, int, float, int]] = []
        self._base, self._num_prompt = 0.0, 0
        self._free = list(blocks)
        for work in works:
            self.add(work)

    @property
    def max_free(self) -> int:
        return max(self._free, default=0)

    def add(self, work: Work) -> None:
        """Add a sequence on the holder with most free blocks."""
        holder = max(range(len(self._free)), key=self._free.__getitem__)
        base = work.num_cached - self.step
        heappush(self.ends, (self.step + work.num_steps, work.num_blocks, base, holder))
        self._free[holder] -= work.num_blocks
        self._base += base
        self._num_prompt += work.num_uncached - self._is_away * work.num_reused_away - 1

    def at(self, ahead: float) -> tuple[int, float]:
        """Return the sequences, and their cached tokens ``ahead`` steps from now."""
        return len(self.ends), self._base + len(self.ends) * (self.step + ahead)

    @property
    def num_left(self) -> float:
        """Steps until the next one ends."""
        return self.ends[0][0] - self.step

    def take_prompts(self) -> int:
        """Return the tokens, beyond one each, of sequences started since the last call."""
        num_prompt, self._num_prompt = self._num_prompt, 0
        return num_prompt

    def advance(self, num_steps: float) -> None:
        """Run steps, at most ``num_left``."""
        self.step += num_steps
        while self.ends and self.ends[0][0] <= self.step + _ROUNDING:
            _, num_blocks, base, holder = heappop(self.ends)
            self._free[holder] += num_blocks
            self._base -= base


def coarse(known: Known, num_ends: int) -> Known:
    """Draw sequences' ends together, to about ``num_ends`` that differ."""
    every = (*known.home, *known.away, *known.waiting)
    if len(every) <= num_ends:
        return known
    grain = max(1, max(work.num_steps for work in every) // num_ends)

    def rounded(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(w, num_steps=-(-w.num_steps // grain) * grain) for w in works)

    home, away, waiting = map(rounded, (known.home, known.away, known.waiting))
    return replace(known, home=home, away=away, waiting=waiting)


def num_leaving(known: Known, num_away: int) -> int:
    """Return how many waiting sequences go to R-workers now.

    One for which the device has room starts there, unless R-workers have cached more of it. The
    next ones wait: they might come too late to share the others' steps.
    """
    home_free = known.home_blocks - sum(work.num_blocks for work in known.home)
    starting = known.waiting[:num_away]
    for index, work in enumerate(starting):
        if work.num_blocks <= home_free and not work.num_reused_away:
            return index
    return len(starting)


def finish_s(known: Known, course: Course, costs: Costs, limit_s: float = math.inf) -> float:
    """Return the seconds until all is done. Infinite beyond ``limit_s``."""
    home = _Side(known.home, (known.home_blocks,))
    away = _Side(known.away, known.away_blocks, is_away=True)
    queue = deque(known.waiting)
    for _ in range(num_leaving(known, course.num_away)):
        away.add(queue.popleft())
    now_s = 0.0
    while now_s <= limit_s:
        while queue and len(home.ends) + len(away.ends) < known.most_running:
            num_blocks = queue[0].num_blocks
            side = home if num_blocks <= known.home_blocks else away
            if side.ends and num_blocks > side.max_free:
                break  # an empty side has room for any sequence
            side.add(queue.popleft())
        if not home.ends and not away.ends:
            return now_s
        num_home, num_away, is_mixed = len(home.ends), len(away.ends), course.layout is Layout.MIXED
        num_lane = num_away + (num_home if is_mixed else 0)
        for weight, num, added in (
            (1.0, num_home, home.take_prompts()),
            (costs.away_weight, num_lane, away.take_prompts()),
        ):
            if added:  # no sequence advances while prompts run, beyond a step of theirs
                now_s += weight * (costs.s_part(num + added) - costs.s_part(num))
        pace, span_s = Paces(1.0, 1.0), 0.0
        for _ in range(_ROUNDS):  # at the loads in the middle of the span
            ahead = [
                span_s / 2 / step_s if side.ends and step_s else 0.0
                for side, step_s in zip((home, away), pace, strict=True)
            ]
            pace = paces(costs, course.layout, home.at(ahead[0]), away.at(ahead[1]))
            running = [x for x in zip((home, away), pace, strict=True) if x[0].ends]
            span_s = min(side.num_left * step_s for side, step_s in running)
        for side, step_s in running:
            side.advance(span_s / step_s if step_s else side.num_left)
        now_s += span_s
    return math.inf


def choose(known: Known, now: Course, costs: Costs, error: float) -> Course:
    """Return the best course.

    Args:
        now: The present one, whose ``num_away`` does not count.
        error: Part by which each cost may be off, up or down.
    """
    known, stay = coarse(known, _MAX_ENDS), replace(now, num_away=0)
    low, high = 1 / (1 + error), 1 / (1 - error)
    weighted = replace(costs, away_weight=1 + LEAST_GAIN)
    # The worst that costs may be: of a busy device, and of slow R-workers beside a fast one.
    factors = (high, low) if error else (high,)
    corners = [weighted.scaled(x, low, (1 + LEAST_GAIN) * high) for x in factors]
    staying_s = [finish_s(known, stay, corner) for corner in corners]
    # Forecasts know of no whole steps: they may be off by one.
    load = float(sum(work.num_cached for work in known.home))
    step_s = costs.home_s(len(known.home), load) if known.home else 0.0
    best, best_gain = stay, 0.0
    for course in _courses(known, now):
        is_other = bool(known.away) and course.layout is not now.layout
        needed = max(best_gain, LEAST_GAIN if is_other else 0.0)
        gain = math.inf
        for corner, stay_s in zip(corners, staying_s, strict=True):
            # What gains less than another is of no use, by however much.
            ends_s = finish_s(known, course, corner, stay_s * (1 - needed) - step_s)
            gain = min(gain, 1 - ends_s / stay_s if stay_s > 0 else 0.0)
            if gain == -math.inf:
                break
        if gain > best_gain:
            best, best_gain = course, gain
    return best


def _courses(known: Known, now: Course) -> Iterator[Course]:
    could_start = _Side((), known.away_free)
    places = known.most_running - len(known.home) - len(known.away)
    for work in known.waiting[: max(0, places)]:
        if work.num_blocks > could_start.max_free:
            break
        could_start.add(work)
    most = len(could_start.ends)
    numbers = [most >> i for i in range(most.bit_length())]  # all of them, half of them, … one
    if known.away:
        yield from (Course(now.layout, number) for number in numbers)
    for layout in Layout:
        if not known.away or layout is not now.layout:
            yield from (Course(layout, number) for number in ((0, most) if known.away else numbers))
