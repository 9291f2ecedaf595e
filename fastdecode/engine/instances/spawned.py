"""Instances that are processes of this host, which this process starts and ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import zmq

from fastdecode.core import errors
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    Given,
    MissingExtraError,
    WorkerError,
)
from fastdecode.core.host.processes import python_command
from fastdecode.wire.ranks import launched_size, without_launcher
from fastdecode.wire.zmq.keys import ClusterKey

logger = logging.getLogger(__name__)

CLOSING_S = 45.0  # how long instances may take to end, all together
_BOOT: Final = (
    "from fastdecode.core.host.processes import end_with; end_with(int(given), 'an instance'); "
    "from fastdecode.engine.instances.processes import serve_spawned; serve_spawned()"
)


def spawn(
    config: EngineConfig, tell: Callable[[str], None], opened: contextlib.ExitStack
) -> tuple[Sequence[str], Sequence[str], ClusterKey]:
    """Start an instance of each role, with an even share of this host.

    They boot together, and load their models in turn: each takes its share of the memory.

    Args:
        tell: Called with a line for each step of their start.
        opened: Ends them.

    Returns:
        Their names, their addresses, and the key of all connections with them.

    Raises:
        ConfigError, ModelError, CapacityError, WorkerError: If one can't start.
    """
    roles, may_change = config.instances.roles, config.instances.replan_slo is not None
    if launched_size() is not None:
        raise ConfigError(
            Given("instances", config.instances.instances),
            " starts instances of this process, which is one of an MPI job's: start it without "
            "mpirun",
        )
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "sworker", "an S-worker")
    numbers = {role: itertools.count() for role in InstanceRole}
    names = [f"{role.value[0]}{next(numbers[role])}" for role in roles]
    public, secret = zmq.curve_keypair()
    processes: list[subprocess.Popen[bytes]] = []
    opened.callback(_end, processes)
    for _ in roles:
        processes.append(
            subprocess.Popen(
                python_command(_BOOT, os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=without_launcher(os.environ),
                start_new_session=True,  # an interrupt at the keyboard is for this process alone
            )
        )
    addresses = []
    for name, role, process in zip(names, roles, processes, strict=True):
        asked = {
            "model": config.model,
            "options": config.of_role(role).options,
            "name": name,
            "role": role.value,
            "runs_batches": may_change or role is InstanceRole.PREFILL,
            "num_instances": len(roles),
            "key": secret.decode(),
        }
        addresses.append(_start(process, asked, tell))
    return names, addresses, ClusterKey(public, secret)


def _start(
    process: subprocess.Popen[bytes], asked: Mapping[str, Any], tell: Callable[[str], None]
) -> str:
    """Make a process that has booted an instance. Return its address."""
    name = f"instance {asked['name']}"
    assert process.stdin is not None and process.stdout is not None
    with process.stdout, contextlib.suppress(BrokenPipeError):
        with process.stdin:
            process.stdin.write(json.dumps(asked).encode())
        for line in process.stdout:
            said = json.loads(line)
            if "address" in said:
                return str(said["address"])
            if "error" in said:
                raise _failure(**said["error"])
            tell(f"{name}: {said['line']}")
    raise WorkerError(
        f"{name} ended while it started, with exit code {process.wait()}: see its last words"
    )


def failure_of(error: FastDecodeError) -> dict[str, Any]:
    """Return an error as a spawned instance says it."""
    kinds = ("ConfigError", "ModelError", "CapacityError", "WorkerError", "FastDecodeError")
    kind = next(name for name in kinds if isinstance(error, getattr(errors, name)))
    words = [
        word if isinstance(word, str) else [word.name, *([word.value] * word.has_value)]
        for word in error.words
    ]
    return {"kind": kind, "words": words, "code": error.code}


def _failure(kind: str, words: list[Any], code: str) -> FastDecodeError:
    given = (word if isinstance(word, str) else Given(*word) for word in words)
    error: FastDecodeError = getattr(errors, kind)(*given, code=code)
    return error


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End instances, or kill them if they don't."""
    end_s = time.monotonic() + CLOSING_S
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = "an instance has not stopped within %.0f s: it hangs, and is killed"
            logger.warning(why, CLOSING_S)
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
