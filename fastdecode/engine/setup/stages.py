"""Pipeline stages (``--pp``): what those behind the first do, from loading their layers until the
first one lets them go, as threads of its process or as ranks of an MPI job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import torch
from msgspec.structs import replace

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.model.checkpoint import Checkpoint, open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.greeting import greet, limits, offer_for_replicas
from fastdecode.engine.fleet.groups import GroupPool, HolderPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.replacements import SpareHub
from fastdecode.engine.fleet.resharing import greet_members
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.greeting import keepers_of, make_hello
from fastdecode.engine.setup.ranks import meet_ranks
from fastdecode.engine.setup.reach import make_attention, reach_workers
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.engine.setup.s_worker import load_stage, make_s_worker
from fastdecode.engine.setup.workers import Reached, beside_stages, pools_of
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.stages.relay import ColumnRegreeting, HeadsRegreeting, Regreeting, Relay
from fastdecode.engine.stages.steps import LaterStage
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import MAX_LANES, Failed, Hello, Shutdown, Welcome
from fastdecode.wire.mpi.job import join
from fastdecode.wire.stages import FIRST_STAGE, StageHello, StageWelcome, stage_name
from sworker.failures import raise_typed, typed_start
from sworker.ranks.group import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageSetup:
    """What a stage is made of. ``checkpoint``, ``spec`` and ``resolved`` are the whole model's."""

    checkpoint: Checkpoint
    spec: ModelSpec
    resolved: ResolvedConfig
    number: int

    @property
    def name(self) -> str:
        return stage_name(self.number)

    @property
    def own_spec(self) -> ModelSpec:
        return stage_spec(self.spec, self.resolved.layers[self.number])

    def hello(self, num_columns: int) -> StageHello:
        """Return the first stage's greeting."""
        resolved, layers = self.resolved, self.resolved.layers[self.number]
        is_kept = resolved.transport == "local" and resolved.config.r_part.num_replicas > 0
        return StageHello(
            self.checkpoint.model_hash,
            stage=self.number,
            num_columns=num_columns,
            num_lanes=resolved.lanes.most,
            first_layer=layers.start,
            num_layers=len(layers),
            hidden_size=self.spec.hidden_size,
            block_size=resolved.config.r_part.block_size,
            activation_dtype=resolved.activation_dtype,
            kv_dtype=resolved.kv_dtype,
            num_keepers=num_columns if is_kept else 0,
        )

    def run(self, workers: Reached) -> None:
        """Do what a stage behind the first does. Its R-workers have been reached, and are let go
        at the end.

        Raises:
            FastDecodeError: If it can't start or continue. The first stage knows why.
        """
        config, links = self.resolved.config, workers.stages
        assert links is not None
        pool, fleet = pools_of(workers, config)
        with contextlib.ExitStack() as opened:
            opened.callback(links.close)
            opened.callback(lambda: workers.close(pool.gone, config.cluster.worker_timeout_s))
            try:
                self._run(workers, fleet, links, opened)
            except Exception as error:
                failure = error if isinstance(error, FastDecodeError) else None
                if failure is None:
                    logger.exception("%s broke down", self.name)
                    failure = WorkerError(f"{type(error).__name__}: {error}", code="stage_failed")
                try:
                    links.tell(FIRST_STAGE, Failed(self.name, failure.code, failure.message))
                except WorkerError:
                    logger.debug("the first stage has gone before %s", self.name)
                raise failure from None

    def _run(
        self, workers: Reached, fleet: HolderPool, links: StageLinks, opened: contextlib.ExitStack
    ) -> None:
        resolved = self.resolved
        ranks: Ranks | None = None
        with typed_start():
            if resolved.config.s_part.tp > 1:
                ranks = meet_ranks(resolved)
                opened.callback(ranks.close)
            _, model = load_stage(self.checkpoint, resolved, self.number, ranks)
            # In the order in which the other ranks agree (``mirror_leader``).
            greeting = make_hello(self.checkpoint, self.own_spec, resolved, ranks)
            s_worker = make_s_worker(self.spec, model, resolved, ranks)
        asked = _await_hello(self, fleet, links)
        if asked is None:
            return
        session = asked.session or greeting.session
        kept = {"session": session, "outlives": bool(asked.session)}
        greeting = replace(greeting, **kept, reading=asked.reading)
        addresses = () if isinstance(fleet, GroupPool) else workers.addresses
        with typed_start():
            blocks = self._greet(workers, fleet, replace(greeting, resumes=asked.resumes))
            attention = make_attention(workers, fleet, self.own_spec, resolved, s_worker, None)
        links.tell(FIRST_STAGE, StageWelcome(self.number, blocks, session, tuple(addresses)))
        regreeting = self._regreeting(workers, fleet, greeting, blocks)
        is_last = self.number + 1 == len(resolved.layers)
        stage = LaterStage(
            self.number,
            None if is_last else self.number + 1,
            s_worker,
            attention,
            links,
            asked.num_lanes,
            Relay(fleet, links, session, regreeting, addresses),
        )
        try:
            stage.run()
        except Exception as error:
            raise_typed(error)

    def _greet(self, workers: Reached, fleet: HolderPool, hello: Hello) -> tuple[int, ...]:
        """Greet its R-workers. Return the KV blocks that each offers."""
        if isinstance(fleet, GroupPool):
            welcomes = greet_members(fleet, hello)
        else:
            welcomes = greet(fleet, hello)
        if self.resolved.config.r_part.replicas:
            keepers = keepers_of(workers, self.resolved.config)
            welcomes = offer_for_replicas(fleet, hello, welcomes, keepers)
        return tuple(welcomes[i].num_blocks if i in welcomes else 0 for i in fleet.holders)

    def _regreeting(
        self, workers: Reached, fleet: HolderPool, hello: Hello, num_blocks: Seq[int]
    ) -> Regreeting | None:
        """Return what greets R-workers again after a loss, as they were greeted first. None:
        nothing does."""
        cluster = self.resolved.config.cluster
        deadlines = Deadlines(cluster.worker_timeout_s, cluster.worker_silence_s)
        places = workers.places(self.resolved.config, hello, deadlines)
        if isinstance(fleet, GroupPool):
            return HeadsRegreeting(fleet, hello, deadlines, places)
        if places is None:
            return None
        offered = dict(zip(fleet.holders, num_blocks, strict=True))
        most = limits(offered, len(fleet)) if self.resolved.config.r_part.replicas else {}
        return ColumnRegreeting(fleet.members, hello, places, most)


def _await_hello(setup: StageSetup, fleet: HolderPool, links: StageLinks) -> StageHello | None:
    """Wait for the first stage's greeting. Return None if that ends the stage.

    Raises:
        ConfigError: If it expects another stage than this one.
    """
    while not links.heard:
        fleet.receive()
    (_, hello), *rest = links.take_heard()
    if isinstance(hello, Shutdown):
        return None
    expected = setup.hello(len(fleet))
    if (
        not isinstance(hello, StageHello)
        or replace(hello, num_lanes=expected.num_lanes, session=0, resumes=False, reading=0)
        != expected
        or not 1 <= hello.num_lanes <= MAX_LANES
        or rest
    ):
        raise ConfigError(
            f"the first stage wants {hello}, and {setup.name} is {expected}: start all "
            "stages with the same options and the same model"
        )
    return hello


def greet_stages(
    fleet: HolderPool, setups: Seq[StageSetup], hello: Hello
) -> tuple[StageWelcome, ...]:
    """Send the later stages what they are to be, and wait until they are that. Return what they
    have answered.

    Args:
        hello: What the first stage's R-workers were greeted with. R-workers of later
            stages are kept and resumed as these are.

    Raises:
        WorkerError: If one can't.
    """
    assert isinstance(fleet, ColumnPool)
    kept = hello.session if hello.outlives else 0
    same = {"session": kept, "resumes": hello.resumes, "reading": hello.reading}
    hellos = {x.number: replace(x.hello(len(fleet)), **same) for x in setups}
    welcomes = fleet.later.greet(hellos, fleet.receive)
    for stage, welcome in welcomes.items():
        try:
            hellos[stage].check(welcome)
        except ProtocolError as lie:
            raise WorkerError(f"{stage_name(stage)} {lie.message}", code="stage_lost") from None
    return tuple(welcomes[stage] for stage in sorted(welcomes))


def whole_columns(
    welcomes: Mapping[HolderId, Welcome], others: Seq[StageWelcome]
) -> tuple[dict[HolderId, Welcome], list[WorkerError]]:
    """Return columns with an R-worker in every stage, with the KV blocks that all of
    these have; and what is missing of others.

    Args:
        welcomes: Of the first stage's R-workers.
        others: Of later stages.
    """
    there: dict[HolderId, Welcome] = {}
    missing = []
    for column, welcome in welcomes.items():
        missing += [
            WorkerError(f"the R-worker of column {column} of stage {other.stage} is not there")
            for other in others
            if not other.num_blocks[column]
        ]
        least = min([welcome.num_blocks, *(other.num_blocks[column] for other in others)])
        if least:
            there[column] = replace(welcome, num_blocks=least)
    return there, missing


class ThreadStages:
    """The stages behind the first as threads of this process, the first one's
    hub connected to them. They load their layers side by side.

    Args:
        hub: The first stage's; its R-workers are connected.
        num_threads: CPU threads of each S-part.
        beside: Other engines, whose R-workers read from these. None if there are none.
    """

    def __init__(
        self,
        setups: Seq[StageSetup],
        hub: InprocHub[Any, Any],
        num_threads: int,
        beside: Colocation | None = None,
    ) -> None:
        self._timeout_s = setups[0].resolved.config.cluster.worker_timeout_s
        hubs: list[InprocHub[Any, Any]] = [hub, *(InprocHub() for _ in setups)]
        workers = [
            reach_workers(x.resolved, hubs[x.number], beside, x.number, num_threads) for x in setups
        ]
        self.addresses = {
            setup.number: each.addresses for setup, each in zip(setups, workers, strict=True)
        }
        """What R-workers of each stage are called; see ``Reached.addresses``."""
        ends: list[dict[int, Any]] = [{} for _ in hubs]
        pairs = [(0, setup.number) for setup in setups]
        pairs += [(setup.number - 1, setup.number) for setup in setups[1:]]
        for one, other in pairs:
            names = stage_name(one), stage_name(other)
            ends[one][other], ends[other][one] = connect(hubs[one], names[0], hubs[other], names[1])
        self.links = StageLinks(ends[0], is_asked=False)
        """The first stage's."""

        def run(setup: StageSetup, reached: Reached) -> None:
            if setup.resolved.device.type == "cpu":
                torch.set_num_threads(num_threads)
            with contextlib.suppress(FastDecodeError):  # the first stage knows
                setup.run(reached)

        self._threads = []
        for setup, reached in zip(setups, workers, strict=True):
            links = StageLinks(ends[setup.number], is_asked=True)
            own = setup, connected(reached, hubs[setup.number], links)
            thread = threading.Thread(target=run, args=own, name=setup.name, daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let them end, and wait for that. Log those that don't."""
        self.links.shut_down()
        end_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                logger.error("%s has not ended within %g s", thread.name, self._timeout_s)


def connected(workers: Reached, hub: InprocHub[Any, Any], links: StageLinks) -> Reached:
    """Return the R-workers of a stage that is a thread, with the other stages."""
    own = workers.hub.whole if isinstance(workers.hub, SpareHub) else workers.hub
    if own is hub:
        return replaced(workers, stages=links)
    return beside_stages(workers, hub, links, lambda lost, timeout_s: None)


def later_setups(
    checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig
) -> list[StageSetup]:
    """Return the stages behind the first, each on another device where there
    are several in this process."""
    asked = resolved.config.s_part.device
    return [
        StageSetup(checkpoint, spec, replaced(resolved, device=choose_device(asked, n)), n)
        for n in range(1, resolved.config.s_part.pp)
    ]


def serve_stage(
    config: EngineConfig,
    resolve: Callable[[EngineConfig, ModelSpec], ResolvedConfig],
    beside: Colocation | None = None,
) -> bool:
    """Do what those ranks of an MPI job do that lead the stages behind the first,
    until that one lets them go.

    Args:
        beside: Other engines, which read from this stage. None if there are none.

    Returns:
        True if the first stage is alive, which reports how the job ends.

    Raises:
        ConfigError, ModelError: If it can't even reach the others.
    """
    job, checkpoint = join(), open_checkpoint(config.model, config.s_part.load_format)
    spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    resolved = resolve(config, spec)
    setup = StageSetup(checkpoint, spec, resolved, resolved.ranks.stage(job.rank))
    workers = reach_workers(resolved, None, beside, setup.number)
    try:
        setup.run(workers)
    except FastDecodeError as error:
        logger.error("%s ends: %s", setup.name, error)
    return resolved.ranks.first not in job.dead
