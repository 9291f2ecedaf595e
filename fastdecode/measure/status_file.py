"""Status file of a long command, for other programs: JSON, replaced once a second.
``fastdecode top`` shows it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
    model: str
    phase: str = "starting"

    def say(self, line: str) -> None:
        self.phase = line.strip()
        self.tell(line)

    def look(self) -> str:
        """Return the state. Called before every status but the last."""
        return "measuring"

    def fields(self) -> Mapping[str, Any]:
        return {"model": self.model, "phase": self.phase}


@dataclass
class RunningEngineStatus:
    """Figures of an engine, by the names of a server's ``/status.json``."""

    model: str
    service: EngineService[Any]
    stats: Callable[[], EngineStats]
    progress: Callable[[], Mapping[str, Any]] = dict
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM, progress: Callable[[], Mapping[str, Any]] = dict) -> RunningEngineStatus:
        return cls(llm.config.model, llm.service, lambda: llm.stats, progress)

    def look(self) -> str:
        from fastdecode.engine.instances.status_report import status_of

        def take(running: Any) -> None:
            self.figures = status_of(running)

        self.service.look(take)
        return self.service.snapshot().state

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


@contextlib.contextmanager
def status_file(
    path: Path | None,
    command: str,
    watched: Measuring | RunningEngineStatus,
    tell: Callable[[str], None],
) -> Iterator[None]:
    """Write a status until the context ends, and then once more how the command ended.

    A failure to write is reported once, and ends no work. Without a path nothing is written."""
    if path is None:
        yield
        return
    started_at, is_over, failures = time.monotonic(), threading.Event(), list[str]()

    def write(state: str) -> None:
        status = {
            "command": command,
            "version": __version__,
            "pid": os.getpid(),
            "state": state,
            "written": time.time(),
            "time_s": time.monotonic(),
            "uptime_s": time.monotonic() - started_at,
            **watched.fields(),
        }
        beside = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            beside.write_text(json.dumps(status) + "\n", "utf-8")
            os.replace(beside, path)
        except OSError as error:
            failures.append(explained(error))
            if len(failures) == 1:
                tell(f"the status file {path} can't be written: {failures[0]}")

    def run() -> None:
        while not is_over.is_set():
            write(watched.look())
            is_over.wait(EVERY_S)

    thread, state = threading.Thread(target=run, name="status file", daemon=True), "ended"
    thread.start()
    try:
        yield
    except BaseException as error:
        state = f"ended by {type(error).__name__}"
        raise
    finally:
        is_over.set()
        thread.join()
        write(state)
