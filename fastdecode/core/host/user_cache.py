"""Where what takes long to make is kept for this user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory where things of this kind are kept.

    Without a home directory, as in a container whose user has no passwd entry, it is one where
    nothing can be made or read, so that every use fails with an OSError.
    """
    base: str | Path | None = environ.get("XDG_CACHE_HOME")
    try:
        base = base or Path.home() / ".cache"
    except RuntimeError:
        base = Path(os.devnull) / "no home directory"
    return Path(base) / "fastdecode" / kind
