"""A child process for what a model directory's authors programmed: tokenizers and chat templates.

The child answers one question after the other within limits. If it dies, the next question gets a
new one. Questions and answers are JSON, and no answer is trusted: the caller checks it.
A ``LimitedChild`` asks; in the child ``main`` answers, and runs a template as transformers does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from fastdecode.core.errors import CHILD_DIED, CheckpointError, RequestError
from fastdecode.core.host.processes import python_command
from fastdecode.text.tokenizer_files import load_tokenizer

Answer: TypeAlias = Callable[[dict[str, Any]], Any]
"""From a question to its answer, in JSON's types. It raises whatever a model's authors raise."""
MAX_ANSWER_BYTES = 512 << 20
_BOOT = "from fastdecode.text.child import main; main(int(given))"
# The rest of our environment may hold secrets.
_INHERITED = "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR"
_QUIET = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
_CRASHES = signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE
MAX_TEXT_CHARS = 64 << 20
MAX_REASON_CHARS = 10_000
# A bit of everything, and the runs that make a regular expression go back and forth.
TRIAL_TEXT = "Once upon a time, 12345 naïve cafés — 你好 😀 don't\r\n\t{x: [1.5e-3]};\n" + "".join(
    char * 100 + "!\n" for char in "a Z0.-_=\té"
)
TRIAL_CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
}


@dataclass(frozen=True)
class Limits:
    """Limits of a child: address space, with Python's own 50 MB, and CPU time of a question and of
    the start. By the clock a busy machine may take ``slowness`` times as long."""

    memory_bytes: int
    cpu_s: int
    open_cpu_s: int
    slowness: int = 12


class ChildFailedError(Exception):
    """A question has no answer. ``refused``: the child can't do it, and hit no limit."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ChildDiedError(ChildFailedError):
    """The child was ended from outside, for example for lack of memory, twice in a row."""

    def as_request_error(self) -> RequestError:
        """Return the error of the request, which may be sent again."""
        return RequestError(f"a process that prepares prompts was ended: {self}", code=CHILD_DIED)


class LimitedChild:
    """Asks a child process, which starts with the first question and ends with this process. It
    runs a ``template`` or a ``tokenizer``, which ``given`` describes."""

    def __init__(self, kind: str, given: Mapping[str, Any], limits: Limits) -> None:
        self._opening = {"kind": kind, "given": given, "limits": asdict(limits)}
        self._limits = limits
        self._asking = threading.Lock()  # an answer belongs to the caller that asked
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._stop: weakref.finalize[..., Any] | None = None

    def open(self) -> None:
        """Start the child, unless it runs. Raises ChildFailedError: If it can't do its work."""
        if self._running is not None:
            return
        ours, theirs = socket.socketpair()
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        with theirs:
            # A process group of its own: an interrupt at the keyboard is for us alone.
            process = subprocess.Popen(
                python_command(_BOOT, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=inherited | _QUIET,
                start_new_session=True,
            )
        self._running = process, Connection(ours.detach())
        self._stop = weakref.finalize(self, _end, *self._running)
        try:
            self._exchange(self._opening, self._limits.open_cpu_s)
        except ChildFailedError:
            self.close()
            raise

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer to one question. A child that was ended from outside is replaced once.
        Raises ChildFailedError: If there is no answer."""
        with self._asking:
            with contextlib.suppress(ChildDiedError):
                self.open()
                return self._exchange(question, self._limits.cpu_s)
            self.open()
            return self._exchange(question, self._limits.cpu_s)

    def close(self) -> None:
        """End the child. Safe to call twice; a question after that starts another."""
        if self._stop is not None:
            self._stop()
        self._running = self._stop = None

    def _exchange(self, question: Mapping[str, Any], cpu_s: int) -> Any:
        assert self._running is not None
        process, connection = self._running
        wall_s = cpu_s * self._limits.slowness
        try:
            raw = pack(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChildFailedError(f"it can't be said in JSON: {error}", refused=True) from None
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", wall_s, 0))
            connection.send_bytes(raw)
            answer = unpack(connection.recv_bytes(MAX_ANSWER_BYTES))
            kind, said = answer["kind"], answer["said"]
        except BlockingIOError:  # a wait has timed out
            self.close()
            raise ChildFailedError(f"it took more than {wall_s} s") from None
        except (OSError, EOFError, ValueError, RecursionError, TypeError, KeyError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(1)  # its own end says more than a kill
                self.close()
                raise _failure(status, cpu_s) from None
            self.close()
            raise ChildFailedError("its answer can't be read") from None
        except BaseException:  # interrupted: its answer would be taken for the next question's
            self.close()
            raise
        if kind != "answer":
            raise ChildFailedError(str(said), refused=kind == "refusal")
        return said


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as it travels. Half a surrogate pair, which JSON can spell, passes."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpack(raw: bytes) -> Any:
    """Return the message in ``raw``. Raises ValueError, RecursionError: If it isn't one."""
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def _failure(status: int, cpu_s: int) -> ChildFailedError:
    if status == -signal.SIGXCPU:
        return ChildFailedError(f"it took more than {cpu_s} s")
    if status > 0 or -status in _CRASHES:
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        return ChildFailedError(f"it crashed ({how}), maybe for lack of memory")
    return ChildDiedError(f"it broke off (exit status {status})")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    connection.close()
    process.wait()


class Refusal(Exception):  # noqa: N818  (an answer of its kind)
    """What is asked for is impossible."""


def main(fd: int) -> None:
    """Answer questions that come over a socket, until its other end is closed."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        opening = unpack(connection.recv_bytes())
        limits = opening["limits"]
        none = dict.fromkeys((resource.RLIMIT_FSIZE, resource.RLIMIT_CORE), 0)
        for kind, most in {resource.RLIMIT_AS: limits["memory_bytes"], **none}.items():
            with contextlib.suppress(OSError, ValueError):  # not every system has them all
                resource.setrlimit(kind, (most, most))
        _limit_time(limits["open_cpu_s"])
        is_template = opening["kind"] == "template"
        load: Callable[..., Answer] = _template if is_template else _tokenizer
        opened: list[Answer] = []
        connection.send_bytes(_answered(lambda _: opened.append(load(**opening["given"])), {}))
        while opened:
            question = unpack(connection.recv_bytes())
            _limit_time(limits["cpu_s"])
            connection.send_bytes(_answered(opened[0], question))


def _tokenizer(path: str, added: list[dict[str, Any]]) -> Answer:
    """Load a tokenizer and try it: one that never ends must fail before work starts."""
    tokenizer = load_tokenizer(Path(path), added)
    for text in ("", TRIAL_TEXT):
        with contextlib.suppress(Exception):  # a small vocabulary may lack letters
            tokenizer.encode(text)
    tokenizer.decode(list(range(tokenizer.get_vocab_size())), skip_special_tokens=False)
    return lambda question: tokenizer.encode(**question).ids


def _template(source: str, tool_source: str | None, special_tokens: dict[str, str]) -> Answer:
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
        render({"now": "2000-01-01T00:00:00", "variables": TRIAL_CHAT})
    return render


def _compiled(source: str) -> Any:
    """Return a template in Jinja's sandbox, with what transformers gives it. Raises Refusal."""
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        raise Refusal("it is nested too deeply" if is_deep else str(error)) from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
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
        # A panic in the tokenizers library isn't an Exception.
        is_told = type(error) in (Refusal, CheckpointError, Exception)
        name = "" if is_told else f"{type(error).__name__}: "
        kind, said = "refusal", f"{name}{error}"[:MAX_REASON_CHARS]
    return pack({"kind": kind, "said": said})


def _limit_time(cpu_s: int) -> None:
    """End the process with SIGXCPU after ``cpu_s`` more of CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + 1 + cpu_s
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
