"""Which of the sequences that wait go to R-workers, and in which lanes those step.

The rule compares whole courses by when everything that is known would be done
(``forecast``): leave those that wait to the device, or send some of them away
now. They go only if all is done sooner, the device's time that they take
counted ``least_gain`` times more than it is. Nothing is sent away that would be
better off waiting, and a course, once taken, is among those that are compared
next time: so as long as costs are what they are taken for, no decision is ever
regretted, and KV on both sides is never slower than on the device alone.

While costs are guessed, a course must pay under the worst of what they may turn
out to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from fastdecode.schedule.hybrid.forecast import (
    Costs,
    Course,
    Known,
    Layout,
    Work,
    coarse,
    finish_s,
)

_MOST_ENDS = 64
"""Sequences' ends that a forecast tells apart: a long queue needn't be taken
word for word."""


@dataclass(frozen=True)
class Margins:
    least_gain: float = 0.06
    """What sequences that are away cost counts so much more. Another layout
    must save this part of the time."""
    error: float = 0.0
    """Costs may be off by this part, up or down, each by itself."""


def choose(known: Known, now: Course, costs: Costs, margins: Margins) -> Course:
    """What is best from now on.

    Args:
        now: what is being done; ``num_away`` is of no account.
    """
    known, stay = coarse(known, _MOST_ENDS), replace(now, num_away=0)
    corners = list(_corners(costs, margins))
    staying_s = [finish_s(known, stay, corner) for corner in corners]
    # Forecasts know of no whole steps: they may be off by one.
    step_s = costs.home_s(*_size(known.home)) if known.home else 0.0
    best, best_gain = stay, 0.0
    for course in _courses(known, now):
        gain = math.inf
        for corner, stay_s in zip(corners, staying_s, strict=True):
            # What gains less than another is of no use, by however much.
            limit_s = stay_s * (1 - _least_gain(known, now, course, margins, best_gain)) - step_s
            ends_s = finish_s(known, course, corner, limit_s)
            gain = min(gain, 1 - ends_s / stay_s if stay_s > 0 else 0.0)
            if gain == -math.inf:
                break
        if gain > best_gain:
            best, best_gain = course, gain
    return best


def _least_gain(
    known: Known, now: Course, course: Course, margins: Margins, best_gain: float
) -> float:
    """What part of the time a course has to save, to be taken."""
    is_other = course.home_is_open != now.home_is_open or (
        bool(known.away) and course.layout is not now.layout
    )
    return max(best_gain, margins.least_gain if is_other else 0.0)


def _corners(costs: Costs, margins: Margins) -> Iterator[Costs]:
    """The worst that costs may turn out to be: of a busy device, and of slow
    R-workers beside a fast one."""
    low, high = 1 / (1 + margins.error), 1 / (1 - margins.error)
    weighted = replace(costs, away_weight=1 + margins.least_gain)
    away = (1 + margins.least_gain) * high
    yield weighted.scaled(high, low, away)
    if margins.error:
        yield weighted.scaled(low, low, away)


def _courses(known: Known, now: Course) -> Iterator[Course]:
    most = _num_startable(known)
    if not most and not known.away:
        return
    layouts = list(Layout)
    numbers = _numbers(most)
    if known.away and most:
        for number in numbers:
            yield replace(now, num_away=number)
    for layout in layouts:
        if known.away and layout is now.layout:
            continue
        for number in (0, most) if known.away else numbers:
            yield Course(layout, number, now.home_is_open)
    if known.waiting:
        for layout in layouts:
            yield Course(layout, most, not now.home_is_open)


def _numbers(most: int) -> Seq[int]:
    """How many might go at once: all for whom there is room, half of them, … one."""
    numbers = []
    while most:
        numbers.append(most)
        most //= 2
    return numbers


def _num_startable(known: Known) -> int:
    """Of those that wait, for how many R-workers have room at once."""
    places = known.most_running - len(known.home) - len(known.away)
    free = [-num_blocks for num_blocks in known.away_free]
    heapify(free)
    number = 0
    for work in known.waiting[: max(0, places)]:
        if not free or -free[0] < work.num_blocks:
            break
        heapreplace(free, free[0] + work.num_blocks)
        number += 1
    return number


def _size(works: Iterable[Work]) -> tuple[int, float]:
    counted = [work.num_cached for work in works]
    return len(counted), float(sum(counted))
