"""``fastdecode top``: watch a command that writes ``--status``, or a server. ``fastdecode plot``:
a picture of a run that is over."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from fastdecode.cli.options import add_options, read_options
from fastdecode.core.config.options import REQUIRED, option, switch
from fastdecode.core.errors import ConfigError
from fastdecode.core.files import check_writable
from fastdecode.core.json_file import read_bytes
from fastdecode.core.words import printable

MAX_STATUS_BYTES = 8 << 20
ANSWERS_WITHIN_S = 5.0
_WIDE: Final = 1 << 16  # columns of an output other than a terminal
Look: TypeAlias = Callable[[], dict[str, Any]]
"""Reads the status. Raises ConfigError: If there is none."""


class NotYetError(ConfigError):
    """Raised if the watched command has not started yet."""


@dataclass(frozen=True)
class TopOptions:
    place: str = option(
        REQUIRED, "the status file, or a server's address", flag="place", metavar="FILE|URL"
    )
    once: bool = switch("show it once")
    every: float = option(1.0, "look every S seconds", low=0.1, high=3600, unit="s")
    api_key_file: Path | None = option(None, "of a server that needs a key")


@dataclass(frozen=True)
class PlotOptions:
    source: Path = option(REQUIRED, "what a run has left", flag="source", metavar="TRACE")
    output: Path | None = option(
        None, "the picture: png, svg or pdf (default: beside the source, .svg)", short="-o"
    )


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch a command that was started with --status FILE, or a server at "
        "http://HOST:PORT: progress, tokens/s of the last minute, shares of S-worker and "
        "R-workers, KV caches. Waits until it has started, and ends when it ends."
    )
    parser.set_defaults(run=run_top)
    add_options(parser, TopOptions)


def run_top(args: argparse.Namespace) -> int:
    from fastdecode.measure.live_view import LiveView

    view = LiveView()
    try:
        for place, status in enumerate(_statuses(read_options(args, TopOptions))):
            view.add(status, time.time())
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
            show(view.lines(width), is_first=place == 0)
    except KeyboardInterrupt:
        print()
    return 0


def _statuses(options: TopOptions) -> Iterator[dict[str, Any]]:
    """Yield one status after the other until the command has ended. Wait if ``top`` was started
    before the command. Raises ConfigError: If no status is found."""
    look = _looker(options.place, options.api_key_file)
    is_first, is_waiting = True, False
    while True:
        try:
            status = look()
        except ConfigError as error:
            if not is_first:
                print(f"{options.place} no longer answers")
                return
            if options.once or not isinstance(error, NotYetError):
                raise
            if not is_waiting:
                print(f"waiting: {error} (ctrl-C ends this)", flush=True)
            is_waiting = True
        else:
            is_first = False
            yield status
            if options.once or str(status["state"]).startswith("ended"):
                return
        sleep(options.every)


def show(lines: list[str], *, is_first: bool) -> None:
    """Print lines. On a terminal they replace the earlier ones."""
    if sys.stdout.isatty():
        print("\x1b[2J" if is_first else "", "\x1b[H", sep="", end="")
        lines = [f"{printable(line)}\x1b[K" for line in lines]
        print("\n".join(lines), end="\x1b[J\n", flush=True)
    else:
        print("\n".join(map(printable, lines)), end="\n\n", flush=True)


def _looker(place: str, key_file: Path | None) -> Look:
    if place.startswith(("http://", "https://")):
        try:
            is_with_key = "@" in urlsplit(place).netloc
        except ValueError as error:
            raise ConfigError(f"{place} is not an address: {error}") from None
        if is_with_key:
            raise ConfigError("the address has a name or key before @: use --api-key-file FILE")
        from fastdecode.server.options import first_key  # slow to import

        key = None if key_file is None else first_key(key_file)
        return lambda: _checked(_fetch(place, key), place)
    return lambda: _checked(_read(Path(place)), place)


def _read(path: Path) -> bytes:
    if path.parent.is_dir() and not os.path.lexists(path):
        raise NotYetError(f"{path} does not exist yet: a command writes it with --status {path}")
    return read_bytes(
        path, most_bytes=MAX_STATUS_BYTES, refuse=lambda why: ConfigError(f"{path}: {why}")
    )


def _fetch(url: str, key: str | None) -> bytes:
    url = url.rstrip("/").removesuffix("/status.json") + "/status.json"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
            content: bytes = answer.read(MAX_STATUS_BYTES)
            return content
    except (OSError, ValueError) as error:
        if isinstance(getattr(error, "reason", None), ConnectionRefusedError):
            raise NotYetError(f"no server listens at {url} yet") from None
        raise ConfigError(
            f"can't read {url}: {error}; check the address, and --api-key-file"
        ) from None


def _checked(content: bytes, place: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(content)
        if isinstance(status, dict) and {"state", "time_s", "uptime_s"} <= status.keys():
            return status
    raise ConfigError(f"{place} is not a status: give the file of --status, or a server's address")


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw a file of --trace: who computed when, sequences over time."
    parser.set_defaults(run=run_plot)
    add_options(parser, PlotOptions)


def run_plot(args: argparse.Namespace) -> int:
    from fastdecode.measure.plot import plot_run

    target = args.output or args.source.with_name(args.source.name + ".svg")
    check_writable(target, "picture")
    plot_run(args.source, target)
    print(target)
    return 0
