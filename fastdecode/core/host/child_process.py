"""Commands that start Python processes of this program."""

from __future__ import annotations

import sys


def python_command(code: str, given: object) -> list[str]:
    """Return a command that executes ``code`` in a Python process, where ``given`` is a text.

    The process finds modules where this one does, and nowhere else: not in the working directory.
    """
    boot = f"import sys; given = sys.argv[1]; sys.path[:] = sys.argv[2:]; {code}"
    return [sys.executable, "-I", "-c", boot, str(given), *sys.path]
