"""Whom an R-worker serves, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ServingTerms:
    model_hash: str | None = None
    """S-workers that run this model only; None: any."""
    keeps_serving: bool = False
    """It stays when the last S-worker has left."""
    return_s: float = 0.0
    """For so long it listens for another one when the last S-worker is lost, and
    hasn't taken its leave."""
    keep_s: float = 0.0
    """For so long it keeps the caches of one that is lost, for whoever resumes
    their session."""


ANYBODY_ONCE: Final = ServingTerms()
"""Whoever comes, until the last has gone."""
