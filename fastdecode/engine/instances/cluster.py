"""Instances as one engine, and the service that runs it. It needs no torch: the model is theirs.

They are processes that this one starts, processes at addresses, or ranks of this MPI job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import ConfigError, Given, WorkerError, imports_for
from fastdecode.core.host.openmp import is_spinning_chosen, spin_longer
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
from fastdecode.engine.instances.replanning import slo_of, start_replanning
from fastdecode.engine.instances.router import Router
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.transport import shares_thread
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.wire.instances import InstanceHello, InstanceSays, InstanceWelcome, ToInstance
from fastdecode.wire.messages import PROTOCOL_VERSION, Failed
from fastdecode.wire.mpi.job import join
from fastdecode.wire.mpi.ranks import InstanceRanks, link_address

if TYPE_CHECKING:
    from fastdecode.wire.mpi.connection import MpiJob
    from fastdecode.wire.zmq.hub import ZmqHub
    from fastdecode.wire.zmq.keys import ClusterKey

logger = logging.getLogger(__name__)

SAYS: Final = frozenset([*get_args(InstanceSays), Failed])
_REACH_S: Final = 20.0
"""For instances that are being started at the same time, and whose models are loaded."""


def make_service(
    config: EngineConfig,
    progress: Callable[[str], None] | None,
    trace: Trace | None,
    times: MeasuredTimes | None,
    session: Session | None,
) -> EngineService:
    """Return the service that runs requests as it was configured. It isn't open yet.

    Args:
        config, progress, trace, times, session: See ``fastdecode.engine.llm.LLM``.

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
        config: What the user chose.
        progress: Called with a line for each step of the start.
        inbox: Of the thread that makes this object.

    Raises:
        ConfigError: If an address can't be used, or instances don't fit together.
        ModelError: If the model directory is bad.
        WorkerError: If no instance answers.
    """

    has_hung_r_workers = False
    """Other processes' R-workers do not keep this one from ending."""

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
            hello = InstanceHello(PROTOCOL_VERSION, checkpoint.model_hash)
            reached = _reach(config, tell, opened)
            welcomes = _greet_all(reached, hello)
            self.identity = _common(config, own, welcomes)
            for number, name in enumerate(reached.names):
                found = welcomes.get(number)
                what = (
                    "is not connected yet" if found is None else f"{found.name}, {found.role.value}"
                )
                tell(f"instance {name}: {what}")
            self.engine = _make_router(self.spec, reached, welcomes)
            timeout_s = config.cluster.worker_timeout_s
            inbox.registry = self._registry = Registry(
                reached.hub, self.engine, hello, identity_of(self.welcomes[0]), timeout_s,
                may_return=reached.may_return,
            )  # fmt: skip
            if config.instances.replan_slo is not None:
                token_bytes = self.spec.kv_spec(self.identity.kv_dtype).token_bytes
                replanner = start_replanning(
                    config.instances.replan_slo, self.engine, token_bytes, tell
                )
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
        """Say goodbye to the instances. Those that this process has started end. Safe to call
        twice."""
        self._opened.close()


class _Reached(NamedTuple):
    """Connections to instances."""

    hub: InstanceHub
    names: Sequence[str]
    patience_s: float = LOADING_TIMEOUT_S
    """For instances to load their models."""
    unreached: Mapping[int, WorkerError] = {}
    may_return: bool = False
    """Lost instances may come back at their addresses."""


def _reach(
    config: EngineConfig, tell: Callable[[str], None], opened: contextlib.ExitStack
) -> _Reached:
    """Connect to all instances. Raises ConfigError: If that can't be done."""
    if config.instances.placed:
        return _reach_ranks(config, opened)
    with imports_for("instances"):
        from fastdecode.engine.instances.spawned import spawn
        from fastdecode.wire.zmq.keys import read_key

    names: Sequence[str] = config.instances.addresses
    addresses, key = names, read_key(config.cluster.key)
    if config.instances.roles:
        names, addresses, key = spawn(config, tell, opened)
    hub = connect(addresses, key, config.cluster.worker_silence_s)
    opened.callback(hub.close)
    reach_s = min(_REACH_S, config.cluster.worker_timeout_s)
    may_return = not config.instances.roles
    return _Reached(hub, names, reach_s, hub.reach(reach_s), may_return)


def connect(addresses: Sequence[str], key: ClusterKey | None, silence_s: float) -> ZmqHub:
    """Return connections to instances at addresses.

    Raises:
        ConfigError: If one is not an address, or needs a key.
    """
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

    job = join()
    leaders = [each.first for each in check_job(config.instances, job).stages]
    silence_s = config.cluster.worker_silence_s
    hub: MpiHub[ToInstance, FromInstance]
    hub = MpiHub(job, SAYS, silence_s=silence_s, is_hurried=False)
    opened.callback(hub.close)
    for rank in leaders:
        hub.connect(rank, f"instance rank {rank}", line=CONTROL_LINE)
    return _Reached(hub, tuple(map(link_address, leaders)))


def check_job(instances: Instances, job: MpiJob) -> InstanceRanks:
    """Return which rank is whose. Raises ConfigError: If they can't be this job's."""
    ranks = InstanceRanks(instances.placed)
    ranks.check(job.size)
    return ranks


def _greet_all(reached: _Reached, hello: InstanceHello) -> dict[int, InstanceWelcome]:
    """Return the welcomes of those that answer. Raises WorkerError: If none does."""
    welcomes, failed = greet(reached.hub, hello, reached.patience_s, reached.unreached)
    if not welcomes:
        raise next(iter(failed.values()))
    for number, why in failed.items():
        logger.warning("the job starts without an instance: %s", why.message)
        reached.hub.connections[number].close()
    return welcomes


def _make_router(
    spec: ModelSpec, reached: _Reached, welcomes: Mapping[int, InstanceWelcome]
) -> Router:
    """Return the router of instances of which at least one has welcomed this controller."""

    def send(number: int, message: ToInstance) -> None:
        reached.hub.connections[number].send(message)

    any_of_them = next(iter(welcomes.values()))
    rooms = [welcomes.get(number, any_of_them) for number in range(len(reached.names))]
    clients = [
        EngineClient(name, partial(send, number), welcomes.get(number), room)
        for number, (name, room) in enumerate(zip(reached.names, rooms, strict=True))
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
    """Return what is the same of all instances.

    Raises:
        ConfigError: If they don't fit together, or this process means something else.
    """
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
