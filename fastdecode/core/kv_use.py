"""How full the KV caches are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def kv_used(figures: Mapping[str, Any]) -> float:
    """Part of the live R-workers' KV blocks that is reserved, 0 to 1."""
    workers = [each for each in figures.get("r_workers", ()) if not each.get("lost")]
    total = sum(worker["kv_blocks"] for worker in workers)
    return sum(worker["kv_blocks_used"] for worker in workers) / total if total else 0.0
