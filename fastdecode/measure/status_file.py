"""A long command's state in a file, for other programs: JSON, once a second,
whole at any moment. ``fastdecode top`` shows it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastdecode import __version__
from fastdecode.core.os_errors import explained

if TYPE_CHECKING:
    from fastdecode.engine.llm import LLM
    from fastdecode.engine.service import EngineService
    from fastdecode.engine.stats import EngineStats

EVERY_S: Final = 1.0


class Watched(Protocol):
    """What a status file reports."""

    def look(self) -> str:
        """Called before every status but the last. Returns the state."""

    def fields(self) -> Mapping[str, Any]:
        """What is written besides the command, the time and the state."""


class Measuring:
    """A command that measures, and has no engine: what it reported last.

    Args:
        tell: gets what is said, too.
        model: None: it runs none.
        progress: how far it is; empty if it doesn't count.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        model: str | None = None,
        progress: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._tell = tell
        self._model = model
        self._progress = progress
        self._phase = "starting"

    def say(self, line: str) -> None:
        """What is done now."""
        self._phase = line.strip()
        self._tell(line)

    def look(self) -> str:
        return "measuring"

    def fields(self) -> Mapping[str, Any]:
        return {"model": self._model, "phase": self._phase, **self._progress()}


class RunningEngineStatus:
    """An engine's figures. The names are those of a server's ``/status.json``.

    Args:
        model: that it runs.
        service: its thread.
        stats: its totals.
        progress: how far a job is; empty if it is none.
    """

    def __init__(
        self,
        model: str,
        service: EngineService[Any],
        stats: Callable[[], EngineStats],
        progress: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._model = model
        self._service = service
        self._stats = stats
        self._progress = progress
        self._figures: dict[str, Any] = {}

    @classmethod
    def of(cls, llm: LLM, progress: Callable[[], Mapping[str, Any]] = dict) -> RunningEngineStatus:
        """Of what an ``LLM`` runs."""
        return cls(llm.config.model, llm.service, lambda: llm.stats, progress)

    def look(self) -> str:
        self._service.look(self._look)
        return self._service.snapshot().state

    def _look(self, running: Any) -> None:
        """In the engine's thread, between two steps."""
        from fastdecode.engine.instances.status_report import status_to_json

        self._figures = status_to_json(running.engine.stats, running.engine.figures())

    def fields(self) -> Mapping[str, Any]:
        stats = self._stats()
        return {
            "model": self._model,
            **self._progress(),
            **self._service.snapshot().report(self._figures).fields,
            "generation_tokens": stats.num_output_tokens,
            "prompt_tokens": stats.num_prompt_tokens + stats.num_cached_prompt_tokens,
            "cached_tokens": stats.num_cached_prompt_tokens,
        }


class StatusFile:
    """Written until it is left, and then once more with how the command ended. A
    write that fails is reported once, and ends no work.

    Args:
        path: None: nothing is written.
        command: of ``fastdecode``, that runs.
        watched: what it reports.
        tell: gets what goes wrong.
    """

    def __init__(
        self, path: Path | None, command: str, watched: Watched, tell: Callable[[str], None]
    ) -> None:
        self._path = path
        self._command = command
        self._watched = watched
        self._tell = tell
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="status file", daemon=True)

    def __enter__(self) -> StatusFile:
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._path is not None:
            self._thread.join()
            self._write(self._path, "ended" if kind is None else f"ended by {kind.__name__}")

    def _run(self) -> None:
        assert self._path is not None
        while not self._is_over.is_set():
            self._write(self._path, self._watched.look())
            self._is_over.wait(EVERY_S)

    def _write(self, path: Path, state: str) -> None:
        beside = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            beside.write_text(json.dumps(self.status(state)) + "\n", "utf-8")
            os.replace(beside, path)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._tell(f"the status file {path} can't be written: {explained(error)}")

    def status(self, state: str) -> dict[str, Any]:
        """What is written."""
        return {
            "command": self._command,
            "version": __version__,
            "pid": os.getpid(),
            "state": state,
            "written": time.time(),
            "time_s": time.monotonic(),
            "uptime_s": time.monotonic() - self._began_s,
            **self._watched.fields(),
        }
