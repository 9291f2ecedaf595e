"""What a group of R-workers was asked, and what each of it has answered so far;
and whether the arrays of an answer are those that were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import DTypeLike

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.messages import Answer, AttendResult, Hello, ToRWorker


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
    """Of members that all are asked the same, and answer in the order in which
    they were asked."""

    def __init__(self) -> None:
        self._asked: deque[ToRWorker] = deque()
        self._answers: dict[HolderId, deque[Answer]] = {}
        self._num_stale: dict[HolderId, int] = {}

    def begin(self, num_stale: Mapping[HolderId, int]) -> None:
        """Forget what was asked.

        Args:
            num_stale: who is in the group from now on; of each, how many
                answers are still to come to what is forgotten.
        """
        self._asked.clear()
        self._answers = {member: deque() for member in num_stale}
        self._num_stale = dict(num_stale)

    @property
    def silent(self) -> list[HolderId]:
        """Those that haven't answered what was asked first."""
        return [member for member, answers in self._answers.items() if not answers]

    @property
    def behind(self) -> list[HolderId]:
        """Those that have answered least."""
        numbers = {x: len(answers) - self._num_stale[x] for x, answers in self._answers.items()}
        least = min(numbers.values())
        return [member for member, number in numbers.items() if number == least]

    def ask(self, message: ToRWorker) -> None:
        """All are about to be asked this."""
        if message.answers:
            self._asked.append(message)

    def is_stale(self, member: HolderId) -> bool:
        """Whether what one of them says is about what is forgotten."""
        if member not in self._answers or self._num_stale[member]:
            return True
        is_greeted = bool(self._asked) and isinstance(self._asked[0], Hello)
        return is_greeted and not self._answers[member]

    def take(self, member: HolderId, answer: Answer) -> None:
        """One has answered."""
        if self._num_stale.get(member, 0):
            self._num_stale[member] -= 1
        elif member in self._answers:
            self._answers[member].append(answer)

    def next(self) -> tuple[ToRWorker, dict[HolderId, Answer]] | None:
        """What was asked first, and everybody's answer, once all are here."""
        if not self._asked or self.silent:
            return None
        answers = {member: queue.popleft() for member, queue in self._answers.items()}
        return self._asked.popleft(), answers
