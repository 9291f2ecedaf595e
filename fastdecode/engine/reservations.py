"""Room on R-workers: what a plan frees, enlarges and opens there, part by part where sequences are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastdecode.core.sequence import part_id, part_of
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.requests import Run
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.schedule.scheduler import Start, StepPlan
from fastdecode.wire.messages import CloseSequence, ExtendSequence, ForkSequence, OpenSequence, Refused


@dataclass(frozen=True, eq=False)
class Refusal:
    """An R-worker has no room for a sequence, or for a part of it."""

    run: Run
    worker: int
    part: int
    """Which of the sequence, counted from 0."""
    answer: Refused
    has_neighbours: bool
    """Others of ours take room there, so that there will be some when they end."""


def make_room(plan: StepPlan, runs: Mapping[int, Run], fleet: Fleet, pipeline: Pipeline) -> list[Refusal]:
    """Carry out what a plan says before its step, and wait for the R-workers' answers.

    Args:
        runs: by sequence_id.

    Returns:
        One refusal for each sequence that was refused. Parts of it that were accepted are held, until it is closed.
    """
    for suspend in plan.suspends:
        close(runs[suspend.sequence.sequence_id], fleet)
    asked: list[tuple[Run, int, int]] = []  # whose, R-worker, id there
    for extend in plan.extends:
        sequence_id, worker = extend.sequence.sequence_id, extend.sequence.worker
        assert worker is not None
        fleet.send(worker, ExtendSequence(sequence_id, extend.num_reserved_tokens))
        asked.append((runs[sequence_id], worker, sequence_id))
    for start in plan.starts:
        for worker, opening in openings(start):
            fleet.send(worker, opening)
            asked.append((runs[start.sequence.sequence_id], worker, opening.sequence_id))
    answers = pipeline.await_openings({part: worker for _, worker, part in asked})
    refused: dict[int, tuple[Run, int, int, Refused]] = {}
    for run, worker, part in asked:
        answer = answers.get(part)
        if isinstance(answer, Refused):
            refused.setdefault(run.sequence.sequence_id, (run, worker, part_of(part), answer))
        elif (worker, part) not in run.held:
            # Accepted, or the R-worker was lost: then its rows go nowhere, and it is requeued after the step.
            run.held += ((worker, part),)
    return [
        Refusal(run, worker, part, answer, any(other is not run and other.is_on(worker) for other in runs.values()))
        for run, worker, part, answer in refused.values()
    ]


def close(run: Run, fleet: Fleet) -> None:
    """Free what R-workers hold of a sequence."""
    for worker, part in run.held:
        fleet.send(worker, CloseSequence(part))
    run.held = ()


def openings(start: Start) -> list[tuple[int, OpenSequence | ForkSequence]]:
    """What is sent to start a sequence, and to which R-workers: one message for each part."""
    sequence, parent = start.sequence, start.parent
    reserve = sequence.max_cached_tokens if start.num_reserved_tokens is None else start.num_reserved_tokens
    part_tokens = reserve if sequence.parts is None else sequence.parts.num_tokens
    messages: list[tuple[int, OpenSequence | ForkSequence]] = []
    for part, worker in enumerate(sequence.workers):
        first, part_of = part * part_tokens, part_id(sequence.sequence_id, part)
        num_tokens = min(reserve - first, part_tokens)
        num_shared = min(start.num_shared_tokens - first, part_tokens)
        if parent is None or num_shared <= 0:
            messages.append((worker, OpenSequence(part_of, num_tokens)))
        else:
            messages.append((worker, ForkSequence(part_id(parent.sequence_id, part), part_of, num_shared, num_tokens)))
    return messages
