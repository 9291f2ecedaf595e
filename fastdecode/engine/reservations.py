"""What the lifecycle wants of holders, as messages to them, and their answers, as events."""

from __future__ import annotations

from fastdecode.core.holders import PartId
from fastdecode.schedule.life import events
from fastdecode.schedule.life.events import Close, Extend, Fork, Open
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ExtendSequence,
    ForkSequence,
    OpenSequence,
    Refused,
    ToRWorker,
)


def message_for(instruction: Open | Fork | Extend | Close) -> ToRWorker:
    """What the holder of the instruction's part is told. To a holder, a part is a sequence."""
    part = instruction.part
    match instruction:
        case Open():
            return OpenSequence(part.part_id, part.num_tokens)
        case Fork():
            parent_id, num_shared = instruction.parent.part_id, instruction.num_shared_tokens
            return ForkSequence(parent_id, part.part_id, num_shared, part.num_tokens)
        case Extend():
            return ExtendSequence(part.part_id, part.num_tokens)
        case Close():
            return CloseSequence(part.part_id)


def event_for(answer: Accepted | Refused, peer: str) -> events.Opened | events.Refused:
    """What an answer about a part says. ``peer``: whose it is, for people."""
    part_id = PartId(answer.sequence_id)
    if isinstance(answer, Refused):
        return events.Refused(part_id, peer, answer.code, answer.message)
    return events.Opened(part_id)
