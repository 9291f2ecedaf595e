"""Where a model is on this host: a directory, or a name in the local Hugging Face
cache. Nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from fastdecode.core.errors import CheckpointError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_REVISION_BYTES = 1 << 10


def find_model(model: str | Path) -> Path:
    """The directory of a model.

    Args:
        model: a path; or ``org/name``, or ``org/name@revision``, as ``hf download`` puts it in
            the cache. A directory of that name has precedence.

    Returns:
        The directory. A path that isn't a name of the cache is returned as it is, whether or not
        it exists.

    Raises:
        CheckpointError: If a name isn't in the cache; names the directory, and how to fetch it.
    """
    name, revision = hub_name(model), str(model).partition("@")[2]
    if name is None:
        return Path(model)
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    if not repository.is_dir():
        raise CheckpointError(
            f"{model}: there is neither a directory of this name here nor a model in the local "
            f"Hugging Face cache ({repository}). Models are never downloaded. {_fetch(name)}"
        )
    snapshot = _find_snapshot(repository, revision)
    if snapshot is None:
        raise CheckpointError(
            f"{model}: {repository} has no snapshot of {revision or 'main'!r}: its download is "
            f"incomplete, or of another revision. {_fetch(name, revision)}"
        )
    return snapshot


def hub_name(model: str | Path) -> str | None:
    """``org/name`` of a model that is one of the cache's, whether or not it is
    there; None: it is a path."""
    name = str(model).partition("@")[0]
    is_path = Path(model).exists() or ".." in name
    return None if is_path or not _NAME.fullmatch(name) else name


def hub_cache() -> Path:
    """Where the Hugging Face tools keep what they download: ``HF_HUB_CACHE``, or
    ``hub`` in ``HF_HOME``, or in ``huggingface`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(base) / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    place = Path(named or Path(home) / "hub")
    with contextlib.suppress(
        RuntimeError
    ):  # without a home directory ~ stays, and nothing is there
        place = place.expanduser()
    return place


def _find_snapshot(repository: Path, revision: str) -> Path | None:
    """Of a branch, a tag or a commit; without one of ``main``, or of the only
    commit that is there."""
    snapshots = repository / "snapshots"
    commit = _read_ref(repository / "refs", revision or "main") or revision
    if commit and "/" not in commit and commit.strip(".") and (snapshots / commit).is_dir():
        return snapshots / commit
    if revision or not snapshots.is_dir():
        return None
    there = [path for path in snapshots.iterdir() if path.is_dir()]
    return there[0] if len(there) == 1 else None


def _read_ref(refs: Path, revision: str) -> str:
    """The commit that a branch or a tag stands for; empty if there is no such."""
    if ".." in revision:
        return ""
    try:
        with (refs / revision).open("rb") as file:
            return file.read(_MAX_REVISION_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""


def _fetch(name: str, revision: str = "") -> str:
    return f"Fetch it: hf download {name}{f' --revision {revision}' if revision else ''}"
