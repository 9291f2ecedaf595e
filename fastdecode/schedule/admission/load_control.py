"""Sequence-level load stabilising: when the next micro-batch may start.

The load W of the R-part is the number of cached tokens over all running sequences, and a running
sequence adds one token per step. If B sequences start together, W climbs from B to B·S, and the two
parts of the system idle in turn. If the same sequences start in micro-batches spread over time, W
stays near B·S/2 (FastDecode, arXiv 2403.11421, section "Sequence-level load-stabilizing schedule").
Two ways to spread them:

``FixedInterval``   M = B·F/S sequences every F steps; the load peaks at B·(S + F)/2.
``LoadControl``     as soon as the projected load, with the micro-batch on top, never exceeds W_lim.

The caller counts steps from 0. The sequences of a **micro-batch** that starts at step r are
``first_length`` tokens long at step r, one token longer at each step, and ``target_length`` at
their last step, the micro-batch's **end**. The paper's start from nothing: first length 1, end
r + S - 1. A cached prompt means more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import attrgetter

from fastdecode.core.errors import CapacityError, ConfigError, Given

_END = attrgetter("end")


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that start at one step with equally many tokens, and are to reach one length."""

    num_sequences: int
    target_length: int
    """Cached tokens of each at its last step."""
    start: int
    first_length: int = 1
    """Cached tokens of each at its first step."""
    skipped: int = 0
    most: int | None = None
    """Tokens of the part of split sequences that counts, which begins after ``skipped`` tokens.
    None if they are whole."""
    end: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        assert (
            self.num_sequences >= 1
            and self.start >= 0
            and 1 <= self.first_length <= self.target_length
        )
        assert self.skipped == 0 if self.most is None else self.skipped >= 0 < self.most
        object.__setattr__(self, "end", self.start + self.num_steps - 1)

    @property
    def num_steps(self) -> int:
        return self.target_length - self.first_length + 1

    @property
    def peak(self) -> int:
        """Return its load at its last step, the highest."""
        return self.num_sequences * self._counted(self.target_length)

    def load_at(self, step: int) -> int:
        """Return its cached tokens at a step. 0 before its start and after its end."""
        if not self.start <= step <= self.end:
            return 0
        return self.num_sequences * self._counted(self.first_length + step - self.start)

    def _counted(self, length: int) -> int:
        if self.most is None:
            return length
        return max(0, min(length - self.skipped, self.most))

    def part(self, first_token: int, num_tokens: int) -> MicroBatch:
        """Return what ``num_tokens`` of each sequence, from ``first_token`` on, are of it."""
        return replace(self, skipped=first_token, most=num_tokens)


class LoadControl:
    """The projected load of running micro-batches, kept under W_lim (Algorithm 1 of the paper, for
    any mix of lengths).

    Between two ends the load only grows, so it peaks at end steps: for each running micro-batch i
    its end E[i] and the load W[i] at that step suffice. None starts before one that was added
    earlier. Every method takes O(running micro-batches), however many steps lie between them.

    Args:
        limit: W_lim in tokens. It may be changed at any time. What has started stays.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self._running: list[MicroBatch] = []  # in order of their end E
        self._loads: list[int] = []  # W
        self._latest_start = 0

    def __bool__(self) -> bool:
        """Return True if anything runs."""
        return bool(self._running)

    def with_also(self, batches: Seq[MicroBatch]) -> LoadControl:
        """Return a copy to which these were added."""
        if not batches:
            return self
        control = LoadControl(self.limit)
        control._running = self._running[:]
        control._loads = self._loads[:]
        control._latest_start = self._latest_start
        for batch in batches:
            control.add(batch)
        return control

    def add(self, added: MicroBatch) -> None:
        """Start a micro-batch, whatever the limit (the paper's AddMicroBatch)."""
        self._add_load(added, added.start, sign=1)
        index = bisect_left(self._running, added.end, key=_END)
        load = added.peak + sum(later.load_at(added.end) for later in self._running[index:])
        self._running.insert(index, added)
        self._loads.insert(index, load)
        self._latest_start = max(self._latest_start, added.start)

    def end(self, ended: MicroBatch, at: int) -> None:
        """Take the load of sequences that end early, from step ``at`` on. ``ended``: all or some of
        those of a micro-batch. If they would have ended before ``at``, nothing changes."""
        if ended.end < at:
            return
        index = next(
            i for i in self._alike(ended) if self._running[i].num_sequences >= ended.num_sequences
        )
        self._add_load(ended, at, sign=-1)
        num_left = self._running[index].num_sequences - ended.num_sequences
        if num_left:
            self._running[index] = replace(self._running[index], num_sequences=num_left)
        else:
            del self._running[index], self._loads[index]

    def earliest_start(self, new: MicroBatch) -> int:
        """Return the first step, not before ``new.start`` nor the latest start, from which these
        sequences can run to their end with the load within the limit (the paper's GetEarliestStep).

        Let x[i] = ⌊(W_lim - W[i]) / m⌋ be the length to which the new sequences may have grown at
        E[i]. If they are still running then, they must not start before E[i] - x[i] +
        first_length. Among equal lengths nothing ends after the new sequences, and the latest of
        these steps is the paper's answer. A short micro-batch may fit in before: it must then end
        where the load leaves room for its full length. So each running micro-batch forbids one
        interval of starts, and the intervals come in ascending order.

        Parts of split sequences do not grow all the time. Where they would have to, to make room,
        they are taken not to: beside them, the answer may be a later step than the first.

        Raises:
            CapacityError: (code ``exceeds_load_limit``) if the sequences alone exceed the limit.
        """
        room = self.limit - new.peak  # for all others, at the new one's end
        if room < 0:
            raise CapacityError(
                f"{new.num_sequences} sequences of {new.target_length} tokens are a load of "
                f"{new.peak} tokens, above the limit of {self.limit}: start fewer at once, lower "
                "max_tokens, or raise the load limit",
                code="exceeds_load_limit",
            )
        start = max(new.start, self._latest_start)
        num_growing = sum(each.num_sequences for each in self._running if each.most is None)
        previous_end = -1
        for each, load in zip(self._running, self._loads, strict=True):
            if load > room:
                # Before E[i] the load is lower by num_growing per step. Over these many steps it is
                # too high to end in.
                num_steps = each.end - previous_end
                if num_growing:
                    num_steps = min(-((room - load) // num_growing), num_steps)
                first_forbidden = each.end - num_steps - new.num_steps + 2
                if start < first_forbidden:
                    return start
                longest = (self.limit - load) // new.num_sequences + new.skipped  # x[i]
                start = max(start, min(each.end, each.end - longest + new.first_length - 1) + 1)
            num_growing -= each.num_sequences * (each.most is None)
            previous_end = each.end
        return start

    def fits(self, batch: MicroBatch, limit_at: Callable[[int], float]) -> bool:
        """Return True if the load, with a micro-batch on top that starts no earlier than any other,
        stays within ``limit_at(step)`` at each of its steps. The limit must not rise with steps."""
        index = bisect_left(self._running, batch.end, key=_END)
        at_end = batch.peak + sum(later.load_at(batch.end) for later in self._running[index:])
        return at_end <= limit_at(batch.end) and all(
            load + batch.load_at(each.end) <= limit_at(each.end)
            for each, load in zip(self._running[:index], self._loads, strict=False)
            if each.end >= batch.start
        )

    def load_at(self, step: int) -> int:
        """Return the projected load at a step, without what was forgotten or has ended."""
        return sum(each.load_at(step) for each in self._running)

    def peak(self) -> int:
        """Return the highest projected load at any step."""
        return max(self._loads, default=0)

    def forget_before(self, step: int) -> None:
        """Forget micro-batches that ended before ``step``."""
        num_over = bisect_left(self._running, step, key=_END)
        del self._running[:num_over], self._loads[:num_over]

    def _add_load(self, batch: MicroBatch, since: int, *, sign: int) -> None:
        """Change W by the micro-batch's load, at the end steps from ``since`` on."""
        first = bisect_left(self._running, since, key=_END)
        last = bisect_right(self._running, batch.end, key=_END)
        for index in range(first, last):
            self._loads[index] += sign * batch.load_at(self._running[index].end)

    def _alike(self, batch: MicroBatch) -> Iterator[int]:
        """Return the places of the running micro-batches that differ from this one at most in their
        number of sequences."""
        for index in range(bisect_left(self._running, batch.end, key=_END), len(self._running)):
            each = self._running[index]
            if each.end > batch.end:
                return
            if replace(each, num_sequences=batch.num_sequences) == batch:
                yield index


@dataclass(frozen=True)
class FixedInterval:
    """``num_sequences`` (M) start every ``interval`` (F) steps. The load climbs to its peak within
    ``target_length`` (S) steps, and the first of a crowd waits no more than F steps."""

    num_sequences: int
    interval: int
    target_length: int

    @classmethod
    def of(
        cls, batch_size: int, target_length: int, interval: int, limit: int | None = None
    ) -> FixedInterval:
        """Return the schedule that keeps about ``batch_size`` (B) sequences running: M = B·F/S,
        rounded, and lowered until the peak is within ``limit`` (W_lim).

        Raises:
            ConfigError: If ``interval`` is not within 1..S, so that M would exceed B.
            CapacityError: (code ``exceeds_load_limit``) if one sequence every F steps exceeds the
                limit.
        """
        if not 1 <= interval <= target_length:
            raise ConfigError(
                Given("interval", interval),
                f" is not within 1..{target_length} steps, the length of a sequence",
            )
        one = cls(1, interval, target_length)
        num_sequences = max(1, round(batch_size * interval / target_length))
        if limit is not None:
            num_sequences = min(num_sequences, limit // one.peak)
        if num_sequences == 0:
            raise CapacityError(
                f"one sequence of {target_length} tokens every {interval} steps is a load of "
                f"{one.peak} tokens, above the limit of {limit}: lengthen the interval or raise "
                "the load limit",
                code="exceeds_load_limit",
            )
        return replace(one, num_sequences=num_sequences)

    @property
    def num_micro_batches(self) -> int:
        """Return how many run at once."""
        return -(-self.target_length // self.interval)

    @property
    def peak(self) -> int:
        """Return the highest load: M·(S + (S - F) + (S - 2F) + …). If F divides S and S divides
        B·F, this is B·(S + F)/2."""
        n = self.num_micro_batches
        return self.num_sequences * (n * self.target_length - self.interval * (n * (n - 1) // 2))
