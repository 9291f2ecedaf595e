"""How this package was installed, and so what command brings more of it."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Protocol


class Installed(Protocol):
    """``importlib.metadata.Distribution``, as far as it is asked."""

    def read_text(self, filename: str) -> str | None: ...


def pip_command(extra: str, installed: Installed | None = None) -> str:
    """What brings an extra's packages: into a checkout that is installed as
    such, or beside the package.

    Args:
        installed: None: what this Python has.
    """
    if installed is None:
        try:
            installed = metadata.distribution("fastdecode")
        except metadata.PackageNotFoundError:  # nobody installed it: this is a checkout on the path
            return _of_checkout(extra)
    return _of_checkout(extra) if _is_editable(installed) else f"pip install 'fastdecode[{extra}]'"


def _of_checkout(extra: str) -> str:
    return f"pip install -e '.[{extra}]'"


def _is_editable(installed: Installed) -> bool:
    """As pip notes it (PEP 610)."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return False
