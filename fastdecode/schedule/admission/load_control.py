"""Sequence-level load stabilising: when may the next micro-batch start?

The load W of the R-part is the number of cached tokens over all running
sequences, and a running sequence adds one token a step. If B sequences start
together, W climbs from B to B·S and the two parts of the system idle in turn;
if the same sequences start in micro-batches spread over time, W stays near
B·S/2 (FastDecode, arXiv 2403.11421, section "Sequence-level load-stabilizing
schedule"). Two ways to spread them:

``FixedInterval``   M = B·F/S sequences every F steps; the load peaks at B·(S + F)/2.
``LoadControl``     as soon as the projected load, with the micro-batch on top, never exceeds W_lim.

Steps are counted from 0 by whoever schedules. The sequences of a
**micro-batch** that starts at step r are ``first_length`` tokens long at step
r, one token longer at each step, and ``target_length`` at their last step, the
micro-batch's **end**. The paper's start from nothing: first length 1, end r + S
- 1. A cached prompt means more.
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
    """Sequences that start at the same step with the same number of tokens, and
    are to reach the same length."""

    num_sequences: int
    target_length: int
    """Tokens that one of them has cached at its last step."""
    start: int
    first_length: int = 1
    """Tokens that one of them has cached at its first step."""
    skipped: int = 0
    most: int | None = None
    """Of split sequences, only the part counts that begins after ``skipped``
    tokens and holds ``most``."""
    end: int = field(init=False, compare=False)
    """Its last step."""

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
        """Its load at its last step: the highest."""
        return self.num_sequences * self._counted(self.target_length)

    def load_at(self, step: int) -> int:
        """Its cached tokens at a step; nothing before its start and after its end."""
        if not self.start <= step <= self.end:
            return 0
        return self.num_sequences * self._counted(self.first_length + step - self.start)

    def _counted(self, length: int) -> int:
        if self.most is None:
            return length
        return max(0, min(length - self.skipped, self.most))

    def part(self, first_token: int, num_tokens: int) -> MicroBatch:
        """What so many tokens of each of its sequences, from the ``first_token`` on, are of it."""
        return replace(self, skipped=first_token, most=num_tokens)


class LoadControl:
    """The projected load of live micro-batches, kept under W_lim (Algorithm 1
    of the paper, for any mix of lengths).

    Between two ends the load only grows, so it peaks at end steps: for each
    live micro-batch i it is enough to know its end E[i] and the load W[i] at
    that step. Micro-batches are first in, first out: none starts before one
    that was added earlier. Every method takes O(live micro-batches), however
    many steps lie between them.

    Args:
        limit: W_lim in tokens. It may be changed at any time; what has started
            stays.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self._live: list[MicroBatch] = []  # in order of their end E
        self._loads: list[int] = []  # W
        self._latest_start = 0

    def __bool__(self) -> bool:
        """Whether anything is live."""
        return bool(self._live)

    def with_also(self, batches: Seq[MicroBatch]) -> LoadControl:
        """What it would be if these started too; this one stays as it is."""
        if not batches:
            return self
        control = LoadControl(self.limit)
        control._live = self._live[:]
        control._loads = self._loads[:]
        control._latest_start = self._latest_start
        for batch in batches:
            control.add(batch)
        return control

    def add(self, added: MicroBatch) -> None:
        """A micro-batch starts, whatever the limit says (the paper's AddMicroBatch)."""
        self._add_load(added, added.start, sign=1)
        index = bisect_left(self._live, added.end, key=_END)
        load = added.peak + sum(later.load_at(added.end) for later in self._live[index:])
        self._live.insert(index, added)
        self._loads.insert(index, load)
        self._latest_start = max(self._latest_start, added.start)

    def end(self, ended: MicroBatch, at: int) -> None:
        """Sequences of a micro-batch, all or some of those that it was added
        with, are over before their last step: from step ``at`` on, their load
        is given back. Does nothing if they would have ended before ``at``
        anyway."""
        if ended.end < at:
            return
        index = next(
            i for i in self._alike(ended) if self._live[i].num_sequences >= ended.num_sequences
        )
        self._add_load(ended, at, sign=-1)
        num_left = self._live[index].num_sequences - ended.num_sequences
        if num_left:
            self._live[index] = replace(self._live[index], num_sequences=num_left)
        else:
            del self._live[index], self._loads[index]

    def earliest_start(self, new: MicroBatch) -> int:
        """The first step, not before ``new.start`` nor the latest start, from
        which these sequences can run to their end with the whole load within
        the limit (the paper's GetEarliestStep).

        Let x[i] = ⌊(W_lim - W[i]) / m⌋ be the length to which the new sequences
        may have grown at E[i]. If they are still running then, they must not
        start before E[i] - x[i] + first_length. Among equal lengths nothing
        ends after the new sequences do, and the latest of these steps is the
        paper's answer. A short micro-batch, though, may fit in before: it must
        then end where the load leaves room for its full length. So each live
        micro-batch forbids one interval of starts, and the intervals come in
        ascending order.

        Parts of split sequences don't grow all the time. Where they would have
        to, to make room, they are taken not to: beside them, the answer may be
        a later step than the first.

        Raises:
            CapacityError: (code ``exceeds_load_limit``) the sequences alone
                exceed the limit.
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
        num_growing = sum(live.num_sequences for live in self._live if live.most is None)
        previous_end = -1
        for live, load in zip(self._live, self._loads, strict=True):
            if load > room:
                # Before E[i] the load is lower by num_growing a step: over how
                # many steps is it too high to end in?
                num_steps = live.end - previous_end
                if num_growing:
                    num_steps = min(-((room - load) // num_growing), num_steps)
                first_forbidden = live.end - num_steps - new.num_steps + 2
                if start < first_forbidden:
                    return start
                longest = (self.limit - load) // new.num_sequences + new.skipped  # x[i]
                start = max(start, min(live.end, live.end - longest + new.first_length - 1) + 1)
            num_growing -= live.num_sequences * (live.most is None)
            previous_end = live.end
        return start

    def fits(self, batch: MicroBatch, limit_at: Callable[[int], float]) -> bool:
        """Whether the load, with a micro-batch on top that starts no earlier
        than any other, would keep below ``limit_at(step)`` at each of its
        steps. The limit must not rise from a step to the next."""
        index = bisect_left(self._live, batch.end, key=_END)
        at_end = batch.peak + sum(later.load_at(batch.end) for later in self._live[index:])
        return at_end <= limit_at(batch.end) and all(
            load + batch.load_at(live.end) <= limit_at(live.end)
            for live, load in zip(self._live[:index], self._loads, strict=False)
            if live.end >= batch.start
        )

    def load_at(self, step: int) -> int:
        """The projected load at a step; without what was forgotten or given back."""
        return sum(live.load_at(step) for live in self._live)

    def peak(self) -> int:
        """The highest projected load at any step."""
        return max(self._loads, default=0)

    def forget_before(self, step: int) -> None:
        """Forget micro-batches that ended before ``step``."""
        num_over = bisect_left(self._live, step, key=_END)
        del self._live[:num_over], self._loads[:num_over]

    def _add_load(self, batch: MicroBatch, since: int, *, sign: int) -> None:
        """Change W by the micro-batch's load, at the end steps from ``since`` on."""
        first = bisect_left(self._live, since, key=_END)
        last = bisect_right(self._live, batch.end, key=_END)
        for index in range(first, last):
            self._loads[index] += sign * batch.load_at(self._live[index].end)

    def _alike(self, batch: MicroBatch) -> Iterator[int]:
        """Indices of the live micro-batches that differ from this one at most
        in their number of sequences."""
        for index in range(bisect_left(self._live, batch.end, key=_END), len(self._live)):
            live = self._live[index]
            if live.end > batch.end:
                return
            if replace(live, num_sequences=batch.num_sequences) == batch:
                yield index


@dataclass(frozen=True)
class FixedInterval:
    """``num_sequences`` (M) start every ``interval`` (F) steps, from the first
    step on. The load climbs to its peak within ``target_length`` (S) steps,
    never exceeds it, and the first of a crowd waits no more than F steps."""

    num_sequences: int
    interval: int
    target_length: int

    @classmethod
    def of(
        cls, batch_size: int, target_length: int, interval: int, limit: int | None = None
    ) -> FixedInterval:
        """The interval schedule that keeps about ``batch_size`` (B) sequences
        running: M = B·F/S, rounded; lowered until the peak is within ``limit``
        (W_lim), since rounding up may lift it above B·(S + F)/2.

        Raises:
            ConfigError: ``interval`` is not within 1..S, so that M would exceed
                B.
            CapacityError: (code ``exceeds_load_limit``) even one sequence every
                F steps exceeds the limit.
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
        """How many run at once."""
        return -(-self.target_length // self.interval)

    @property
    def peak(self) -> int:
        """The highest load: M·(S + (S - F) + (S - 2F) + …). If F divides S and
        S divides B·F, this is B·(S + F)/2."""
        n = self.num_micro_batches
        return self.num_sequences * (n * self.target_length - self.interval * (n * (n - 1) // 2))
