"""Status file of a long command, for other programs: JSON, replaced once a second.
``fastdecode top`` shows it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from fastdecode import __version__
from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import write_whole

if TYPE_CHECKING:
    from fastdecode.engine.service import EngineService
    from fastdecode.engine.stats import EngineStats

EVERY_S: Final = 1.0
Look: TypeAlias = Callable[[bool], tuple[str, Mapping[str, Any]]]
"""Returns a command's state and the other fields of its status, given whether it is over."""


def engine_status(
    model: str,
    service: EngineService,
    stats: Callable[[], EngineStats],
    progress: Callable[[], Mapping[str, Any]] = dict,
) -> Look:
    """Return what reads an engine's figures, by the names of a server's ``/status.json``. ``stats``
    returns the engine's totals, ``progress`` those of a job."""
    figures, taken = dict[str, Any](), threading.Event()

    def look(is_over: bool) -> tuple[str, Mapping[str, Any]]:
        from fastdecode.engine.instances.client import status_of

        def take(running: Any) -> None:
            nonlocal figures
            figures = status_of(running)
            taken.set()

        taken.clear()
        service.look(take)
        if is_over and service.snapshot().state == "ready":
            taken.wait(EVERY_S)  # the last status counts all steps
        snapshot, totals = service.snapshot(), stats()
        return snapshot.state, {
            "model": model,
            **progress(),
            **snapshot.report(figures).fields,
            "generation_tokens": totals.num_output_tokens,
            "prompt_tokens": totals.num_prompt_tokens + totals.num_cached_prompt_tokens,
            "cached_tokens": totals.num_cached_prompt_tokens,
        }

    return look


@contextlib.contextmanager
def status_file(
    path: Path | None, command: str, look: Look, tell: Callable[[str], None]
) -> Iterator[None]:
    """Write a status until the context ends, and then once more how the command ended. A failure to
    write is reported once, and ends no work. Without a path nothing is written."""
    if path is None:
        yield
        return
    started_at, is_over, failures = time.monotonic(), threading.Event(), list[ConfigError]()

    def write(end: str = "") -> None:
        state, fields = look(bool(end))
        status = {
            "command": command,
            "version": __version__,
            "pid": os.getpid(),
            "state": end or state,
            "written": time.time(),
            "time_s": time.monotonic(),
            "uptime_s": time.monotonic() - started_at,
            **fields,
        }
        try:
            write_whole(path, json.dumps(status) + "\n", refuse=ConfigError)
        except ConfigError as error:
            failures.append(error)
            if len(failures) == 1:
                tell(f"the status file {path}: {error}")

    def run() -> None:
        while not is_over.is_set():
            write()
            is_over.wait(EVERY_S)

    thread, end = threading.Thread(target=run, name="status file", daemon=True), "ended"
    thread.start()
    try:
        yield
    except BaseException as error:
        end = f"ended by {type(error).__name__}"
        raise
    finally:
        is_over.set()
        thread.join()
        write(end)
