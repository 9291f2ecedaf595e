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
        args: the command's.
        command: its name.
        progress: how far it is; empty if it doesn't count.
        outputs: what else it writes, by option.

    Returns:
        A function that reports in a line what is done now.

    Raises:
        ConfigError: the file can't be written, or is one of ``outputs``.
    """
    from fastdecode.measure.status_file import Measuring, StatusFile

    if args.status is not None:
        check_paths(STANDARD, status=args.status, **outputs)
    watched = Measuring(tell, getattr(args, "model", None), progress)
    with StatusFile(args.status, command, watched, tell):
        yield watched.say
