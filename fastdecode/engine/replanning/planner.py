"""Asks a process of its own which roles would carry more. Nothing waits for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from typing import IO

from cost_model.goodput.replanning import JudgedRoles, RoleQuestion, from_json, to_json
from fastdecode.core.clock import Clock
from fastdecode.core.host.processes import python_command
from fastdecode.wire.mpi.ranks import without_launcher

ANSWERS_WITHIN_S = 600.0
# No other process would end it if this one were killed.
_BOOT = (
    "from fastdecode.core.host.processes import end_with; end_with(int(given), 'the planner'); "
    "from cost_model.goodput.replanning import main; main()"
)


class Planner:
    """One question at a time. Close it when done; belongs to one thread.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._asked_s = 0.0

    def ask(self, question: RoleQuestion) -> None:
        """Have it answered; none is being answered."""
        assert self._process is None
        # Files, not pipes: nobody has to read or write while the other does.
        with tempfile.TemporaryFile() as asked:
            asked.write(to_json(question).encode())
            asked.seek(0)
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115  (until it is read)
            self._asked_s = self._clock()
            self._process = subprocess.Popen(
                python_command(_BOOT, os.getpid()),
                stdin=asked,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                env=without_launcher(os.environ),
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        """Whether what was asked has been answered, or won't be."""
        if self._process is None:
            return False
        is_late = self._clock() - self._asked_s > ANSWERS_WITHIN_S
        return is_late or self._process.poll() is not None

    def take(self) -> JudgedRoles | None:
        """The answer, once it is over; None: there is none."""
        assert self._process is not None and self._answer is not None
        has_failed = self._process.poll() != 0
        self._answer.seek(0)
        said = self._answer.read()
        self.close()
        if has_failed:
            return None
        try:
            return from_json(said.decode(), JudgedRoles)
        except ValueError:
            return None

    def close(self) -> None:
        """Ask no more. Safe to call twice."""
        process, self._process = self._process, None
        answer, self._answer = self._answer, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        if answer is not None:
            answer.close()
