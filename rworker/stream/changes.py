"""What happens to a cache's sequences and kept blocks that a replica has to follow."""

from __future__ import annotations

from typing import TypeAlias

from fastdecode.wire.blocks import (
    ForgetBlocks,
    KeepBlocks,
    ResumeSequence,
    TruncateSequence,
)
from fastdecode.wire.messages import CloseSequence, ExtendSequence, ForkSequence, OpenSequence

Change: TypeAlias = (
    OpenSequence
    | ForkSequence
    | ExtendSequence
    | TruncateSequence
    | CloseSequence
    | KeepBlocks
    | ResumeSequence
    | ForgetBlocks
)
"""Of a cache's sequences and kept blocks, that a replica has to make, too."""
