"""Instances that are threads of this process: the controller's end, and theirs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import ConfigError, FastDecodeError, Given, WorkerError
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.instances.connections import FromInstance, greet_together
from fastdecode.engine.instances.instance_server import InstanceServer
from fastdecode.engine.instances.process import (
    for_batches,
    limits_of,
    welcome_of,
    with_r_workers_here,
)
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.instances import InstanceHello, InstanceWelcome, ToInstance
from fastdecode.wire.mpi.ranks import launched_size
from rworker.transfers.neighbours import ThreadNeighbours

CLOSING_S = 60.0  # how long instances may take to stop, all together


class LocalHub(InprocHub[ToInstance, FromInstance]):
    """Of a controller; it makes the instances.

    Args:
        config: what the user chose, for all together.
        tell: told what is being done, one line at a time.
        times: what is known of step times before the first one.

    Raises:
        ConfigError, ModelError, CapacityError, WorkerError: as ``RunningEngine``.
    """

    def __init__(
        self, config: EngineConfig, tell: Callable[[str], None], times: MeasuredTimes | None
    ) -> None:
        super().__init__()
        if launched_size() is not None:
            raise ConfigError(
                Given("instances", config.instances.instances),
                " starts instances in one process, and this is one of an MPI job's: start it "
                "without mpirun",
            )
        self.services: list[EngineService[RunningEngine]] = []
        """Of the instances."""
        self._threads: list[threading.Thread] = []
        configs = _each(config)
        self.names = tuple(configs)
        neighbours = ThreadNeighbours()
        num_threads = max(1, torch.get_num_threads() // len(configs))
        try:
            for (name, own), role in zip(configs.items(), config.instances.roles, strict=True):
                told = partial(_tell_of, tell, name)
                colocation = Colocation(neighbours, name, len(configs), role)
                self._start(partial(_make, own, told, times, colocation, num_threads), colocation)
        except BaseException:
            self.close()
            raise

    def _start(self, make: Callable[[], RunningEngine], colocation: Colocation) -> None:
        service = EngineService(make)
        self.services.append(service)
        running = service.open()
        listener: InprocHub[FromInstance, ToInstance] = InprocHub()
        connect(self, "the controller", listener, f"instance {colocation.name}")
        welcome = welcome_of(running, colocation.name, colocation.role)
        limits = limits_of(running)
        server = InstanceServer(listener, service, running, welcome, limits, only_once=True)
        name = f"instance {colocation.name}"
        thread = threading.Thread(target=_serve, args=(server, listener), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def has_hung_r_workers(self) -> bool:
        """See ``InstanceConnectionHub``."""
        return any(each.snapshot().engine.has_hung_r_workers for each in self.services)

    def give_up(self, number: int) -> None:
        """See ``InstanceConnectionHub``. A thread ends with its process."""
        self.connections[number].close()

    def greet_all(
        self, hello: InstanceHello, timeout_s: float
    ) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
        """See ``InstanceConnectionHub``."""
        return greet_together(self, hello, max(timeout_s, LOADING_TIMEOUT_S))

    def close(self) -> None:
        """Stop all instances, or leave hung ones to the end of the process. Safe to
        call twice.

        Raises:
            WorkerError: an R-worker that wasn't lost did not stop in time.
        """
        super().close()
        end_s = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        failed: list[FastDecodeError] = []
        for service in self.services:
            service.ask_to_close()
        for service in self.services:
            try:
                service.close(max(0.0, end_s - time.monotonic()))
            except FastDecodeError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _serve(server: InstanceServer, listener: InprocHub[FromInstance, ToInstance]) -> None:
    """However it ends, the controller hears of it."""
    try:
        server.run()
    finally:
        listener.close()


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


def _each(config: EngineConfig) -> dict[str, EngineConfig]:
    """What each instance is made with, by its name: an even share of this host."""
    roles, changes = config.instances.roles, config.instances.replan_slo is not None
    numbers = {role: itertools.count() for role in InstanceRole}
    configs: dict[str, EngineConfig] = {}
    for role in roles:
        own = config.of_role(role)
        if not own.r_part.is_on_device:
            own = with_r_workers_here(own, len(roles))
        if changes or role is InstanceRole.PREFILL:
            own = for_batches(own)
        configs[f"{role.value[0]}{next(numbers[role])}"] = own
    return configs
