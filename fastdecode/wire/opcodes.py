"""What messages are called on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastdecode.wire.instances.messages import INSTANCE_OPCODES
from fastdecode.wire.kv.attending import FEEDING_OPCODES
from fastdecode.wire.kv.chunks import CHUNK_OPCODES
from fastdecode.wire.kv.exporting import HANDING_OPCODES
from fastdecode.wire.kv.kept import KEPT_OPCODES
from fastdecode.wire.kv.replicating import REPLICATING_OPCODES
from fastdecode.wire.kv.taking_over import TAKING_OVER_OPCODES
from fastdecode.wire.kv.tiers import TIER_OPCODES
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    ExtendSequence,
    Failed,
    ForkSequence,
    Hello,
    Inspect,
    Message,
    OpenSequence,
    Refused,
    Report,
    Shutdown,
    Welcome,
)
from fastdecode.wire.stages import STAGE_OPCODES

OPCODES: Final[Mapping[type[Message], int]] = {
    Hello: 1,
    OpenSequence: 2,
    ForkSequence: 3,
    CloseSequence: 4,
    BeginStep: 5,
    Attend: 6,
    Shutdown: 7,
    ExtendSequence: 8,
    Inspect: 9,
    Welcome: 65,
    Accepted: 66,
    Refused: 67,
    AttendResult: 68,
    Failed: 69,
    Report: 70,
    **CHUNK_OPCODES,
    **FEEDING_OPCODES,
    **TAKING_OVER_OPCODES,
    **KEPT_OPCODES,
    **REPLICATING_OPCODES,
    **TIER_OPCODES,
    **HANDING_OPCODES,
    **STAGE_OPCODES,
    **INSTANCE_OPCODES,
}
"""From 65 on, those that R-workers send; those of instances from 129 on. A retired
number isn't used again."""
