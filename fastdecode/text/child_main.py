"""What runs in a ``LimitedChild``. It imports no more than its service needs,
so that it starts fast."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from fastdecode.text.child_words import LENGTH, Answer, Refusal, pack, unpack


def main(service: str) -> None:
    """Serve until nobody asks any more.

    Args:
        service: "template" or "tokenizer".
    """
    open_service: Callable[[dict[str, Any]], tuple[Any, Answer]]
    if service == "template":
        from fastdecode.text.template_program import open_service
    else:
        from fastdecode.text.tokenizer_program import open_service
    answers = _take_stdout()
    opening = _receive()
    if opening is None:
        return
    limits = opening["limits"]
    _limit_all_but_time(limits["memory_bytes"])
    _limit_time(limits["open_cpu_s"])
    opened: list[Answer] = []

    def begin(question: dict[str, Any]) -> Any:
        said, answer = open_service(question)
        opened.append(answer)
        return said

    _send(answers, _answered(begin, opening))
    while opened and (question := _receive()) is not None:
        _limit_time(limits["cpu_s"])
        _send(answers, _answered(opened[0], question))


def _answered(answer: Answer, question: dict[str, Any]) -> bytes:
    """The answer's message, whatever happens while it is made."""
    try:
        kind, said = "answer", answer(question)
        return pack({"kind": kind, "said": said})
    except Refusal as refusal:
        kind, said = "refusal", str(refusal)
    except MemoryError:
        kind, said = "limit", "it took too much memory"
    except BaseException as error:
        # A panic in the tokenizers library is no Exception.
        reason = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
        kind, said = "refusal", reason[:1000]
    return pack({"kind": kind, "said": said})


def _take_stdout() -> int:
    """Keep the way to the parent for answers alone, and be silent from now on.
    Returns its descriptor."""
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # not in the place of one that is closed
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    return answers


def _limit_all_but_time(memory_bytes: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # not every system has them all
            resource.setrlimit(kind, (most, most))


def _limit_time(cpu_s: int) -> None:
    """From now on; SIGXCPU ends the process then."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + 1 + cpu_s
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _receive() -> dict[str, Any] | None:
    """The next question; None at the end."""
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    raw = sys.stdin.buffer.read(*LENGTH.unpack(head))
    question: dict[str, Any] = unpack(raw)
    return question


def _send(fd: int, raw: bytes) -> None:
    rest = memoryview(LENGTH.pack(len(raw)) + raw)
    while rest:
        rest = rest[os.write(fd, rest) :]
