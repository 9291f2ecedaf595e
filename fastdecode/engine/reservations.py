"""What the lifecycle wants of holders, as messages to them, and their answers, as events."""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from fastdecode.core.holders import HolderId, PartId
from fastdecode.schedule.life import events
from fastdecode.schedule.life.events import Close, Extend, Fork, Open, Resume, Truncate
from fastdecode.schedule.plan import Send
from fastdecode.wire.blocks import (
    ResumeSequence,
    TruncateSequence,
    words_of,
)
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ExtendSequence,
    ForkSequence,
    OpenSequence,
    Refused,
    ToRWorker,
)

ForHolder: TypeAlias = Open | Fork | Resume | Extend | Truncate | Close | Send
"""What a holder is sent a message for."""
FOR_HOLDERS: Final = frozenset(get_args(ForHolder))
"""Their classes."""


def holder_of(instruction: ForHolder) -> HolderId:
    """Who is to be told."""
    return instruction.holder if isinstance(instruction, Send) else instruction.part.holder


def message_for(instruction: ForHolder) -> ToRWorker:
    """What the holder is told. To a holder, a part is a sequence."""
    if isinstance(instruction, Send):
        return instruction.message
    part = instruction.part
    match instruction:
        case Open():
            return OpenSequence(part.part_id, part.num_tokens)
        case Fork():
            parent_id, num_shared = instruction.parent.part_id, instruction.num_shared_tokens
            return ForkSequence(parent_id, part.part_id, num_shared, part.num_tokens)
        case Resume():
            keys = words_of(instruction.keys)
            num_tokens, gap = instruction.num_tokens, instruction.gap
            return ResumeSequence(
                part.part_id, part.num_tokens, num_tokens, keys, gap.start, gap.stop
            )
        case Extend():
            return ExtendSequence(part.part_id, part.num_tokens)
        case Truncate():
            return TruncateSequence(part.part_id, instruction.num_tokens)
        case Close():
            return CloseSequence(part.part_id, tail=(instruction.tail or b"").hex())


def event_for(answer: Accepted | Refused, peer: str) -> events.Opened | events.Refused:
    """What an answer about a part says. ``peer``: whose it is, for people."""
    part_id = PartId(answer.sequence_id)
    if isinstance(answer, Refused):
        return events.Refused(part_id, peer, answer.code, answer.message)
    return events.Opened(part_id)
