"""Prompts apart: lanes that run prompts only, and lanes that only decode.

A sequence with more than one token to run starts in a lane of prompts. Once a single
one is left, which is what decoding is, it waits until the policy of a lane that
decodes starts it, and moves to the one that has least to do. Forks, and prompts of
one token, start there. So a load limit holds over what decodes, and prompts are run
ahead as far as there is room for them.

A lane of prompts begins a prompt in a step that has room for all of it, or in one
in which no other runs; so at most one at a time is longer than a step. A prompt that
goes on behind cached tokens takes the room of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.reserving.holder_choice import OwnHolders
from fastdecode.schedule.running import Lane, RunningSequence, loads


def prefilled(lanes: Seq[Lane]) -> list[tuple[Lane, RunningSequence]]:
    """The sequences in lanes of prompts whose prompts have run, with their lanes."""
    return [
        (lane, run)
        for lane in lanes
        if lane.runs_prompts_only
        for run in lane.running.values()
        if has_run(run)
    ]


def has_run(run: RunningSequence) -> bool:
    """Whether nothing but a last token of what is known is left of a sequence."""
    sequence = run.sequence
    is_known = not sequence.is_coming and sequence.num_uncached == 1
    return run.is_open and not run.prefill and is_known


def join_decoding(
    lanes: Seq[Lane], lane: Lane, lane_size: int, places: OwnHolders | None = None
) -> None:
    """Sequences whose prompts have run go on in a lane that decodes: the first of them
    as soon as the lane's policy starts it, and unless a lane with fewer sequences would
    start it, too. The lane's next step is being planned.

    Args:
        lane_size: most sequences of a lane that decodes.
        places: which lane is for which holder; None: each is for all.
    """

    def is_for(each: Lane, run: RunningSequence) -> bool:
        return places is None or places.is_for(each.index, run.holders[0])

    others = [each for each in lanes if each.decodes_only and each is not lane]
    for of_prompts, run in prefilled(lanes):
        if len(lane.running) >= lane_size:
            return
        if not is_for(lane, run):
            continue
        fewer = [x for x in others if is_for(x, run) and len(x.running) < len(lane.running)]
        if not _starts(lane, run) or any(_starts(each, run) for each in fewer):
            return
        of_prompts.leave(run, at=of_prompts.step + 1)
        run.projected = _projected(lane, run)
        run.first_step = lane.step
        lane.enter(run, run.residence)


def back_to_prompts(lanes: Seq[Lane], lane: Lane, run: RunningSequence) -> Lane:
    """A sequence that decoded has lost cached tokens: a lane of prompts runs them. Which."""
    chosen = min((x for x in lanes if x.runs_prompts_only), key=lambda x: len(x.running))
    lane.leave(run, at=lane.step + 1)
    run.projected = _projected(chosen, run)
    chosen.enter(run, run.residence)
    return chosen


def _starts(lane: Lane, run: RunningSequence) -> bool:
    """Whether a lane's policy starts a sequence now, on the holders that have its cache."""
    placed: list[tuple[int, MicroBatch]] = []
    for holder, load in loads(run.residence, _projected(lane, run)):
        if lane.admission.choose(load, [holder], placed) is None:
            return False
        placed.append((holder, load))
    return True


def _projected(lane: Lane, run: RunningSequence) -> MicroBatch:
    """The load of a sequence that decodes in the lane from its present step on."""
    length = len(run.sequence.token_ids)
    target = max(run.projected.target_length, length)
    return MicroBatch(1, target, max(lane.step, 0), length)  # a lane may have had no step


def without_last_token(chunks: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt's chunks; a last one of a single token is decoded instead."""
    return chunks[:-1] if chunks and chunks[-1] == 1 else chunks
