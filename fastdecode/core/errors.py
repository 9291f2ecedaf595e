"""The one error hierarchy.

::

    FastDecodeError                 anything we raise on purpose
    ├── ConfigError                 an option or a combination of options makes no sense  (exit 2)
    │   └── MissingExtraError       a needed optional dependency is not installed         (exit 2)
    ├── ModelError                  a model directory can't be used                       (exit 2)
    │   ├── UnsupportedModelError   we don't implement this architecture or feature
    │   └── CheckpointError         its files are missing, broken or don't match the config
    ├── RequestError                one request is bad; all others continue               (exit 3)
    ├── CapacityError               out of KV blocks or memory; a refusal, never a crash
    ├── ProtocolError               a peer sent something that the protocol forbids
    └── WorkerError                 a worker failed, named by its rank or thread          (exit 4)

Every error has a ``code`` (stable, snake_case, for machines) and a message for
people that names the input, the reason and the mend. What crosses a user or
process boundary raises one of these; ``assert`` is for our own invariants.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from importlib import metadata

CHILD_DIED: Final = "child_died"
"""Code of a RequestError that isn't the request's fault: the same request may succeed."""
_ABSENT = object()
_E = TypeVar("_E", bound=BaseException)


@dataclass(frozen=True)
class Given:
    """A parameter of the Python API, in the words of an error: by its name, and
    perhaps the value it was given."""

    name: str
    value: object = _ABSENT

    @property
    def has_value(self) -> bool:
        return self.value is not _ABSENT

    @property
    def shown(self) -> str:
        """The value as a message shows it: who sends absurd ones doesn't get them back whole."""
        if isinstance(self.value, int) and self.value.bit_length() > 256:
            return f"a whole number of {self.value.bit_length()} bits"
        text = repr(self.value)
        return text if len(text) <= 80 else text[:77] + "..."

    def __str__(self) -> str:
        return f"{self.name}={self.shown}" if self.has_value else self.name


def without_frames(error: _E) -> _E:
    """Return the error. Remove its traceback, and those of its causes: they would keep alive all
    that their frames hold, such as the engine that keeps the error."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            waiting += (each.__cause__, each.__context__)
    return error


class FastDecodeError(Exception):
    """Base of every deliberate error.

    Args:
        words: the message, in pieces: texts, and the parameters that it speaks of. A command
            line, where options have other names, says those its own way (``told``).
        code: stable across releases; the message is not. None: the class's own.
    """

    default_code = "internal_error"
    exit_code = 1

    def __init__(self, *words: str | Given, code: str | None = None) -> None:
        self.words = words
        self.message = self.told(str)
        self.code = code or self.default_code
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def told(self, name: Callable[[Given], str]) -> str:
        """The message with every parameter as ``name`` says it."""
        return "".join(word if isinstance(word, str) else name(word) for word in self.words)


class ConfigError(FastDecodeError):
    """An option, or a combination of options, makes no sense."""

    default_code = "invalid_config"
    exit_code = 2
    is_of_command_line = False
    """True if every rank with the same command line finds the error, on any host."""


def pip_command(extra: str, installed: metadata.Distribution | None = None) -> str:
    """Return the command that installs an extra, for a checkout or for a package.

    Args:
        installed: How FastDecode was installed. By default, as this Python has it.
    """
    from importlib import metadata  # it takes 30 ms, which no start without errors should

    try:
        installed = installed or metadata.distribution("fastdecode")
        origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610
        is_checkout = bool(origin.get("dir_info", {}).get("editable", False))
    except metadata.PackageNotFoundError:  # not installed: this is a checkout on the path
        is_checkout = True
    except (ValueError, AttributeError):
        is_checkout = False
    return f"pip install -e '.[{extra}]'" if is_checkout else f"pip install 'fastdecode[{extra}]'"


class MissingExtraError(ConfigError):
    """An optional dependency is missing; the message gives the pip command that brings it."""

    default_code = "missing_extra"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. Install it with: "
            f"{pip_command(extra)}"
        )
        self.package = package
        self.extra = extra


@contextlib.contextmanager
def imports_for(purpose: str) -> Iterator[None]:
    """Within, modules are imported that need the packages of an extra.

    Raises:
        MissingExtraError: one of those packages isn't installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        package, extra = _EXTRAS[error.name]
        raise MissingExtraError(package, extra, purpose) from None


_EXTRAS = {
    "torch": ("torch", "sworker"),
    "tokenizers": ("tokenizers", "sworker"),
    "jinja2": ("jinja2", "sworker"),
    "zmq": ("pyzmq", "zmq"),
    "mpi4py": ("mpi4py", "mpi"),
    "matplotlib": ("matplotlib", "plot"),
    "starlette": ("starlette", "server"),
    "uvicorn": ("uvicorn", "server"),
    "httptools": ("httptools", "server"),
    "prometheus_client": ("prometheus-client", "server"),
    "aiohttp": ("aiohttp", "bench"),
}
"""Package and extra of the modules that not every host has."""


class ModelError(FastDecodeError):
    """A model directory can't be used."""

    default_code = "invalid_model"
    exit_code = 2


class UnsupportedModelError(ModelError):
    """The architecture, or a feature its config asks for, isn't implemented."""

    default_code = "unsupported_model"


class CheckpointError(ModelError):
    """Files of a checkpoint are missing, broken, or don't match ``config.json``."""

    default_code = "invalid_checkpoint"


class RequestError(FastDecodeError):
    """One request is bad. It is answered with this error; every other request continues."""

    default_code = "invalid_request"
    exit_code = 3


def duplicate_id(request_id: str) -> RequestError:
    """The id is that of a request that isn't over."""
    return RequestError(
        f"request id {request_id!r} is that of one unfinished: give each its own",
        code="duplicate_id",
    )


class CapacityError(FastDecodeError):
    """There isn't room (KV blocks, memory) for what was asked. Nothing was
    changed by the attempt."""

    default_code = "out_of_capacity"
    exit_code = 3


class ProtocolError(FastDecodeError):
    """A peer sent a message that the protocol forbids. It was refused before it
    reached any state or kernel."""

    default_code = "protocol_error"
    exit_code = 4


class WorkerError(FastDecodeError):
    """A worker failed. The message names the worker."""

    default_code = "worker_failed"
    exit_code = 4


def assert_never(value: NoReturn) -> NoReturn:
    """End a ``match`` with the case that no value reaches, as the type checker knows."""
    raise AssertionError(f"{value!r} is an unexpected case")
