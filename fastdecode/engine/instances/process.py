"""An instance that is this process: its engine, its R-workers, and where others
reach them; at an address, or as ranks of an MPI job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import ConfigError, FastDecodeError, Given, WorkerError, imports_for
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.instances.engine_server import RequestLimits
from fastdecode.engine.instances.instance_server import InstanceServer
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.wire.instances import InstanceWelcome, ToInstance
from fastdecode.wire.messages import Failed
from fastdecode.wire.mpi.ranks import S_RANK, RankRole, launched_size, local_rank, local_size
from rworker.transfers.export_server import ExportServers, RankExports

if TYPE_CHECKING:
    from fastdecode.engine.instances.connections import FromInstance
    from fastdecode.wire.mpi.hub import MpiHub
    from fastdecode.wire.mpi.job import MpiJob
    from fastdecode.wire.mpi.ranks import InstanceRanks

_REFUSED = ("prompt_pp", "tp")
"""What there isn't yet with instances."""


@dataclass(frozen=True)
class InstancePlace:
    """What a process that is an instance is told beside its engine's options."""

    role: InstanceRole
    bind: str
    """tcp://HOST:PORT, where controllers connect."""
    export: str | None
    """Where others read what its R-workers offer, if these are threads of this
    process; None: at any free ports of the same host."""
    key: str | None
    """File with the cluster's key."""
    name: str


def serve_instance(
    config: EngineConfig,
    place: InstancePlace,
    tell: Callable[[str], None],
    listening: Callable[[str, InstanceServer], None],
) -> FastDecodeError | None:
    """Be an instance until asked to end, or the engine breaks down: why.

    Args:
        config: of the engine.
        tell: told what is being done, one line at a time.
        listening: told at what address controllers may connect, once all is
            ready; and by what it is asked to end.

    Raises:
        ConfigError, ModelError, CapacityError, WorkerError: as ``RunningEngine``.
    """
    _check(config, place)
    with imports_for("an instance at an address"):
        from fastdecode.engine.instances.addresses import InstanceListener
        from fastdecode.wire.zmq.keys import check_address, read_key

    key = read_key(place.key)
    silence_s = config.cluster.worker_silence_s
    host = place.bind.rpartition(":")[0]
    check_address(place.bind, key, parameter="bind")
    check_address(place.export or f"{host}:*", key, parameter="export")
    is_here = not config.cluster.r_worker_addresses
    own = _own(config, place.role)
    with contextlib.ExitStack() as stack:
        servers = ExportServers(place.export or f"{host}:*", key, silence_s)
        stack.callback(servers.close)
        colocation = Colocation(servers, place.name, 1, place.role) if is_here else None
        make = partial(RunningEngine, own, tell, colocation=colocation, is_instance=True)
        service: EngineService[RunningEngine] = EngineService(make)
        stack.callback(service.close)
        running = service.open()
        service.call(lambda opened: opened.engine.give_role(place.role))
        listener = InstanceListener(place.bind, place.name, key=key, silence_s=silence_s)
        stack.callback(listener.close)
        welcome = welcome_of(running, place.name, place.role)
        serving = InstanceServer(listener, service, running, welcome, limits_of(running))
        listening(listener.address, serving)
        return serving.run()


def serve_instance_rank(config: EngineConfig, tell: Callable[[str], None]) -> bool:
    """Be one of the S-workers of an MPI job's instances, until rank 0 leaves.

    Returns:
        Whether rank 0 is alive, which reports how the job ends.

    Raises:
        ConfigError: the job has other ranks than the instances take.
    """
    from fastdecode.engine.instances.ranks import check_job
    from fastdecode.wire.mpi.job import join

    job = join()
    ranks = check_job(config.instances, job)
    number = ranks.instance_of(job.rank)
    # Peers to say goodbye to, however far this rank gets.
    job.peers.update(set(ranks.s_ranks(number)) - {job.rank}, ranks.r_ranks(number))
    role = config.instances.placed[number].role
    own = _with_role(config.of_instance(number), role)
    if config.instances.replan_slo is not None:  # then any of them may come to run prompts
        own = for_batches(own)
    with contextlib.closing(RankExports(job, own.cluster.worker_silence_s)) as exports:
        colocation = _colocation(own, job, ranks, role, exports)
        if ranks.role(job.rank) is RankRole.LEADER:
            return _lead_instance(own, colocation, job, tell)
        return _follow_leader(own, colocation, job, tell)


def _colocation(
    own: EngineConfig, job: MpiJob, ranks: InstanceRanks, role: InstanceRole, exports: RankExports
) -> Colocation:
    """What an S-worker's rank shares with the others of its host. ``exports``: how others
    reach its device, if it keeps KV there."""
    first = job.rank - local_rank()
    num_here = ranks.num_s_ranks_in(range(first, first + local_size()))
    place = ranks.num_s_ranks_in(range(first, job.rank))
    with contextlib.suppress(ConfigError):  # the engine's start refuses that device
        if choose_device(own.s_part.device, place).type == "cuda":
            num_here = 1  # it has that one to itself
    stages = ranks.stages(ranks.instance_of(job.rank))
    return Colocation(exports, f"rank {job.rank} on {job.host}", num_here, role, place, stages)


def _lead_instance(
    own: EngineConfig, colocation: Colocation, job: MpiJob, tell: Callable[[str], None]
) -> bool:
    """The first S-worker of an instance: it serves the controller. See
    ``serve_instance_rank``."""
    from fastdecode.wire.mpi.hub import CONTROL_LINE, MpiHub
    from fastdecode.wire.mpi.job import wait_for_end

    kinds = frozenset(get_args(ToInstance))
    hub: MpiHub[FromInstance, ToInstance] = MpiHub(job, kinds, gives_signs=True, is_hurried=False)
    hub.connect(S_RANK, "the controller (rank 0)", line=CONTROL_LINE)
    name = colocation.name
    try:
        broken = _serve_controller(own, colocation, hub, tell)
    except FastDecodeError as error:
        broken = error
        with contextlib.suppress(WorkerError):
            hub.connections[0].send(Failed(name, error.code, error.message))
    if broken is not None:
        tell(f"instance {name} ends: {broken}")
    hub.close()
    return wait_for_end(job)


def _serve_controller(
    own: EngineConfig,
    colocation: Colocation,
    hub: MpiHub[FromInstance, ToInstance],
    tell: Callable[[str], None],
) -> FastDecodeError | None:
    """Until the controller is gone, or the engine breaks down: why. Raises
    FastDecodeError: the engine can't be started."""
    service: EngineService[RunningEngine] = EngineService(partial(_make, own, tell, colocation))
    with contextlib.closing(service):
        running = service.open()
        welcome = welcome_of(running, colocation.name, colocation.role)
        limits = limits_of(running)
        return InstanceServer(hub, service, running, welcome, limits, only_once=True).run()


def _follow_leader(
    own: EngineConfig, colocation: Colocation, job: MpiJob, tell: Callable[[str], None]
) -> bool:
    """Another S-worker of an instance: a later stage, or one that acts as one with the
    first of its stage. See ``serve_instance_rank``."""
    from fastdecode.engine.setup.ranks import mirror_leader
    from fastdecode.engine.setup.stages import serve_stage
    from fastdecode.wire.mpi.job import wait_for_end

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
    return wait_for_end(job)  # the other instances continue


def _make(
    config: EngineConfig, tell: Callable[[str], None], colocation: Colocation
) -> RunningEngine:
    """An engine, in the thread that owns it."""
    _share_cores(colocation)
    return RunningEngine(config, tell, colocation=colocation)


def _share_cores(colocation: Colocation) -> None:
    """The S-part of this thread computes beside others of its host."""
    torch.set_num_threads(max(1, torch.get_num_threads() // colocation.num_engines))


def _check(config: EngineConfig, place: InstancePlace) -> None:
    """Raises ConfigError: there is no such instance."""
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


def _own(config: EngineConfig, role: InstanceRole) -> EngineConfig:
    """What the engine of an instance at an address is made with."""
    if config.r_part.is_on_device:
        return _with_role(config, role)
    if not config.cluster.r_worker_addresses:
        return _with_role(with_r_workers_here(config, 1), role)
    return _with_role(replace(config, r_part=replace(config.r_part, kv_placement="r")), role)


def _with_role(config: EngineConfig, role: InstanceRole) -> EngineConfig:
    """With steps that have room for what it is given at first."""
    return for_batches(config) if role is InstanceRole.PREFILL else config


def limits_of(running: RunningEngine) -> RequestLimits:
    """Of any request to an engine."""
    return RequestLimits(running.spec.vocab_size, running.resolved.identity.max_model_len)


def welcome_of(running: RunningEngine, name: str, role: InstanceRole) -> InstanceWelcome:
    """What an instance says of itself."""
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
        batch_tokens(config),
        running.num_r_workers,
        max(welcome.num_threads for welcome in running.welcomes),
    )


def with_r_workers_here(config: EngineConfig, num_engines: int) -> EngineConfig:
    """With KV on R-workers that are threads of this process, which ``num_engines`` share
    evenly."""
    r_part = config.r_part
    of_all = num_engines * r_part.r_workers * config.s_part.pp
    r_threads = r_part.r_threads or max(1, available_cores() // of_all)
    placement = "hybrid" if r_part.kv_placement == "hybrid" else "r"
    return replace(config, r_part=replace(r_part, r_threads=r_threads, kv_placement=placement))


def for_batches(config: EngineConfig) -> EngineConfig:
    """With steps that have room for a batch of prompts, whole."""
    tokens, batching = batch_tokens(config), config.batching
    room = batching.max_num_sequences + tokens
    return replace(config, batching=replace(batching, prefill_chunk=tokens, max_step_tokens=room))


def batch_tokens(config: EngineConfig) -> int:
    """Of prompts that a prefill instance runs at once."""
    batching = config.batching
    return batching.step_tokens - batching.max_num_sequences
