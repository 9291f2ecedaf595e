"""Prompts apart: lanes that run prompts only, and lanes that only decode.

Who has more than one token to run starts in a lane of prompts. Once a single one
is left, which is what decoding is, the sequence moves to the lane that decodes and
has least to do. Forks, and prompts of one token, start there.

A lane of prompts begins a prompt in a step that has room for all of it, or in one
in which no other runs; so at most one at a time is longer than a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.running import Lane, RunningSequence


def has_run(run: RunningSequence) -> bool:
    """Whether nothing but a last token of what is known is left of a sequence."""
    sequence = run.sequence
    is_known = not sequence.is_coming and sequence.num_uncached == 1
    return run.is_open and not run.prefill and is_known


def join_decoding(lanes: Seq[Lane], lane: Lane) -> None:
    """Sequences whose prompts have run go on in a lane that decodes, as long as
    none that decodes has fewer. Its next step is being planned."""
    others = [each for each in lanes if each.decodes_only and each is not lane]
    for of_prompts in lanes:
        if not of_prompts.runs_prompts_only:
            continue
        for run in [run for run in of_prompts.running.values() if has_run(run)]:
            if any(len(each.running) < len(lane.running) for each in others):
                return
            of_prompts.leave(run, at=of_prompts.step + 1)
            length = len(run.sequence.token_ids)
            target = max(run.projected.target_length, length)
            run.projected = MicroBatch(1, target, lane.step, length)
            run.first_step = lane.step
            lane.enter(run, run.residence)


def without_last_token(chunks: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt's chunks; a last one of a single token is decoded instead."""
    return chunks[:-1] if chunks and chunks[-1] == 1 else chunks
