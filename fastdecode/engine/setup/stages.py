"""Pipeline stages (``--pp``): how they are started, and what those behind the
first do, from loading their layers until the first one lets them go."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.model.checkpoint import Checkpoint, open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.replicas import new_session
from fastdecode.engine.fleet.workers import Reached, beside_stages, reach_inline, reach_threads
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.ranks import device_number, meet_ranks
from fastdecode.engine.setup.reach import (
    make_attention,
    make_hello,
    openmp_of,
    reach_own_device,
    reach_stage,
    reach_stage_addresses,
)
from fastdecode.engine.setup.replicas import begin_stage_replicas
from fastdecode.engine.setup.resolve import ResolvedConfig, resolve_for_this_host
from fastdecode.engine.setup.s_worker import make_s_worker
from fastdecode.engine.stages.later_stage import LaterStage
from fastdecode.engine.stages.links import StageLinks
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import MAX_LANES, PROTOCOL_VERSION, Failed, Shutdown, Welcome
from fastdecode.wire.mpi import joining
from fastdecode.wire.mpi.roles import StageRanks
from fastdecode.wire.stages import StageHello, StageWelcome
from sworker.dtypes import torch_dtype
from sworker.failures import typed_failures, typed_start
from sworker.load.weights import load_model
from sworker.model.skeleton import Model
from sworker.ranks.group import Ranks

logger = logging.getLogger(__name__)

_FIRST = 0


@dataclass(frozen=True)
class StageSetup:
    """What a stage is made of.

    Args:
        checkpoint: of the whole model.
        spec: the whole model's.
        resolved: what was decided for all stages.
        number: which stage it is.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    resolved: ResolvedConfig
    number: int

    @property
    def layers(self) -> range:
        return self.resolved.layers[self.number]

    @property
    def own_spec(self) -> ModelSpec:
        """Of its layers."""
        return stage_spec(self.spec, self.layers)

    def hello(self, num_columns: int) -> StageHello:
        """What the first stage tells it to be."""
        return StageHello(
            PROTOCOL_VERSION,
            self.checkpoint.model_hash,
            stage=self.number,
            num_columns=num_columns,
            num_lanes=self.resolved.most_lanes,
            first_layer=self.layers.start,
            num_layers=len(self.layers),
            hidden_size=self.spec.hidden_size,
            block_size=self.resolved.config.r_part.block_size,
            activation_dtype=self.resolved.dtype,
            kv_dtype=self.resolved.kv_dtype,
        )

    def run(self, workers: Reached, links: StageLinks) -> None:
        """What a stage behind the first does. Its R-workers have been reached,
        and are let go at the end.

        Raises:
            FastDecodeError: it can't start, or can't go on; the first stage has
                been told.
        """
        cluster = self.resolved.config.cluster
        timeout_s, silence_s = cluster.worker_timeout_s, cluster.worker_silence_s
        fleet = Fleet(workers.hub, timeout_s, silence_s, stages=links)
        ranks: list[Ranks] = []
        try:
            self._run(workers, fleet, links, ranks)
        except FastDecodeError as error:
            _tell_failure(links, self.number, error)
            raise
        except Exception as error:
            logger.exception("stage %d broke down", self.number)
            failure = WorkerError(f"{type(error).__name__}: {error}", code="stage_failed")
            _tell_failure(links, self.number, failure)
            raise failure from None
        finally:
            for met in ranks:
                met.close()
            workers.close(fleet.gone, timeout_s)
            links.close()

    def _run(self, workers: Reached, fleet: Fleet, links: StageLinks, met: list[Ranks]) -> None:
        """``met`` gets the S-workers that act as one with this one, if there are any."""
        resolved = self.resolved
        with typed_start():
            if resolved.config.s_part.tp > 1:
                patience_s = resolved.config.cluster.worker_timeout_s
                met.append(meet_ranks(resolved.config.s_part, resolved.device, patience_s))
            ranks = met[0] if met else None
            model = self._load_model(ranks)
            hello = make_hello(self.checkpoint, self.own_spec, resolved)
            if resolved.config.r_part.replicas:
                hello = replace(hello, session=new_session())
            welcomes = greet(fleet, hello)
            replicas = None
            if resolved.config.r_part.replicas:
                welcomes, replicas = begin_stage_replicas(
                    fleet, hello, welcomes, workers, resolved.config.cluster
                )
            s_worker = make_s_worker(self.spec, model, resolved, ranks)
            attention = make_attention(workers, fleet, self.own_spec, resolved, s_worker, None)
        asked = _introduce(self, fleet, links, welcomes)
        if asked is None:
            return
        stage = LaterStage(
            self.number,
            len(resolved.layers),
            s_worker,
            attention,
            links,
            asked.num_lanes,
            replicas,
        )
        with typed_failures():
            stage.run()

    def _load_model(self, ranks: Ranks | None) -> Model:
        """Its layers; of several S-workers that act as one, this one's share."""
        resolved = self.resolved
        return load_model(
            self.checkpoint,
            device=resolved.device if ranks is None else ranks.device,
            dtype=torch_dtype(resolved.dtype),
            max_model_len=resolved.config.s_part.max_model_len,
            shard=None if ranks is None else ranks.shard,
            layers=self.layers,
            with_embedding=False,
            with_head=False,
        )[1]


def _introduce(
    setup: StageSetup, fleet: Fleet, links: StageLinks, welcomes: dict[HolderId, Welcome]
) -> StageHello | None:
    """Wait for the first stage's greeting, and answer. None: it lets go.

    Raises:
        ConfigError: it expects another stage than this one.
    """
    while not links.has_heard:
        fleet.receive()
    (_, hello), *rest = links.take_heard()
    if isinstance(hello, Shutdown):
        return None
    expected = setup.hello(len(fleet))
    if (
        not isinstance(hello, StageHello)
        or replace(hello, num_lanes=expected.num_lanes) != expected
        or not 1 <= hello.num_lanes <= MAX_LANES
        or rest
    ):
        raise ConfigError(
            f"the first stage wants {hello}, and stage {setup.number} is {expected}: start all "
            "stages with the same options and the same model"
        )
    blocks = [welcomes[i].num_blocks if i in welcomes else 0 for i in _holders(fleet)]
    links.tell(_FIRST, StageWelcome(setup.number, tuple(blocks)))
    return hello


def greet_stages(
    fleet: Fleet, links: StageLinks, setups: Seq[StageSetup]
) -> tuple[StageWelcome, ...]:
    """Tell the later stages what they are to be, and wait until they are that.

    Raises:
        WorkerError: one can't.
    """
    later = fleet.later
    assert later is not None
    hellos = {setup.number: setup.hello(len(fleet)) for setup in setups}
    with links.owed.patient():
        later.greet(hellos)
        while (welcomes := later.welcomes) is None:
            fleet.receive()
    for stage, welcome in welcomes.items():
        try:
            hellos[stage].check(welcome)
        except ProtocolError as lie:
            raise WorkerError(f"stage {stage} {lie.message}", code="stage_lost") from None
    return tuple(welcomes.values())


def _holders(fleet: Fleet) -> list[HolderId]:
    return [HolderId(i) for i in range(len(fleet))]


@dataclass(frozen=True)
class StageThread:
    """A stage behind the first, as a thread of this process."""

    setup: StageSetup
    workers: Reached
    links: StageLinks
    num_threads: int
    """Of its S-part on a CPU."""

    def __call__(self) -> None:
        if self.setup.resolved.device.type == "cpu":
            torch.set_num_threads(self.num_threads)
        with contextlib.suppress(FastDecodeError):  # the first stage has been told
            self.setup.run(self.workers, self.links)


def serve_stage(config: EngineConfig) -> bool:
    """What those ranks of an MPI job do that lead the stages behind the first,
    until rank 0 lets them go.

    Returns:
        Whether rank 0 can say what becomes of the job; False: it has died.

    Raises:
        ConfigError, ModelError: it can't even reach the others.
    """
    job = joining.join()
    checkpoint = open_checkpoint(config.model)
    spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    resolved = resolve_for_this_host(config, spec, rank=device_number(config.s_part))
    number = StageRanks(config.s_part.pp, config.s_part.tp).stage(job.rank)
    setup = StageSetup(checkpoint, spec, resolved, number)
    workers = reach_stage(resolved, number)
    assert workers.stages is not None
    try:
        setup.run(workers, workers.stages)
    except FastDecodeError as error:
        logger.error("stage %d ends: %s", number, error)
    return _FIRST not in job.dead


def _tell_failure(links: StageLinks, number: int, error: FastDecodeError) -> None:
    try:
        links.tell(_FIRST, Failed(f"stage {number}", error.code, error.message))
    except WorkerError:
        logger.debug("the first stage has gone before stage %d", number)


class ThreadStages:
    """The stages behind the first as threads of this process, the first one's
    hub connected to them. They load their layers at once.

    Args:
        setups: of those stages.
        hub: the first stage's; its R-workers are connected.
        num_threads: CPU threads of each S-part.
    """

    def __init__(self, setups: Seq[StageSetup], hub: InprocHub[Any, Any], num_threads: int) -> None:
        self._timeout_s = setups[0].resolved.config.cluster.worker_timeout_s
        hubs: list[InprocHub[Any, Any]] = [hub, *(InprocHub() for _ in setups)]
        workers = [_reach_own(setup, hubs[setup.number], num_threads) for setup in setups]
        ends: list[dict[int, Any]] = [{} for _ in hubs]
        pairs = [(0, setup.number) for setup in setups]
        pairs += [(setup.number - 1, setup.number) for setup in setups if setup.number > 1]
        for one, other in pairs:
            names = _name(one), _name(other)
            ends[one][other], ends[other][one] = connect(hubs[one], names[0], hubs[other], names[1])
        self.links = StageLinks(ends[0], is_asked=False)
        """The first stage's."""
        links = [StageLinks(each, is_asked=True) for each in ends]
        self._threads = [
            threading.Thread(
                target=StageThread(
                    setup,
                    connected(reached, hubs[setup.number], links[setup.number]),
                    links[setup.number],
                    num_threads,
                ),
                name=f"stage-{setup.number}",
                daemon=True,
            )
            for setup, reached in zip(setups, workers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let them end, and wait for that; it is said of one that doesn't."""
        self.links.shut_down()
        end_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                logger.error("%s has not ended within %g s", thread.name, self._timeout_s)


def connected(workers: Reached, hub: InprocHub[Any, Any], links: StageLinks) -> Reached:
    """The R-workers of a stage that is a thread, and the other stages."""
    if workers.hub is hub:
        return replace(workers, stages=links)
    return beside_stages(workers, hub, links, lambda lost, timeout_s: None)


def later_setups(
    checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig
) -> list[StageSetup]:
    """Of the stages behind the first in this process, each on a device of its
    own where there are several."""
    asked = resolved.config.s_part.device
    return [
        StageSetup(checkpoint, spec, replace(resolved, device=choose_device(asked, number)), number)
        for number in range(1, len(resolved.layers))
    ]


def _reach_own(setup: StageSetup, hub: InprocHub[Any, Any], num_threads: int) -> Reached:
    """The R-workers of a stage that is a thread, and whose S-part has so many."""
    resolved = setup.resolved
    if resolved.transport == "local":
        return reach_own_device(resolved)
    if resolved.transport == "zmq":
        return reach_stage_addresses(resolved, setup.number)
    if resolved.transport == "inline":
        return reach_inline(
            kv_bytes=resolved.kv_bytes,
            num_threads=resolved.r_threads,
            openmp_library=openmp_of(resolved, num_threads),
            stage=setup.number,
        )
    return reach_threads(
        resolved.config.r_part.r_workers,
        kv_bytes=resolved.kv_bytes,
        num_threads=resolved.r_threads,
        hub=hub,
        stage=setup.number,
    )


def _name(number: int) -> str:
    return f"stage {number}" if number else "the first stage"


def about_layers(layers: Seq[range]) -> str:
    """Which stage has which, for people."""
    parts = [f"{each.start}-{each.stop - 1}" for each in layers]
    return f"{len(layers)} stages, layers {', '.join(parts)}"
