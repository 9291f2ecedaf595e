"""Files that hold secrets: who may read them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

_LEAST_KEY_CHARS: Final = 8
_SUFFIXES: Final = (".env", ".json", ".key", ".keys", ".txt")
"""Endings of files of keys, and of no key."""
_WORDS: Final = re.compile("/[a-z/_-]+")
"""Paths that no random key looks like."""


def exposure(found: os.stat_result, path: object) -> str:
    """Why a file isn't secret, and what to do; empty: it is.

    Its owner alone may read it. A file of root's may also be read by a group
    (0640), as secrets are that an orchestrator mounts.

    Args:
        found: of the file itself, not of a link to it.
        path: as the user wrote it.
    """
    allowed = stat.S_IRGRP if found.st_uid == 0 else 0
    exposed = stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed
    if not exposed:
        return ""
    return (
        f"others may read or change it (mode {stat.S_IMODE(found.st_mode):03o}): chmod 600 {path}"
    )


def shown(path: Path) -> str:
    """Return how errors name a file of keys. A missing file whose name may be a key given
    in place of a file is not named."""
    name = str(path)
    is_in_directory = path.parent not in (Path("."), Path("/")) and path.parent.is_dir()
    is_name = len(name) < _LEAST_KEY_CHARS or path.suffix in _SUFFIXES or _WORDS.fullmatch(name)
    if is_name or is_in_directory or os.path.lexists(path):
        return name
    return "(not shown: it may be a key, and a file is expected)"
