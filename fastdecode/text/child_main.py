"""The program of a ``LimitedChild``: it encodes with a tokenizer, or renders a chat template."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from fastdecode.text.child import pack, unpack

Answer: TypeAlias = Callable[[dict[str, Any]], Any]
"""From a question to its answer, in JSON's types. It raises whatever a model's authors raise."""
# A bit of everything, and the runs that make a regular expression go back and forth.
TRIAL_TEXT = "Once upon a time, 12345 naïve cafés — 你好 😀 don't\r\n\t{x: [1.5e-3]};\n" + "".join(
    char * 100 + "!\n" for char in "a Z0.-_=\té"
)


class Refusal(Exception):  # noqa: N818  (an answer of its kind)
    """What is asked for is impossible."""


def main(fd: int) -> None:
    """Answer questions that come over a socket, until its other end is closed."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        opening = unpack(connection.recv_bytes())
        limits = opening["limits"]
        _limit_all_but_time(limits["memory_bytes"])
        _limit_time(limits["open_cpu_s"])
        opened: list[Answer] = []
        connection.send_bytes(_answered(lambda _: opened.append(open_service(opening)), {}))
        while opened:
            question = unpack(connection.recv_bytes())
            _limit_time(limits["cpu_s"])
            connection.send_bytes(_answered(opened[0], question))


def open_service(opening: dict[str, Any]) -> Answer:
    """Load what ``opening`` names, and try it: a ``template``, or a ``tokenizer``'s file with
    ``added`` tokens.

    Raises:
        Refusal: If a file can't be read, or a template is no Jinja program.
        BaseException: If the library doesn't take it, or panics on an ordinary text.
    """
    if "template" in opening:
        from fastdecode.text.template_program import open_template

        return open_template(**opening["template"])
    return _open_tokenizer(**opening["tokenizer"])


def _open_tokenizer(path: str, added: list[dict[str, Any]]) -> Answer:
    from fastdecode.core.errors import CheckpointError
    from fastdecode.text.tokenizer_files import load_tokenizer

    try:
        tokenizer = load_tokenizer(Path(path), added)
    except CheckpointError as error:
        raise Refusal(str(error)) from None
    for text in ("", TRIAL_TEXT):
        with contextlib.suppress(Exception):  # a small vocabulary may lack letters
            tokenizer.encode(text)
    tokenizer.decode(list(range(tokenizer.get_vocab_size())), skip_special_tokens=False)

    return lambda question: tokenizer.encode(**question).ids


def _answered(answer: Answer, question: dict[str, Any]) -> bytes:
    """Return the answer's message, whatever happens while it is made."""
    try:
        return pack({"kind": "answer", "said": answer(question)})
    except Refusal as refusal:
        kind, said = "refusal", str(refusal)
    except MemoryError:
        kind, said = "limit", "it took too much memory"
    except BaseException as error:
        # A panic in the tokenizers library is no Exception.
        name = "" if type(error) is Exception else f"{type(error).__name__}: "
        kind, said = "refusal", f"{name}{error}"[:1000]
    return pack({"kind": kind, "said": said})


def _limit_all_but_time(memory_bytes: int) -> None:
    none = dict.fromkeys((resource.RLIMIT_FSIZE, resource.RLIMIT_CORE), 0)
    for kind, most in {resource.RLIMIT_AS: memory_bytes, **none}.items():
        with contextlib.suppress(OSError, ValueError):  # not every system has them all
            resource.setrlimit(kind, (most, most))


def _limit_time(cpu_s: int) -> None:
    """End the process with SIGXCPU after ``cpu_s`` more of CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + 1 + cpu_s
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
