"""A long command's state in a file, for other programs: JSON, once a second,
whole at any moment. ``fastdecode top`` shows it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from fastdecode import __version__
from fastdecode.core.kv_use import kv_used
from fastdecode.core.os_errors import explained
from fastdecode.engine.llm import LLM

EVERY_S: Final = 1.0


class StatusFile:
    """Writes until it is left, and then once more how it ended. That nothing can
    be written is reported once, and ends no work.

    Args:
        path: None: nobody wants it, and nothing is written.
        command: of ``fastdecode``, that runs.
        llm: what it runs with.
        tell: told what goes wrong.
        progress: how far a job is; empty if it is none.
    """

    def __init__(
        self,
        path: Path | None,
        command: str,
        llm: LLM,
        tell: Callable[[str], None],
        progress: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._path = path
        self._command = command
        self._llm = llm
        self._tell = tell
        self._progress = progress
        self._began_s = time.monotonic()
        self._figures: dict[str, Any] = {}
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
            self._llm.service.look(self._look)
            self._write(self._path, self._llm.snapshot().state)
            self._is_over.wait(EVERY_S)

    def _look(self, running: Any) -> None:
        """In the engine's thread, between two steps."""
        self._figures = asdict(running.engine.figures())

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
        """What is written. The names are those of a server's ``/status.json``."""
        now, stats, figures = self._llm.snapshot().engine, self._llm.stats, self._figures
        return {
            "command": self._command,
            "model": self._llm.config.model,
            "version": __version__,
            "pid": os.getpid(),
            "state": state,
            "written": time.time(),
            "time_s": time.monotonic(),
            "uptime_s": time.monotonic() - self._began_s,
            **self._progress(),
            "num_running": now.num_running,
            "num_waiting": now.num_waiting,
            "num_r_workers": now.num_r_workers,
            "num_live_r_workers": now.num_live_r_workers,
            "generation_tokens": stats.num_output_tokens,
            "prompt_tokens": stats.num_prompt_tokens,
            "cached_tokens": stats.num_cached_prompt_tokens,
            "kv_used": kv_used(figures),
            "figures": figures,
        }
