"""Several engines in this process, of which some run prompts and others go on
with them, as one engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole, Instances
from fastdecode.core.delta import Delta
from fastdecode.core.errors import ConfigError, FastDecodeError, Given
from fastdecode.core.host.machine import available_cores
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.instances.controller import Controller
from fastdecode.engine.instances.local_engine import LocalEngine
from fastdecode.engine.replanning.starting import start_replanning
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.messages import Welcome
from fastdecode.wire.mpi.launcher import launched_size
from rworker.transfers.neighbours import ThreadNeighbours

logger = logging.getLogger(__name__)

Post = Callable[[Callable[["RunningInstances"], None]], None]
"""Has something done by the thread that owns the instances' controller, between
two of its steps."""


class RunningInstances:
    """Instances, and their controller. Close it when done.

    Args:
        config: what the user chose, for all together.
        progress: told what is being done, one line at a time.
        times: what is known of step times before the first one.
        post: has what instances say told to the controller.

    Raises:
        ConfigError, ModelError, CapacityError, WorkerError: as those of a
            single engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] | None,
        times: MeasuredTimes | None,
        post: Post,
    ) -> None:
        tell, started = progress or logger.info, time.perf_counter()
        wanted = config.instances
        if launched_size() is not None:
            raise ConfigError(
                Given("prefill_instances", wanted.prefill_instances),
                " starts instances in one process, and this is one of an MPI job's: start it "
                "without mpirun",
            )
        self._post = post
        self._services: list[EngineService[RunningEngine]] = []
        self.engines: list[LocalEngine] = []
        """All of them; prefill instances come first."""
        self._replanning = contextlib.ExitStack()
        try:
            self._open(_each(config), _roles(wanted), tell, times)
            self.engine = Controller(
                self.engines[: wanted.prefill_instances],
                self.engines[wanted.prefill_instances :],
                batch_tokens=batch_tokens(config),
                block_size=config.r_part.block_size,
            )
            first = self.engines[0].running
            kv = first.spec.kv_spec(first.resolved.kv_dtype)
            self._replanning = start_replanning(config, self.engine, kv.token_bytes, tell, post)
        except BaseException:
            self.close()
            raise
        decode = self.engines[wanted.prefill_instances :]
        self.welcomes: tuple[Welcome, ...] = tuple(
            welcome for each in decode for welcome in each.running.welcomes
        )
        """Of the R-workers of those that decode, whose room is what requests have."""
        self.spec, self.codec, self.resolved = first.spec, first.codec, first.resolved
        self.num_r_workers = sum(each.running.num_r_workers for each in self.engines)
        self.load_s = time.perf_counter() - started

    def _open(
        self,
        configs: dict[str, EngineConfig],
        roles: Sequence[InstanceRole],
        tell: Callable[[str], None],
        times: MeasuredTimes | None,
    ) -> None:
        neighbours = ThreadNeighbours()
        num_threads = max(1, torch.get_num_threads() // len(configs))
        for (name, config), role in zip(configs.items(), roles, strict=True):
            told = partial(_tell_of, tell, name)
            colocation = Colocation(neighbours, name, len(configs), role)
            service = EngineService(partial(_make, config, told, times, colocation, num_threads))
            self._services.append(service)
            self.engines.append(LocalEngine(name, service, service.open(), self._arrived))

    def _arrived(self, deltas: Sequence[Delta]) -> None:
        self._post(lambda running: running.engine.arrived(deltas))

    @property
    def num_live_r_workers(self) -> int:
        return sum(each.running.num_live_r_workers for each in self.engines)

    @property
    def has_hung_r_workers(self) -> bool:
        return any(each.running.has_hung_r_workers for each in self.engines)

    def close(self) -> None:
        """Stop all instances. Safe to call twice.

        Raises:
            WorkerError: an R-worker that wasn't lost did not stop in time.
        """
        failed: list[FastDecodeError] = []
        self._replanning.close()
        for service in self._services:
            service.ask_to_close()
        for service in self._services:
            try:
                service.close()
            except FastDecodeError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def service_of_instances(
    config: EngineConfig, progress: Callable[[str], None] | None, times: MeasuredTimes | None
) -> EngineService[RunningInstances]:
    """Of several engines. What each says is posted to the one that controls them."""

    def make() -> RunningInstances:
        return RunningInstances(config, progress, times, service.look)

    service: EngineService[RunningInstances] = EngineService(make)
    return service


def _make(
    config: EngineConfig,
    tell: Callable[[str], None],
    times: MeasuredTimes | None,
    colocation: Colocation,
    num_threads: int,
) -> RunningEngine:
    """An instance's engine, in the thread that owns it."""
    torch.set_num_threads(num_threads)
    return RunningEngine(config, tell, None, deepcopy(times), colocation=colocation)


def _tell_of(tell: Callable[[str], None], name: str, text: str) -> None:
    tell(f"instance {name}: {text}")


def _names(wanted: Instances) -> Iterable[str]:
    yield from (f"p{index}" for index in range(wanted.prefill_instances))
    yield from (f"d{index}" for index in range(wanted.decode_instances))


def _roles(wanted: Instances) -> list[InstanceRole]:
    prefill = [InstanceRole.PREFILL] * wanted.prefill_instances
    return [*prefill, *[InstanceRole.DECODE] * wanted.decode_instances]


def _each(config: EngineConfig) -> dict[str, EngineConfig]:
    """What each instance is made with: an even share of this host."""
    wanted = config.instances
    own = config
    if config.r_part.kv_placement != "gpu":
        own = with_r_workers_here(config, wanted.number)
        own = replace(own, cluster=replace(config.cluster, transport="inproc"))
    prefill, applies = for_batches(own), wanted.replan == "apply"
    return {
        name: prefill if applies or role is InstanceRole.PREFILL else own
        for name, role in zip(_names(wanted), _roles(wanted), strict=True)
    }


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
