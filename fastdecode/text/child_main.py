"""The program of a ``LimitedChild``: it encodes with a tokenizer, or renders a chat template.

A template finds what it finds in ``transformers``: ``raise_exception``, ``strftime_now``,
``tojson`` without HTML escapes, loop controls, the ``generation`` tag, blocks trimmed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from fastdecode.core.errors import CheckpointError
from fastdecode.text.child import pack, unpack

Answer: TypeAlias = Callable[[dict[str, Any]], Any]
"""From a question to its answer, in JSON's types. It raises whatever a model's authors raise."""
MAX_TEXT_CHARS = 64 << 20
MAX_REASON_CHARS = 10_000
# A bit of everything, and the runs that make a regular expression go back and forth.
TRIAL_TEXT = "Once upon a time, 12345 naïve cafés — 你好 😀 don't\r\n\t{x: [1.5e-3]};\n" + "".join(
    char * 100 + "!\n" for char in "a Z0.-_=\té"
)
TRIAL_CHAT = {
    "now": "2000-01-01T00:00:00",
    "variables": {
        "messages": [{"role": "user", "content": "Hello"}], "tools": None, "documents": None,
        "add_generation_prompt": True,
    },
}  # fmt: skip


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
    """Load what ``opening`` names, a ``template`` or a ``tokenizer``, and try it: one that never
    ends is known before work starts. Raises whatever the libraries raise, panics among it."""
    if "template" in opening:
        return _open_template(**opening["template"])
    return _open_tokenizer(**opening["tokenizer"])


def _open_tokenizer(path: str, added: list[dict[str, Any]]) -> Answer:
    from fastdecode.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(Path(path), added)
    for text in ("", TRIAL_TEXT):
        with contextlib.suppress(Exception):  # a small vocabulary may lack letters
            tokenizer.encode(text)
    tokenizer.decode(list(range(tokenizer.get_vocab_size())), skip_special_tokens=False)
    return lambda question: tokenizer.encode(**question).ids


def _open_template(source: str, tool_source: str | None, special_tokens: dict[str, str]) -> Answer:
    template = _compiled(source)
    with_tools = template if tool_source is None else _compiled(tool_source)

    def render(question: dict[str, Any]) -> str:
        variables = {**special_tokens, **question["variables"]}
        variables["strftime_now"] = datetime.fromisoformat(question["now"]).strftime
        try:
            chosen = with_tools if variables["tools"] else template
            text: str = chosen.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise Refusal(str(error) or type(error).__name__) from None
        if len(text) > MAX_TEXT_CHARS:
            raise MemoryError
        return text

    with contextlib.suppress(Refusal):  # it may want other messages
        render(TRIAL_CHAT)
    return render


def _compiled(source: str) -> Any:
    """Return a template in Jinja's sandbox. Raises Refusal: If the source is none."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Marks the assistant's text, for training only."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

        def parse(self, parser: Any) -> Scope:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    extensions = [GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except RecursionError:
        raise Refusal("it is nested too deeply") from None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _answered(answer: Answer, question: dict[str, Any]) -> bytes:
    """Return the answer's message, whatever happens while it is made."""
    try:
        return pack({"kind": "answer", "said": answer(question)})
    except MemoryError:
        kind, said = "limit", "it took too much memory"
    except BaseException as error:
        # A panic in the tokenizers library is no Exception.
        is_told = type(error) in (Refusal, CheckpointError, Exception)
        name = "" if is_told else f"{type(error).__name__}: "
        kind, said = "refusal", f"{name}{error}"[:MAX_REASON_CHARS]
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
