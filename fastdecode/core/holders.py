"""Where the KV cache of a sequence is, as values.

A **holder** is a cache, not a process: an R-worker may serve several, and one may move to another R-worker. What a
holder keeps of a sequence is a **part**: consecutive tokens, all of them where the sequence is whole.
"""

from __future__ import annotations

from typing import NewType

HolderId = NewType("HolderId", int)
"""A cache; counts from 0."""

SequenceId = NewType("SequenceId", int)
"""A sequence, as the engine counts them."""

PartId = NewType("PartId", int)
"""A part, as its holder knows it: unique among all parts that an engine ever opens."""
