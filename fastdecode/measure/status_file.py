"""Status file of a long command, for other programs: JSON, replaced once a second.
``fastdecode top`` shows it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from fastdecode import __version__
from fastdecode.core.os_errors import explained

if TYPE_CHECKING:
    from fastdecode.engine.llm import LLM
    from fastdecode.engine.service import EngineService
    from fastdecode.engine.stats import EngineStats

EVERY_S: Final = 1.0


@dataclass
class Measuring:
    """Status of a command that measures and has no engine: the line it reported last."""

    tell: Callable[[str], None]
    """Prints each line, too."""
    model: str | None
    progress: Callable[[], Mapping[str, Any]]
    """Returns its progress. Empty if it does not count."""
    phase: str = "starting"

    def say(self, line: str) -> None:
        """Report the current activity."""
        self.phase = line.strip()
        self.tell(line)

    def look(self) -> str:
        """Return the state. Called before every status but the last."""
        return "measuring"

    def fields(self) -> Mapping[str, Any]:
        """Return the fields besides the command, the time and the state."""
        return {"model": self.model, "phase": self.phase, **self.progress()}


@dataclass
class RunningEngineStatus:
    """Figures of an engine, by the names of a server's ``/status.json``."""

    model: str
    service: EngineService[Any]
    stats: Callable[[], EngineStats]
    """Returns the engine's totals."""
    progress: Callable[[], Mapping[str, Any]] = dict
    """Returns the progress of a job. Empty without a job."""
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM, progress: Callable[[], Mapping[str, Any]] = dict) -> RunningEngineStatus:
        """Return the status of an ``LLM``'s engine."""
        return cls(llm.config.model, llm.service, lambda: llm.stats, progress)

    def look(self) -> str:
        self.service.look(self._look)
        return self.service.snapshot().state

    def _look(self, running: Any) -> None:
        """Take the figures, in the engine's thread between two steps."""
        from fastdecode.engine.instances.status_report import status_to_json

        self.figures = status_to_json(running.engine.stats, running.engine.figures())

    def fields(self) -> Mapping[str, Any]:
        stats = self.stats()
        return {
            "model": self.model,
            **self.progress(),
            **self.service.snapshot().report(self.figures).fields,
            "generation_tokens": stats.num_output_tokens,
            "prompt_tokens": stats.num_prompt_tokens + stats.num_cached_prompt_tokens,
            "cached_tokens": stats.num_cached_prompt_tokens,
        }


class StatusFile:
    """Writes a status until the context ends, and then once more how the command ended.

    A failure to write is reported once, and ends no work.

    Args:
        path: The file. None writes nothing.
        tell: Prints a failure.
    """

    def __init__(
        self,
        path: Path | None,
        command: str,
        watched: Measuring | RunningEngineStatus,
        tell: Callable[[str], None],
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
        """Return the fields of the file."""
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
