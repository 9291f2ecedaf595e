"""What swapping lanes' KV has come to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SwapFigures:
    """What was copied, over all layers together."""

    num_steps: int = 0  # steps of lanes
    num_blocks_in: int = 0
    num_late_blocks: int = 0
    """Blocks of ``num_blocks_in`` that were asked for when their lane's step began: it wasn't
    foreseen that they would be needed, or that the lane would be next."""
    num_unused_blocks: int = 0  # blocks of ``num_blocks_in`` that no step has seen
    num_prefetches: int = 0  # how often a lane's blocks were brought before its step began
    num_tokens_out: int = 0
    num_copies_out: int = 0
