"""What a result has to say of where it comes from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import psutil

from fastdecode.core.host.cpus import available_cores
from fastdecode.core.host.machine import this_machine


def provenance() -> dict[str, Any]:
    """Command, commit (and whether files of the code differed from it) and machine."""
    changed = _git("status", "--porcelain", "--untracked-files=no", ":!*.json", ":!*.md")
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _git("rev-parse", "HEAD"),
        "is_changed": bool(changed),
        "machine": {
            "cpu": this_machine("cpu", ()).cpu,
            "cores": available_cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "load_average": os.getloadavg(),
        "torch": version("torch"),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def keep(result: dict[str, Any], out: Path | None) -> None:
    """Write a result to a file, or print it."""
    text = json.dumps(result, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")
