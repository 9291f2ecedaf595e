"""A hash of every byte of a model's weights.

``Checkpoint.model_hash`` reads headers only, which is enough to compare two processes of one job.
Blocks that outlive a job need more: fine-tunes of one model have equal headers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from fastdecode.core.errors import CheckpointError, ConfigError
from fastdecode.core.files import write_json
from fastdecode.core.model.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 8 << 20
_MOST_KNOWN_BYTES: Final = 1 << 16


def weights_hash(checkpoint: Checkpoint, known: Path | None = None) -> str:
    """Return the hash of all files with tensors, 64 hexadecimal digits. Reading a large model
    takes a while, so the hash is kept until a file changes.

    Args:
        known: Directory where hashes are kept. None stands for the user's cache.

    Raises:
        CheckpointError: If a file can't be read.
    """
    files = sorted({file for entry in checkpoint.tensors.values() for file in entry.files})
    try:
        stamp = _stamp(files)
        place = (known or user_cache()) / f"{hashlib.sha256(stamp.encode()).hexdigest()}.json"
        found = _known(place, stamp)
        if found is None:
            found = _hash(files)
            _remember(place, stamp, found)
    except OSError as error:
        raise CheckpointError(f"{error.filename} can't be read: {error.strerror}.") from error
    return found


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
    return digest.hexdigest()


def _stamp(files: Iterable[Path]) -> str:
    told = []
    for file in files:
        found = file.stat()
        changed = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
        told.append([str(file.resolve()), *changed])
    return json.dumps(told)


def _known(place: Path, stamp: str) -> str | None:
    try:
        if place.stat().st_uid != os.geteuid() or place.stat().st_size > _MOST_KNOWN_BYTES:
            return None
        told = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return None
    found = told.get("hash") if isinstance(told, dict) and told.get("files") == stamp else None
    return found if isinstance(found, str) and len(found) == 64 else None


def _remember(place: Path, stamp: str, found: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, {"files": stamp, "hash": found}, "weights")
    except (OSError, ConfigError) as error:
        logger.info("the weights' hash isn't kept: %s", error)


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory where hashes of weights are kept for this user.

    Without a home directory, as in a container whose user has no passwd entry, it is one where
    nothing can be made or read, so that every use fails with an OSError."""
    base: str | Path | None = environ.get("XDG_CACHE_HOME")
    try:
        base = base or Path.home() / ".cache"
    except RuntimeError:
        base = Path(os.devnull) / "no home directory"
    return Path(base) / "fastdecode" / "weights"
