"""``--status`` of commands that measure and have no engine."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastdecode.cli.options import tell
from fastdecode.core.files import STANDARD, check_paths


@contextlib.contextmanager
def measuring(
    args: argparse.Namespace,
    command: str,
    progress: Callable[[], Mapping[str, Any]] = dict,
    **outputs: Path | None,
) -> Iterator[Callable[[str], None]]:
    """Write ``--status``, if it is given, while the command measures.

    Args:
        args: Options of the command.
        command: Name of the command.
        progress: Returns its progress. Empty if it does not count.
        outputs: Other files that it writes, by option.

    Returns:
        A function that reports the current activity in a line.

    Raises:
        ConfigError: If the file can't be written, or is one of ``outputs``.
    """
    from fastdecode.measure.status_file import Measuring, StatusFile

    if args.status is not None:
        check_paths(STANDARD, status=args.status, **outputs)
    watched = Measuring(tell, getattr(args, "model", None), progress)
    with StatusFile(args.status, command, watched, tell):
        yield watched.say
