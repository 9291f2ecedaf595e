"""An instance that is this process: its engine, its R-workers, and how others reach them. At an
address, started by its controller, or as ranks of an MPI job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import ConfigError, FastDecodeError, Given, WorkerError, imports_for
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.instances.registry import FromInstance
from fastdecode.engine.instances.server import InstanceServer
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.wire.instances import InstanceWelcome, ToInstance
from fastdecode.wire.messages import Failed
from fastdecode.wire.ranks import (
    S_RANK,
    InstanceRanks,
    RankRole,
    launched_size,
    local_rank,
    local_size,
)
from fastdecode.wire.traits import Role
from rworker.transfers.export_server import ExportServers, RankExports

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiJob
    from fastdecode.wire.zmq.hub import ZmqListener
    from fastdecode.wire.zmq.keys import ClusterKey

logger = logging.getLogger(__name__)

_REFUSED: Final = ("prompt_pp", "tp")
"""Options that instances at addresses do not have yet."""

Tell = Callable[[str], None]
Listening = Callable[[str, InstanceServer], None]


@dataclass(frozen=True)
class InstancePlace:
    """Options of an instance beside its engine's."""

    role: InstanceRole
    bind: str  # tcp://HOST:PORT, where controllers connect
    export: str | None
    """Where others read the R-workers of this process. None for any free ports of the same host."""
    key: str | None  # file with the cluster's key
    name: str


def serve_instance(
    config: EngineConfig, place: InstancePlace, tell: Tell, listening: Listening
) -> FastDecodeError | None:
    """Be an instance at an address until asked to end.

    Args:
        tell: Called with a line for each step of the start.
        listening: Called once all is ready, with the address for controllers, and the server that
            can be asked to end.

    Returns:
        Why the engine broke down, or None if it was asked to end.
    """
    _check(config, place)
    with imports_for("an instance at an address"):
        from fastdecode.wire.zmq.keys import check_address, read_key

    key = read_key(place.key)
    export = place.export or f"{place.bind.rpartition(':')[0]}:*"
    check_address(place.bind, key, parameter="bind")
    check_address(export, key, parameter="export")
    config = _placed(config, 1, runs_batches=place.role is InstanceRole.PREFILL)
    return _serve(config, replace(place, export=export), key, 1, tell, listening)


def serve_spawned() -> None:
    """Be an instance that another process has started, until its connection ends.

    That process sends what is asked to stdin. It reads lines of JSON from stdout: each step of the
    start, and then the address, or why there is none.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # for what else is printed
        _serve_asked(json.load(sys.stdin), answers)


def _serve_asked(asked: Mapping[str, Any], answers: Any) -> None:
    import zmq

    from fastdecode.engine.instances.cluster import failure_of
    from fastdecode.wire.zmq.keys import ClusterKey

    def say(**said: Any) -> None:
        print(json.dumps(said, default=str), file=answers, flush=True)

    def tell(line: str) -> None:
        if not answers.closed:
            say(line=line)

    def listening(address: str, server: InstanceServer) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: server.end())
        say(address=address)
        answers.close()

    given, num_instances = asked["options"], asked["num_instances"]
    secret = asked["key"].encode()
    key = ClusterKey(zmq.curve_public(secret), secret)
    place = InstancePlace(
        InstanceRole(asked["role"]), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", None, asked["name"]
    )
    try:
        given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        config = EngineConfig.of(asked["model"], **given)
        config = _placed(config, num_instances, runs_batches=asked["runs_batches"])
        broken = _serve(config, place, key, num_instances, tell, listening)
    except FastDecodeError as error:
        if answers.closed:
            raise
        say(error=failure_of(error))
    else:
        if broken is not None:
            logger.error("instance %s ends: %s", place.name, broken)


def listen(address: str, name: str, key: ClusterKey | None, silence_s: float) -> ZmqListener:
    """Return where a controller connects."""
    from fastdecode.wire.zmq.hub import ZmqListener

    class InstanceListener(ZmqListener):
        receives = frozenset(get_args(ToInstance))

    most = {Role.CONTROLLER: 1}
    return InstanceListener(address, name, key=key, silence_s=silence_s, most_peers=most)


def _serve(
    config: EngineConfig,
    place: InstancePlace,
    key: ClusterKey | None,
    num_here: int,
    tell: Tell,
    listening: Listening,
) -> FastDecodeError | None:
    """Be an instance at an address, one of ``num_here`` that share this host. See
    ``serve_instance``."""
    silence_s = config.cluster.worker_silence_s
    with contextlib.ExitStack() as stack:
        assert place.export is not None
        servers = ExportServers(place.export, key, silence_s)
        stack.callback(servers.close)
        colocation = Colocation(servers, place.name, num_here, place.role)
        is_here = not config.cluster.r_worker_addresses
        make = partial(_make, config, tell, colocation if is_here else None)
        service: EngineService = EngineService(make)
        stack.callback(service.close)
        welcome = _welcome_of(service.open(), place.name, place.role)
        listener = listen(place.bind, place.name, key, silence_s)
        stack.callback(listener.close)
        server = InstanceServer(listener, service, welcome)
        listening(listener.address, server)
        return server.run()


def serve_instance_rank(config: EngineConfig, tell: Tell) -> bool:
    """Be one of the S-workers of an MPI job's instances, until rank 0 leaves.

    Returns:
        True if rank 0 is alive, which reports how the job ends.

    Raises:
        ConfigError: If the job has other ranks than the instances take.
    """
    from fastdecode.wire.mpi.job import join

    job = join()
    ranks = InstanceRanks(config.instances.placed)
    ranks.check(job.size)
    number = ranks.instance_of(job.rank)
    stages = ranks.stages[number]
    job.peers.update(range(stages.first, stages.end))  # however far this rank gets
    role, own = config.instances.placed[number].role, config.of_instance(number)
    if role is InstanceRole.PREFILL or config.instances.replan_slo is not None:
        own = _for_batches(own)
    with contextlib.closing(RankExports(job, own.cluster.worker_silence_s)) as exports:
        colocation = _colocation(own, job, ranks, role, exports)
        if ranks.role(job.rank) is RankRole.LEADER:
            return _lead_instance(own, colocation, job, tell)
        return _follow_leader(own, colocation, job, tell)


def _colocation(
    own: EngineConfig, job: MpiJob, ranks: InstanceRanks, role: InstanceRole, exports: RankExports
) -> Colocation:
    """Return what an S-worker's rank shares with the others of its host. ``exports``: how others
    reach its device, if it keeps KV there."""
    first = job.rank - local_rank()
    num_here = ranks.num_s_ranks_in(range(first, first + local_size()))
    place = ranks.num_s_ranks_in(range(first, job.rank))
    with contextlib.suppress(ConfigError):  # the engine's start refuses that device
        if choose_device(own.s_part.device, place).type == "cuda":
            num_here = 1  # it has that one to itself
    stages = ranks.stages[ranks.instance_of(job.rank)]
    return Colocation(exports, f"rank {job.rank} on {job.host}", num_here, role, place, stages)


def _lead_instance(own: EngineConfig, colocation: Colocation, job: MpiJob, tell: Tell) -> bool:
    """Be the first S-worker of an instance, which serves the controller. See
    ``serve_instance_rank``."""
    from fastdecode.wire.mpi.hub import CONTROL_LINE, MpiHub

    kinds, name = frozenset(get_args(ToInstance)), colocation.name
    hub: MpiHub[FromInstance, ToInstance] = MpiHub(job, kinds, is_hurried=False)
    hub.connect(S_RANK, "the controller (rank 0)", line=CONTROL_LINE)
    service: EngineService = EngineService(partial(_make, own, tell, colocation))
    try:
        with contextlib.closing(service):
            welcome = _welcome_of(service.open(), name, colocation.role)
            broken = InstanceServer(hub, service, welcome, only_once=True).run()
    except FastDecodeError as error:
        broken = error
        with contextlib.suppress(WorkerError):
            hub.connections[0].send(Failed(name, error.code, error.message))
    if broken is not None:
        tell(f"instance {name} ends: {broken}")
    hub.close()
    return job.wait_for_end()


def _follow_leader(own: EngineConfig, colocation: Colocation, job: MpiJob, tell: Tell) -> bool:
    """Be another S-worker of an instance: a later stage, or one that acts as one with the first
    of its stage. See ``serve_instance_rank``."""
    from fastdecode.engine.setup.ranks import mirror_leader
    from fastdecode.engine.setup.stages import serve_stage

    assert colocation.ranks is not None
    _share_cores(colocation)
    resolve = partial(resolve_for_this_host, beside=colocation)
    try:
        if colocation.ranks.role(job.rank) is RankRole.MIRROR:
            mirror_leader(own, resolve)
        else:
            serve_stage(own, resolve, colocation)
    except FastDecodeError as error:
        tell(f"S-worker {colocation.name} of an instance ends: {error}")
    return job.wait_for_end()  # the other instances continue


def _make(config: EngineConfig, tell: Tell, colocation: Colocation | None) -> RunningEngine:
    """Return an engine, in the thread that owns it."""
    if colocation is not None:
        _share_cores(colocation)
    return RunningEngine(config, tell, colocation=colocation, is_instance=True)


def _share_cores(colocation: Colocation) -> None:
    """Let the S-part of this thread compute beside others of its host."""
    torch.set_num_threads(max(1, torch.get_num_threads() // colocation.num_engines))


def _check(config: EngineConfig, place: InstancePlace) -> None:
    """Raise ConfigError if an instance at an address can't have these options."""
    if launched_size() is not None:
        raise ConfigError("an instance is a process by itself: start it without mpirun")
    if config.instances.instances:
        raise ConfigError("an instance has no instances: leave out those options")
    config.check_reached()
    usual = EngineConfig(config.model).options
    for name in _REFUSED:
        if config.options[name] != usual[name]:
            raise ConfigError(
                Given(name, config.options[name]),
                " is not supported by an instance yet. Remove it",
            )
    if config.r_part.kv_placement == "hybrid" and config.cluster.r_worker_addresses:
        raise ConfigError(
            Given("kv_placement", config.r_part.kv_placement),
            " of an instance is not supported with R-workers at addresses yet: other instances "
            "cannot reach its device. Remove ",
            Given("r_worker_addresses"),
        )
    if config.cluster.r_worker_addresses and place.export is not None:
        raise ConfigError(
            Given("export", place.export),
            " is for R-workers of this process; those at addresses are read there: leave it out",
        )


def _welcome_of(running: RunningEngine, name: str, role: InstanceRole) -> InstanceWelcome:
    """Return an instance's welcome."""
    identity, config = running.resolved.identity, running.resolved.config
    num_blocks = sum(each.num_blocks for each in running.welcomes)
    return InstanceWelcome(
        name,
        role,
        open_checkpoint(config.model, config.s_part.load_format).model_hash,
        identity.dtype,
        identity.kv_dtype,
        identity.max_model_len,
        num_blocks * config.r_part.block_size,
        config.r_part.block_size,
        config.batching.max_num_sequences,
        _batch_tokens(config),
        running.num_r_workers,
        max(welcome.num_threads for welcome in running.welcomes),
    )


def _placed(config: EngineConfig, num_engines: int, *, runs_batches: bool) -> EngineConfig:
    """Return the options of one of ``num_engines`` instances that share this host evenly. KV beside
    its device is on R-workers: those at addresses, or threads of this process."""
    r_part = config.r_part
    if not r_part.is_on_device:
        placement = "hybrid" if r_part.kv_placement == "hybrid" else "r"
        r_threads = r_part.r_threads
        if not config.cluster.r_worker_addresses:
            of_all = num_engines * r_part.r_workers * config.s_part.pp
            r_threads = r_threads or max(1, available_cores() // of_all)
        r_part = replace(r_part, r_threads=r_threads, kv_placement=placement)
        config = replace(config, r_part=r_part)
    return _for_batches(config) if runs_batches else config


def _for_batches(config: EngineConfig) -> EngineConfig:
    """Return options with steps that have room for a batch of prompts, whole."""
    tokens, batching = _batch_tokens(config), config.batching
    room = batching.max_num_sequences + tokens
    return replace(config, batching=replace(batching, prefill_chunk=tokens, max_step_tokens=room))


def _batch_tokens(config: EngineConfig) -> int:
    """Return the prompt tokens that a prefill instance runs at once."""
    batching = config.batching
    return batching.step_tokens - batching.max_num_sequences
