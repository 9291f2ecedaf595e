"""Steps of prompts on stages of their own: what the first stage does of them, and
how a prompt stage attends.

Such steps have lanes of their own, behind those of tokens. Their K and V are only
stored by R-workers, so a prompt stage attends its chunks itself. A prompt that
takes several steps keeps K and V of its earlier chunks here until it is done, in
the lane's **room** for one prompt: the scheduler begins no second such prompt in a
lane before the first is done.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.pool import HolderPool
from fastdecode.engine.step.device_prefill import DevicePrefillChunks
from fastdecode.engine.step.layout import HolderSpan, LocalSpan, StepBatch
from fastdecode.engine.step.remote import Attention, LaneAttention
from fastdecode.wire.messages import AttendResult
from sworker.paged import PagedKV, Prompt
from sworker.worker import Pass, SWorker


@dataclass
class _Room:
    """What is in a lane's room."""

    sequence_id: int
    num_tokens: int


class LanePrompts:
    """Prompts under way on a prompt stage, one a lane at most.

    Args:
        cache: on the stage's device; holds them and nothing else.
        first_lane: the first of prompts.
        most_tokens: of a prompt.
    """

    def __init__(self, cache: PagedKV, first_lane: int, most_tokens: int) -> None:
        self._cache = cache
        self._first_lane = first_lane
        self._most_tokens = most_tokens
        self._rooms: dict[int, _Room] = {}  # by lane

    def begin(self, batch: StepBatch) -> DevicePrefillChunks | None:
        """A step begins. None: all of its prompts begin and end with it.

        Raises:
            ProtocolError: nobody runs prompts like that.
        """
        lane = batch.spans[0].begin.lane
        base = (lane - self._first_lane) * self._most_tokens
        if not 0 <= base < self._cache.num_slots:
            raise ProtocolError(f"lane {lane} isn't one of prompts")
        under_way = [
            (span, index) for span in batch.spans for index in self._under_way(batch, span)
        ]
        if len(under_way) > 1:
            raise ProtocolError(f"{len(under_way)} prompts at a time are under way in lane {lane}")
        if not under_way:
            return None
        ((span, index),) = under_way
        begin = span.begin
        past, new = int(begin.num_past[index]), int(begin.num_new[index])
        self._note(lane, int(begin.sequence_ids[index]), past, new)
        first = span.rows.start + int(begin.num_new[:index].sum())
        rows = slice(first, first + new)
        slots = torch.arange(base, base + past + new, device=self._cache.pool.device)
        stored = ((rows, slots[past:]),)
        later: tuple[tuple[Prompt, ...], ...] = ()
        if past:
            later = ((Prompt(rows, slots),),)
            batch = _attended_here(batch, span)
        return DevicePrefillChunks(batch, self._cache, stored, later, ())

    def _under_way(self, batch: StepBatch, span: HolderSpan) -> list[int]:
        """Which of a holder's sequences were begun before, or don't end here."""
        begin = span.begin
        if (begin.num_new < 2).any():
            raise ProtocolError("a step of prompts has a row that decodes")
        first = int(np.searchsorted(batch.last_rows, span.rows.start))
        draws = batch.draws[first : first + len(begin.num_new)]
        under_way: list[int] = np.flatnonzero((begin.num_past > 0) | ~draws).tolist()
        return under_way

    def _note(self, lane: int, sequence_id: int, past: int, new: int) -> None:
        """A lane's prompt goes on, or begins."""
        room = self._rooms.get(lane)
        if past and (room is None or (room.sequence_id, room.num_tokens) != (sequence_id, past)):
            found = "nothing" if room is None else f"{room.num_tokens} of {room.sequence_id}"
            raise ProtocolError(
                f"sequence {sequence_id} goes on behind {past} tokens in lane {lane}, where "
                f"{found} are under way"
            )
        if past + new > self._most_tokens:
            raise ProtocolError(f"a prompt of {past + new} tokens; {self._most_tokens} is the most")
        self._rooms[lane] = _Room(sequence_id, past + new)


def _attended_here(batch: StepBatch, span: HolderSpan) -> StepBatch:
    """The step, as its holders see it: none attends anything, and what goes on
    from an earlier step, the only one of its kind, isn't attended to itself alone."""
    rows = slice(span.rows.start, span.rows.start)
    begin = replace(span.begin, num_queries=np.zeros_like(span.begin.num_queries), want_lse=False)
    own = replace(span, begin=begin, query_rows=rows)
    spans = tuple(own if one is span else one for one in batch.spans)
    local: tuple[LocalSpan, ...] = tuple(one for one in batch.local if not one.merge)
    return replace(batch, spans=spans, local=local)


class ApartAttention:
    """Makes ``LaneAttention`` for the first stage, where prompts run on others.

    Args:
        tokens: of steps that decode.
        first_lane: the first of prompts.
    """

    def __init__(self, tokens: Attention, first_lane: int) -> None:
        self._tokens = tokens
        self._first_lane = first_lane

    @property
    def fleet(self) -> HolderPool:
        return self._tokens.fleet

    @property
    def holders(self) -> Seq[Holder]:
        return self._tokens.holders

    def begin(self, batch: StepBatch) -> LaneAttention:
        """See ``fastdecode.engine.step.remote.Attention``."""
        if batch.spans[0].begin.lane < self._first_lane:
            assert not batch.num_prompt_tokens, "a step that decodes has a prompt's rows"
            return self._tokens.begin(batch)
        assert not batch.num_decoding, "a step of prompts has a row that decodes"
        return Elsewhere(batch)


class Elsewhere:
    """A step that the first stage only embeds; see ``LaneAttention``."""

    in_s_part_s = 0.0
    ready = True
    num_awaited = 0
    settled = True

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.sent_s: Seq[float] = ()
        self.r_compute_s: dict[HolderId, float] = {span.holder: 0.0 for span in batch.spans}
        self._lost: set[HolderId] = set()

    def run_through(self, s_worker: SWorker) -> Pass:
        """See ``LaneAttention``."""
        batch = self.batch
        rows = torch.from_numpy(np.stack((batch.token_ids, batch.positions)))

        def embed() -> Tensor:
            token_ids, positions = s_worker.upload(rows)
            return s_worker.model.embed(token_ids, positions)

        return s_worker.run_through(embed)

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        raise AssertionError("it has no layers")

    def dispatch(self) -> bool:
        return True

    def wait_for_copy(self) -> None:
        pass

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        raise ProtocolError(f"holder {holder} answered for a step that it wasn't sent")

    def lose(self, holder: HolderId) -> None:
        """See ``LaneAttention``."""
        self._lost.add(holder)

    @property
    def lost(self) -> Collection[HolderId]:
        """See ``LaneAttention``."""
        return self._lost

    def take(self) -> Tensor:
        raise AssertionError("it has no layers")
