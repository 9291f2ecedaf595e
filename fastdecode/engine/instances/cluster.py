"""Instances, wherever they are, as one engine: at addresses, ranks of this MPI job, or
threads of this process. Where they are processes of their own, it needs no torch: the
model is theirs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.delta import Delta
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    Given,
    ProtocolError,
    WorkerError,
    imports_for,
)
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.identity import Identity, identify
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.instances.connections import (
    FromInstance,
    InstanceConnectionHub,
    InstanceConnections,
    Reconnector,
)
from fastdecode.engine.instances.controller import Controller
from fastdecode.engine.instances.remote_engine import RemoteEngine
from fastdecode.engine.replanning.starting import start_replanning
from fastdecode.engine.service import EngineService
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.wire.instances import (
    Deltas,
    InstanceHello,
    InstanceWelcome,
    StatusReport,
)
from fastdecode.wire.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

Post = Callable[[Callable[["RunningCluster"], None]], None]
"""Has something done by the thread that owns the controller, between two of its
steps."""
NO_R_WORKER: Final = "no_r_worker"  # code of why an instance that lives runs nothing
_REACH_S = 20.0
"""For instances that are being started at the same time, and whose models are
loaded."""


class RunningCluster:
    """Connections to instances, and their controller. Close it when done.

    Args:
        config: what the user chose.
        progress: told what is being done, one line at a time.
        times: what is known of step times before the first one.
        post: has what instances say told to the controller.

    Raises:
        ConfigError: an address can't be used, or instances don't fit together.
        ModelError: the model directory is bad.
        WorkerError: no instance is there.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] | None,
        times: MeasuredTimes | None,
        post: Post,
    ) -> None:
        started, tell = time.perf_counter(), progress or logger.info
        self._post = post
        checkpoint = open_checkpoint(config.model, config.s_part.load_format)
        self.spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
        if (prompt_pp := config.s_part.prompt_pp) > self.spec.num_layers:
            raise ConfigError(
                Given("prompt_pp", prompt_pp),
                f": {self.spec.name} has {self.spec.num_layers} layers, and every stage needs one: "
                "choose a prompt_pp that isn't greater",
            )
        self.codec = TextCodec.load(checkpoint.directory, identify(config, self.spec).max_model_len)
        self._lines: InstanceConnections | None = None
        self._replanning = contextlib.ExitStack()
        try:
            hello = InstanceHello(PROTOCOL_VERSION, checkpoint.model_hash)
            self._open(config, hello, tell, times)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def _open(
        self,
        config: EngineConfig,
        hello: InstanceHello,
        tell: Callable[[str], None],
        times: MeasuredTimes | None,
    ) -> None:
        cluster = config.cluster
        self._hub, addresses, finder = _open_hub(config, tell, times)
        try:
            welcomes = self._greet_all(hello, min(_REACH_S, cluster.worker_timeout_s))
            self.identity = _common(config, self.spec, welcomes)
        except BaseException:
            self._hub.close()
            raise
        for number, address in enumerate(addresses):
            found = welcomes.get(number)
            what = "is not connected yet" if found is None else f"{found.name}, {found.role.value}"
            tell(f"instance {address}: {what}")
        absent = [number for number in range(len(addresses)) if number not in welcomes]
        timeout_s = cluster.worker_timeout_s
        self._lines = InstanceConnections(self._hub, hello, absent, self, timeout_s, finder)
        self.engine = ClusterEngine(config, self.spec, addresses, welcomes, self._lines)
        self._lines.start()
        kv = self.spec.kv_spec(self.identity.kv_dtype)
        self._replanning = start_replanning(config, self.engine, kv.token_bytes, tell, self._post)

    def _greet_all(self, hello: InstanceHello, timeout_s: float) -> dict[int, InstanceWelcome]:
        """Of those that are there. Raises WorkerError: none is."""
        welcomes, failed = self._hub.greet_all(hello, timeout_s)
        if not welcomes:
            raise next(iter(failed.values()))
        for number, why in failed.items():
            logger.warning("the job starts without an instance: %s", why.message)
            self._hub.connections[number].close()
        return welcomes

    def heard(self, number: int, message: FromInstance) -> None:
        """See ``ConnectionListener``."""
        if isinstance(message, Deltas):
            self._post(lambda running: running.engine.heard(number, message.deltas))
        elif isinstance(message, StatusReport):
            self._post(lambda running: running.engine.hear_status(number, message))
        else:
            raise ProtocolError(f"an instance sent {type(message).__name__}, unasked")

    def failed(self, error: FastDecodeError) -> None:
        """See ``ConnectionListener``."""
        self._post(lambda running: running.engine.break_down(error))

    def lost(self, number: int, error: FastDecodeError) -> None:
        """See ``ConnectionListener``."""
        self._post(lambda running: running.engine.lose(number, error))

    def came_back(self, number: int, welcome: InstanceWelcome) -> bool:
        """See ``ConnectionListener``."""
        if _identity(welcome) != self.identity:
            return False
        self._post(lambda running: running.engine.find_again(number, welcome))
        return True

    @property
    def welcomes(self) -> tuple[InstanceWelcome, ...]:
        """Of all that have been there."""
        return tuple(each.welcome for each in self.engine.remote if each.welcome is not None)

    @property
    def num_r_workers(self) -> int:
        return sum(welcome.num_r_workers for welcome in self.welcomes)

    @property
    def num_live_r_workers(self) -> int:
        """As far as is known: instances report it now and then, lost ones have none."""
        return sum(each.num_live_r_workers for each in self.engine.remote)

    @property
    def has_hung_r_workers(self) -> bool:
        """Whether any of this process is, and keeps it from ending."""
        return self._hub.has_hung_r_workers

    def close(self) -> None:
        """Say goodbye to the instances, which go on without, or end with this process. Safe
        to call twice.

        Raises:
            WorkerError: an R-worker of this process did not stop in time.
        """
        self._replanning.close()
        if self._lines is not None:
            self._lines.close()
        self.codec.close()


class ClusterEngine(Controller):
    """The controller of instances, as ``LLM`` asks an engine.

    Args:
        config: what the user chose.
        spec: of the model.
        addresses: of the instances, or what else they are called.
        welcomes: of those that are there.
        connections: to them.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        addresses: Sequence[str],
        welcomes: dict[int, InstanceWelcome],
        connections: InstanceConnections,
    ) -> None:
        self._spec = spec
        self._connections = connections
        any_of_them = next(iter(welcomes.values()))
        every = [welcomes.get(number, any_of_them) for number in range(len(addresses))]
        self.remote = [
            RemoteEngine(number, address, connections.post, welcomes.get(number), room)
            for number, (address, room) in enumerate(zip(addresses, every, strict=True))
        ]
        pairs = list(zip(self.remote, every, strict=True))
        super().__init__(
            [instance for instance, welcome in pairs if welcome.role.prefills],
            [instance for instance, welcome in pairs if welcome.role.decodes],
            batch_tokens=min(welcome.batch_tokens for welcome in every),
            block_size=max(welcome.block_size for welcome in every),
        )
        for instance in self.remote:
            if instance.broken is not None:
                self.router.lose(instance)

    def heard(self, number: int, deltas: Sequence[Delta]) -> None:
        """What an instance says of its requests. If any of it can't be true, none of
        it is stored, and the instance is lost."""
        try:
            self._check(self.remote[number], deltas)
        except Exception as error:
            self._give_up(number, error)
        else:
            self.arrived(deltas)

    def _check(self, instance: RemoteEngine, deltas: Sequence[Delta]) -> None:
        """Raises ProtocolError: these can't be true. What is said of requests that
        the instance hasn't got any more counts for nothing."""
        runs = []
        for delta in deltas:
            routed = self.routed_requests.by_run.get(delta.request_id)
            run = None if routed is None else routed.run_of(delta)
            if run is None or run.claims is None:
                continue
            if self.router.where(run) is not instance:
                raise ProtocolError("says something of a request that another instance has")
            run.claims.add(delta, self._spec)
            runs.append(run.claims)
        for claims in runs:
            claims.check_offer()

    def _give_up(self, number: int, error: Exception) -> None:
        """An instance has said what can't be true, or what can't be read."""
        if not isinstance(error, FastDecodeError):
            logger.error("what an instance said can't be read", exc_info=error)
            error = ProtocolError(f"says what can't be read: {type(error).__name__}: {error}")
        self._connections.give_up(number, self.remote[number].turn, error)
        self.lose(number, error)

    def hear_status(self, number: int, status: StatusReport) -> None:
        """An instance's own report. If it can't be true, the instance is lost."""
        instance = self.remote[number]
        try:
            instance.update(status)
        except Exception as error:
            self._give_up(number, error)
            return
        if instance.broken is None and instance.has_no_r_worker != (instance.stranded is not None):
            self._set_stranded(instance, is_stranded=instance.has_no_r_worker)

    def _set_stranded(self, instance: RemoteEngine, *, is_stranded: bool) -> None:
        if is_stranded:
            instance.stranded = WorkerError("no R-worker of it is left", code=NO_R_WORKER)
            self.strand(instance, instance.stranded)
        else:
            logger.warning("instance %s has an R-worker again", instance.name)
            instance.stranded = None
            self.came_back(instance)

    def lose(self, number: int, error: FastDecodeError) -> None:
        """An instance is gone."""
        instance = self.remote[number]
        if instance.broken is None:
            instance.broken = error
            self.has_work = True
            self.lost(instance, error)

    def find_again(self, number: int, welcome: InstanceWelcome) -> None:
        """An instance that was gone is there again."""
        instance = self.remote[number]
        role = self.router.roles[self.router.instances.index(instance)]
        instance.came_back(welcome, role)
        logger.warning("instance %s is there again", instance.name)
        self.came_back(instance)


def service_of_cluster(
    config: EngineConfig, progress: Callable[[str], None] | None, times: MeasuredTimes | None
) -> EngineService[RunningCluster]:
    """Of instances. What each says is posted to the one that controls them."""

    def make() -> RunningCluster:
        return RunningCluster(config, progress, times, service.look)

    service: EngineService[RunningCluster] = EngineService(make)
    return service


def _open_hub(
    config: EngineConfig, tell: Callable[[str], None], times: MeasuredTimes | None
) -> tuple[InstanceConnectionHub, Sequence[str], Reconnector[Any] | None]:
    """Lines to all instances; what they are called; and where lost ones are looked
    for. Raises ConfigError: there can be no such lines."""
    cluster, instances = config.cluster, config.instances
    if instances.roles:
        with imports_for("an S-worker"):
            from fastdecode.engine.instances.local_instances import LocalHub
        local = LocalHub(config, tell, times)
        return local, local.names, None
    if instances.placed:
        from fastdecode.engine.instances.ranks import RankHub
        from fastdecode.wire.mpi.job import join

        ranks = RankHub(join(), instances, cluster.worker_silence_s)
        return ranks, ranks.names, None
    with imports_for("instances at addresses"):
        from fastdecode.engine.instances.addresses import InstanceHub
        from fastdecode.wire.zmq.keys import read_key

    hub = InstanceHub(instances.addresses, read_key(cluster.key), cluster.worker_silence_s)
    return hub, instances.addresses, hub


def _identity(welcome: InstanceWelcome) -> Identity:
    return Identity(welcome.dtype, welcome.kv_dtype, welcome.max_model_len)


def _common(config: EngineConfig, spec: Any, welcomes: dict[int, InstanceWelcome]) -> Identity:
    """What is the same of all. Raises ConfigError: they don't fit together."""
    found = {number: _identity(welcome) for number, welcome in welcomes.items()}
    first = next(iter(found.values()))
    if any(identity != first for identity in found.values()):
        told = "; ".join(
            f"{welcomes[i].name}: {x.dtype.value}, KV {x.kv_dtype.value}, {x.max_model_len} tokens"
            for i, x in found.items()
        )
        raise ConfigError(
            Given("instances"),
            f" name instances that can't go on with each other's requests ({told}): start them "
            "with the same dtype, kv_dtype and max_model_len",
        )
    _check_wanted(config, identify(config, spec), first)
    return first


def _check_wanted(config: EngineConfig, wanted: Identity, first: Identity) -> None:
    """Raises ConfigError: this process means something else than the instances are."""
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
