"""How this package was installed, and so what command brings more of it."""

from __future__ import annotations

import json
from importlib import metadata


def pip_command(extra: str, installed: metadata.Distribution | None = None) -> str:
    """Return the command that installs an extra, for a checkout or for a package.

    Args:
        installed: How FastDecode was installed. By default, as this Python has it.
    """
    if installed is None:
        try:
            installed = metadata.distribution("fastdecode")
        except metadata.PackageNotFoundError:  # nobody installed it: this is a checkout on the path
            return _of_checkout(extra)
    return _of_checkout(extra) if _is_editable(installed) else f"pip install 'fastdecode[{extra}]'"


def _of_checkout(extra: str) -> str:
    return f"pip install -e '.[{extra}]'"


def _is_editable(installed: metadata.Distribution) -> bool:
    """Return whether pip installed a checkout (PEP 610)."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return False
