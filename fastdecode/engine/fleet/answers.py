"""What a group of R-workers was asked, and what each of it has answered so far;
and whether the arrays of an answer are those that were asked for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.messages import Answer, AttendResult, Hello, ToRWorker, Welcome


def check_arrays(
    result: AttendResult, shape: tuple[int, ...], dtype: DTypeLike, *, want_lse: bool
) -> None:
    """
    Args:
        shape: of o, [T, Hq, D].
        dtype: of o, as it travels.
        want_lse: whether the step asked for it.

    Raises:
        ProtocolError: the answer has others; what is wrong, to be said behind
            the name of whoever gave it.
    """
    if result.o.shape != shape:
        raise ProtocolError(f"answered o of shape {result.o.shape}, not {shape}")
    if result.o.dtype != dtype:
        raise ProtocolError(f"answered o of {result.o.dtype}, where {np.dtype(dtype)} was agreed")
    found = None if result.lse is None else result.lse.shape
    if found != (shape[:2] if want_lse else None):
        due = f"{shape[:2]} was asked" if want_lse else "none was asked"
        raise ProtocolError(f"answered lse of shape {found}, where {due}")


class GroupAnswers:
    """Of workers that all are asked the same, and answer in the order in which
    they were asked."""

    def __init__(self, workers: Iterable[int]) -> None:
        # Greetings that each has still to answer: what comes before the last
        # Welcome answers what is forgotten.
        self._greetings: Counter[int] = Counter()
        self._asked: deque[ToRWorker] = deque()
        self._answers: dict[int, deque[Answer]] = {}
        self.begin(workers)

    def begin(self, workers: Iterable[int]) -> None:
        """Forget what was asked. From now on the group are these."""
        self._asked.clear()
        self._answers = {worker: deque() for worker in workers}

    @property
    def workers(self) -> list[int]:
        """Who is in the group."""
        return list(self._answers)

    @property
    def silent(self) -> list[int]:
        """Those that haven't answered what was asked first."""
        return [worker for worker, answers in self._answers.items() if not answers]

    @property
    def behind(self) -> list[int]:
        """Those that have answered least."""
        least = min(map(len, self._answers.values()))
        return [worker for worker, answers in self._answers.items() if len(answers) == least]

    def ask(self, message: ToRWorker) -> None:
        """All are about to be asked this."""
        if message.answers:
            self._asked.append(message)

    def sent(self, worker: int, message: ToRWorker) -> None:
        """One of them is about to be asked."""
        self._greetings[worker] += isinstance(message, Hello)

    def take(self, worker: int, answer: Answer) -> None:
        """One of them has answered."""
        if self._greetings[worker]:
            self._greetings[worker] -= isinstance(answer, Welcome)
            if self._greetings[worker] or not isinstance(answer, Welcome):
                return
        self._answers[worker].append(answer)

    def next(self) -> tuple[ToRWorker, dict[int, Answer]] | None:
        """What was asked first, and everybody's answer, once all are here."""
        if not self._asked or self.silent:
            return None
        answers = {worker: queue.popleft() for worker, queue in self._answers.items()}
        return self._asked.popleft(), answers
