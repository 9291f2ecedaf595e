"""What the lifecycle wants of holders, as messages to them, and their answers, as events."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import HolderId, PartId
from fastdecode.schedule.life import events
from fastdecode.schedule.life.events import Close, Extend, Fork, Open, Resume
from fastdecode.schedule.plan import Forget, Keep
from fastdecode.wire.kv.kept import (
    KEY_WORDS,
    EndSequence,
    ForgetBlocks,
    KeepBlocks,
    ResumeSequence,
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

ForHolder: TypeAlias = Open | Fork | Resume | Extend | Close | Keep | Forget
"""What a holder is to be told."""


def holder_of(instruction: ForHolder) -> HolderId:
    """Who is to be told."""
    return instruction.holder if isinstance(instruction, Forget) else instruction.part.holder


def message_for(instruction: ForHolder) -> ToRWorker:
    """What the holder is told. To a holder, a part is a sequence."""
    if isinstance(instruction, Forget):
        return ForgetBlocks(_words(instruction.keys))
    part = instruction.part
    match instruction:
        case Open():
            return OpenSequence(part.part_id, part.num_tokens)
        case Fork():
            parent_id, num_shared = instruction.parent.part_id, instruction.num_shared_tokens
            return ForkSequence(parent_id, part.part_id, num_shared, part.num_tokens)
        case Resume():
            keys = _words(instruction.keys)
            return ResumeSequence(part.part_id, part.num_tokens, instruction.num_tokens, keys)
        case Keep():
            return KeepBlocks(part.part_id, instruction.first_block, _words(instruction.keys))
        case Extend():
            return ExtendSequence(part.part_id, part.num_tokens)
        case Close():
            if instruction.tail is not None:
                return EndSequence(part.part_id, _words((instruction.tail,)))
            return CloseSequence(part.part_id)


def _words(keys: tuple[bytes, ...]) -> NDArray[np.int64]:
    """Keys as messages have them."""
    return np.frombuffer(b"".join(keys), np.int64).reshape(-1, KEY_WORDS)


def event_for(answer: Accepted | Refused, peer: str) -> events.Opened | events.Refused:
    """What an answer about a part says. ``peer``: whose it is, for people."""
    part_id = PartId(answer.sequence_id)
    if isinstance(answer, Refused):
        return events.Refused(part_id, peer, answer.code, answer.message)
    return events.Opened(part_id)
