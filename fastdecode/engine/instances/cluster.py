"""Instances as one engine, and the service that runs it. It needs no torch: the model is theirs.

They are processes that this one starts, processes at addresses, or ranks of this MPI job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    Given,
    MissingExtraError,
    WorkerError,
    imports_for,
)
from fastdecode.core.host.openmp import is_spinning_chosen, spin_longer
from fastdecode.core.host.processes import python_command
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.identity import Identity, identify
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.resuming import Session
from fastdecode.core.trace import Trace
from fastdecode.engine.instances.client import EngineClient
from fastdecode.engine.instances.registry import (
    FromInstance,
    Inbox,
    InstanceHub,
    Registry,
    greet,
    identity_of,
)
from fastdecode.engine.instances.replanning import Replanner, slo_of
from fastdecode.engine.instances.router import Router
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.transport import shares_thread
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.wire.instances import InstanceHello, InstanceSays, InstanceWelcome, ToInstance
from fastdecode.wire.messages import Failed
from fastdecode.wire.mpi.job import join
from fastdecode.wire.ranks import InstanceRanks, launched_size, link_address, without_launcher
from fastdecode.wire.traits import ERRORS, error_fields

if TYPE_CHECKING:
    from fastdecode.wire.zmq.hub import ZmqHub
    from fastdecode.wire.zmq.keys import ClusterKey

logger = logging.getLogger(__name__)

SAYS: Final = frozenset([*get_args(InstanceSays), Failed])
_REACH_S: Final = 20.0
"""Longest wait for instances that are started at the same time, and load their models."""
CLOSING_S = 45.0  # how long instances may take to end, all together
_BOOT: Final = (
    "from fastdecode.core.host.processes import end_with; end_with(int(given), 'an instance'); "
    "from fastdecode.engine.instances.processes import serve_spawned; serve_spawned()"
)


def make_service(
    config: EngineConfig,
    progress: Callable[[str], None] | None,
    trace: Trace | None,
    times: MeasuredTimes | None,
    session: Session | None,
) -> EngineService:
    """Return the service that runs requests as it was configured (``LLM``). It isn't open yet.

    Raises:
        ConfigError: If some of them are of one engine only.
        MissingExtraError: If a package is missing.
    """
    if config.instances.instances:
        if config.instances.replan_slo is not None:
            slo_of(config.instances.replan_slo)
        if trace is not None:
            raise ConfigError(Given("trace"), " is of one engine: leave out the instances")
        inbox = Inbox()
        return EngineService(partial(RunningCluster, config, progress, inbox), inbox=inbox)
    computes_alone = shares_thread(config)
    if computes_alone:
        spin_longer(os.environ, sys.modules)
    with imports_for("an S-worker"):
        from fastdecode.engine.setup.launch import RunningEngine
        from sworker.kernels.threads import end_own_threads

    make = partial(RunningEngine, config, progress, trace, times, session)
    if computes_alone and not is_spinning_chosen(os.environ):
        return EngineService(make, in_callers_thread=end_own_threads)
    return EngineService(make)


class RunningCluster:
    """Instances, and the router that spreads requests over them. Close it when done.

    Args:
        inbox: Of the thread that makes this object.

    Raises:
        ConfigError: If an address can't be used, or instances don't fit together.
        ModelError: If the model directory is bad.
        WorkerError: If no instance answers.
    """

    has_hung_r_workers = False  # other processes' R-workers do not keep this one from ending

    def __init__(
        self, config: EngineConfig, progress: Callable[[str], None] | None, inbox: Inbox
    ) -> None:
        started, tell = time.perf_counter(), progress or logger.info
        checkpoint = open_checkpoint(config.model, config.s_part.load_format)
        self.spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
        if (prompt_pp := config.s_part.prompt_pp) > self.spec.num_layers:
            raise ConfigError(
                Given("prompt_pp", prompt_pp),
                f": {self.spec.name} has {self.spec.num_layers} layers, and every stage needs one: "
                "choose a prompt_pp that isn't greater",
            )
        own = identify(config, self.spec)
        with contextlib.ExitStack() as opened:
            self.codec = TextCodec.load(checkpoint.directory, own.max_model_len)
            opened.callback(self.codec.close)
            hub, names, patience_s, unreached = _reach(config, tell, opened)
            hello = InstanceHello(checkpoint.model_hash)
            welcomes, failed = greet(hub, hello, patience_s, unreached)
            if not welcomes:
                raise next(iter(failed.values()))
            for number, why in failed.items():
                logger.warning("the job starts without an instance: %s", why.message)
                hub.connections[number].close()
            self.identity = _common(config, own, welcomes)
            for number, name in enumerate(names):
                found = welcomes.get(number)
                what = (
                    "is not connected yet" if found is None else f"{found.name}, {found.role.value}"
                )
                tell(f"instance {name}: {what}")
            self.engine = _make_router(self.spec, hub, names, welcomes)
            inbox.registry = self._registry = Registry(
                hub,
                self.engine,
                hello,
                identity_of(self.welcomes[0]),
                config.cluster.worker_timeout_s,
                may_return=bool(config.instances.addresses),
            )
            if config.instances.replan_slo is not None:
                token_bytes = self.spec.kv_spec(self.identity.kv_dtype).token_bytes
                replanner = Replanner(config.instances.replan_slo, self.engine, token_bytes, tell)
                opened.callback(replanner.close)
                self._registry.on_turn = replanner.look
            self._opened = opened.pop_all()
        self.load_s = time.perf_counter() - started

    @property
    def welcomes(self) -> tuple[InstanceWelcome, ...]:
        """The welcomes of all instances that have answered."""
        return tuple(each.welcome for each in self.engine.clients if each.welcome is not None)

    @property
    def num_r_workers(self) -> int:
        return sum(welcome.num_r_workers for welcome in self.welcomes)

    @property
    def num_live_r_workers(self) -> int:
        """As far as is known: instances report it now and then, lost ones have none."""
        return sum(each.num_live_r_workers for each in self.engine.clients)

    def close(self) -> None:
        """Say goodbye to instances, and end those that this process started. Safe to call twice."""
        self._opened.close()


_Reached: TypeAlias = tuple[InstanceHub, Sequence[str], float, Mapping[int, WorkerError]]
"""Connections to instances, their names, for how long to wait until they have loaded their models,
and why some were not reached."""


def _reach(
    config: EngineConfig, tell: Callable[[str], None], opened: contextlib.ExitStack
) -> _Reached:
    """Connect to all instances. Raises ConfigError: If that can't be done."""
    if config.instances.placed:
        return _reach_ranks(config, opened)
    with imports_for("instances"):
        from fastdecode.wire.zmq.keys import read_key

    names: Sequence[str] = config.instances.addresses
    addresses, key = names, read_key(config.cluster.key)
    if config.instances.roles:
        names, addresses, key = _spawn(config, tell, opened)
    hub = connect(addresses, key, config.cluster.worker_silence_s)
    opened.callback(hub.close)
    reach_s = min(_REACH_S, config.cluster.worker_timeout_s)
    return hub, names, reach_s, hub.reach(reach_s)


def _spawn(
    config: EngineConfig, tell: Callable[[str], None], opened: contextlib.ExitStack
) -> tuple[Sequence[str], Sequence[str], ClusterKey]:
    """Start an instance of each role, with an even share of this host.

    They boot together, and load their models in turn: each takes its share of the memory.

    Returns:
        Their names, their addresses, and the key of all connections with them.

    Raises:
        ConfigError, ModelError, CapacityError, WorkerError: If one can't start.
    """
    import zmq

    from fastdecode.wire.zmq.keys import ClusterKey

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
    """Return an error as a spawned instance reports it."""
    kind, _, code = error_fields(error)
    words = [
        word if isinstance(word, str) else [word.name, *([word.value] * word.has_value)]
        for word in error.words
    ]
    return {"kind": kind, "words": words, "code": code}


def _failure(kind: str, words: list[Any], code: str) -> FastDecodeError:
    given = (word if isinstance(word, str) else Given(*word) for word in words)
    return ERRORS[kind](*given, code=code)


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


def connect(addresses: Sequence[str], key: ClusterKey | None, silence_s: float) -> ZmqHub:
    """Return connections to instances at addresses. Raises ConfigError: If one is not an address,
    or needs a key."""
    from fastdecode.wire.zmq.hub import ZmqHub

    class AddressHub(ZmqHub):
        peer_kind, command, parameter = "instance", "fastdecode instance --bind", "instances"
        receives = SAYS

    hub = AddressHub(key, silence_s=silence_s)
    try:
        for address in addresses:
            hub.add(address)
    except BaseException:
        hub.close()
        raise
    return hub


def _reach_ranks(config: EngineConfig, opened: contextlib.ExitStack) -> _Reached:
    """This process is rank 0. Raises ConfigError: If the job has other ranks than they take."""
    from fastdecode.wire.mpi.hub import CONTROL_LINE, MpiHub

    job, ranks = join(), InstanceRanks(config.instances.placed)
    ranks.check(job.size)
    leaders = [each.first for each in ranks.stages]
    silence_s = config.cluster.worker_silence_s
    hub: MpiHub[ToInstance, FromInstance]
    hub = MpiHub(job, SAYS, silence_s=silence_s, is_hurried=False)
    opened.callback(hub.close)
    for rank in leaders:
        hub.connect(rank, f"instance rank {rank}", line=CONTROL_LINE)
    return hub, tuple(map(link_address, leaders)), LOADING_TIMEOUT_S, {}


def _make_router(
    spec: ModelSpec,
    hub: InstanceHub,
    names: Sequence[str],
    welcomes: Mapping[int, InstanceWelcome],
) -> Router:
    """Return the router of instances of which at least one has welcomed this controller."""

    def send(number: int, message: ToInstance) -> None:
        hub.connections[number].send(message)

    any_of_them = next(iter(welcomes.values()))
    rooms = [welcomes.get(number, any_of_them) for number in range(len(names))]
    clients = [
        EngineClient(name, partial(send, number), welcomes.get(number), room)
        for number, (name, room) in enumerate(zip(names, rooms, strict=True))
    ]
    return Router(
        clients,
        spec,
        batch_tokens=min(room.batch_tokens for room in rooms),
        block_size=any_of_them.block_size,
    )


def _common(
    config: EngineConfig, wanted: Identity, welcomes: Mapping[int, InstanceWelcome]
) -> Identity:
    """Return what is the same of all instances. Raises ConfigError: If they don't fit together, or
    this process means something else."""
    first, _ = identity_of(next(iter(welcomes.values())))
    if len(set(map(identity_of, welcomes.values()))) > 1:
        told = "; ".join(
            f"{x.name}: {x.dtype.value}, KV {x.kv_dtype.value} in blocks of {x.block_size}, "
            f"{x.max_model_len} tokens"
            for x in welcomes.values()
        )
        raise ConfigError(
            Given("instances"),
            f" name instances that can't go on with each other's requests ({told}): start them "
            "with the same dtype, kv_dtype, block_size and max_model_len",
        )
    if first.max_model_len != wanted.max_model_len:
        raise ConfigError(
            Given("max_model_len", config.s_part.max_model_len),
            f": the instances serve {first.max_model_len} tokens, and this process means "
            f"{wanted.max_model_len}: give the same on both sides",
        )
    given = {"dtype": config.s_part.dtype, "kv_dtype": config.r_part.kv_dtype}
    for name, value in given.items():
        theirs = getattr(first, name)
        if value != "auto" and theirs != getattr(wanted, name):
            raise ConfigError(
                Given(name, value),
                f": the instances run with {theirs.value}: leave it out, or give it to them",
            )
    return first
