"""What happens to a cache's sequences and kept blocks that a replica has to follow."""

from __future__ import annotations

from typing import TypeAlias

from fastdecode.wire.blocks import Close, Forget, Name, Open, Truncate
from fastdecode.wire.messages import Extend

Change: TypeAlias = Open | Extend | Truncate | Close | Name | Forget
"""Of a cache's sequences and kept blocks, that a replica has to make, too."""
