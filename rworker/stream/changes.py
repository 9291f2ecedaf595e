"""What happens to a cache's sequences that a replica has to be told of."""

from __future__ import annotations

from typing import TypeAlias

from fastdecode.wire.kv.taking_over import TruncateSequence
from fastdecode.wire.messages import CloseSequence, ExtendSequence, ForkSequence, OpenSequence

Change: TypeAlias = OpenSequence | ForkSequence | ExtendSequence | TruncateSequence | CloseSequence
"""Of a cache's sequences, that a replica has to make, too."""
