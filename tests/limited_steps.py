"""``fastdecode`` as a process whose engine makes so many steps, and waits until it may make more:
a test that signals a process of the job finds the job under way, however late the signal comes.

Run as a program it is ``fastdecode`` with the file of a ``StepLimit`` before the command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import psutil

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEPS: Final = 20  # enough for the answer to a request of three tokens
_FEW_STEPS: Final = 8
UNLIMITED: Final = 1 << 60
_LOOK_EVERY_S: Final = 0.01


class StepLimit:
    """How many steps the engines of a job may make.

    Args:
        directory: for the file in which they read it.
        first: steps that each may make from its start on.
    """

    def __init__(self, directory: Path, first: int = FIRST_STEPS) -> None:
        self._path = directory / "steps"
        self._serial = 0
        self.allow(first)

    @property
    def fastdecode(self) -> list[str]:
        """How the program begins; options follow."""
        return [sys.executable, str(Path(__file__).resolve()), str(self._path)]

    def allow(self, number: int) -> None:
        """So many steps more, from when an engine reads it."""
        self._serial += 1
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{self._serial} {number}")
        fresh.replace(self._path)

    def extend(self) -> bool:
        """A few steps more, while something is waited for that hasn't come: False."""
        self.allow(_FEW_STEPS)
        return False

    def lift(self) -> None:
        """The job goes on to its end."""
        self.allow(UNLIMITED)

    def lose(self, victim: psutil.Process, trouble: signal.Signals) -> None:
        """Stop or kill a process that the job needs for its next step, and lift the
        limit. One that is killed is stopped before: what it was asked stays unanswered."""
        victim.suspend()
        self.lift()
        if trouble != signal.SIGSTOP:
            victim.send_signal(trouble)


class _Steps:
    """The steps that an engine of this process has left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._serial = ""
        self._left = 0

    def take_one(self) -> bool:
        """Whether there was one."""
        self._read()
        self._left -= 1
        return self._left >= 0

    def _read(self) -> None:
        serial, _, number = self._path.read_text().partition(" ")
        if serial != self._serial:
            self._serial, self._left = serial, int(number)
        self._left = max(self._left, 0)


def limit_steps(path: Path) -> None:
    """From now on, in this process. An engine that may make no step obeys, and it looks after its
    R-workers where none of them owes an answer. Controllers of instances aren't limited."""
    from fastdecode.engine.instances.router import Router
    from fastdecode.engine.service import EngineService

    steps, never, step = _Steps(path), threading.Event(), EngineService._step

    def limited(self: EngineService) -> None:
        engine = self.served.engine
        if not self.has_work or isinstance(engine, Router) or steps.take_one():
            step(self)
        else:
            never.wait(_LOOK_EVERY_S)
            if not engine._has_pending:  # else a look takes the answer that a step waits for
                engine.look()
            self._note(self.served)

    EngineService._step = limited  # type: ignore[method-assign]


def main() -> int:
    path = sys.argv.pop(1)
    from fastdecode.cli import launch
    from fastdecode.cli import main as program

    if sys.argv[1] == "launch":  # its ranks are limited
        launch._fastdecode = lambda: [sys.executable, os.path.abspath(__file__), path]
    elif sys.argv[1] != "r-worker":
        limit_steps(Path(path))
    return program.main()


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
