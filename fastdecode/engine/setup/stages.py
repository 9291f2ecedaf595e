"""Pipeline stages (``--pp``): how they are started, and what those behind the
first do, from loading their layers until the first one lets them go."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from msgspec.structs import replace

from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.groups import GroupPool, HolderPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.replicas import limits, offer_for_replicas
from fastdecode.engine.fleet.resharing import greet_members, in_heads
from fastdecode.engine.setup.ranks import meet_ranks
from fastdecode.engine.setup.reach import (
    agreed_hello,
    make_attention,
    make_hello,
)
from fastdecode.engine.setup.replicas import keepers_of
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.engine.setup.s_worker import make_s_worker
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.stages.later_stage import LaterStage
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.pool import ColumnPool, StagePool
from fastdecode.engine.stages.relay import (
    ColumnRegreeting,
    HeadsRegreeting,
    Regreeting,
    Relay,
)
from fastdecode.engine.step.lane_step import Attention
from fastdecode.wire.messages import (
    MAX_LANES,
    PROTOCOL_VERSION,
    Failed,
    Hello,
    Shutdown,
    Welcome,
)
from fastdecode.wire.stages import FIRST_STAGE, StageHello, StageWelcome, stage_name
from sworker.dtypes import torch_dtype
from sworker.failures import raise_typed, typed_start
from sworker.load.weights import load_model
from sworker.model.skeleton import Model
from sworker.ranks.group import Ranks
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


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
    def before(self) -> int:
        """The stage that passes steps on to it."""
        return self.number - 1

    @property
    def behind(self) -> int | None:
        """The stage that it passes them on to; None: home, as the last one."""
        return self.number + 1 if self.number + 1 < len(self.resolved.layers) else None

    @property
    def name(self) -> str:
        """For people."""
        return stage_name(self.number)

    @property
    def own_spec(self) -> ModelSpec:
        """Of its layers."""
        return stage_spec(self.spec, self.layers)

    def hello(self, num_columns: int) -> StageHello:
        """What the first stage tells it to be."""
        is_device = self.resolved.transport == "local"
        is_kept = is_device and self.resolved.config.r_part.num_replicas > 0
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
            activation_dtype=self.resolved.activation_dtype,
            kv_dtype=self.resolved.kv_dtype,
            num_keepers=num_columns if is_kept else 0,
        )

    def run(self, workers: Reached, links: StageLinks) -> None:
        """What a stage behind the first does. Its R-workers have been reached,
        and are let go at the end.

        Raises:
            FastDecodeError: it can't start, or can't go on; the first stage has
                been told.
        """
        fleet = self.make_pool(workers, links)
        ranks: list[Ranks] = []
        try:
            self._run(workers, fleet, links, ranks)
        except FastDecodeError as error:
            _tell_failure(links, self.name, error)
            raise
        except Exception as error:
            logger.exception("%s broke down", self.name)
            failure = WorkerError(f"{type(error).__name__}: {error}", code="stage_failed")
            _tell_failure(links, self.name, failure)
            raise failure from None
        finally:
            for met in ranks:
                met.close()
            workers.close(fleet.gone, self.resolved.config.cluster.worker_timeout_s)
            links.close()

    def make_pool(self, workers: Reached, links: StageLinks) -> HolderPool:
        """Of its R-workers."""
        cluster = self.resolved.config.cluster
        timeouts = cluster.worker_timeout_s, cluster.worker_silence_s
        shares_heads = self.resolved.config.r_part.r_partition == "heads"
        num_columns = 1 if shares_heads else None
        pool = StagePool(
            workers.hub,
            *timeouts,
            stages=links,
            num_columns=num_columns,
            num_keepers=len(workers.keepers),
        )
        return in_heads(pool) if shares_heads else pool

    def _run(
        self, workers: Reached, fleet: HolderPool, links: StageLinks, met: list[Ranks]
    ) -> None:
        """``met`` gets the S-workers that act as one with this one, if there are any."""
        resolved = self.resolved
        with typed_start():
            if resolved.config.s_part.tp > 1:
                met.append(meet_ranks(resolved))
            ranks = met[0] if met else None
            s_worker = make_s_worker(self.spec, self._load_model(ranks), resolved, ranks)
            greeting = self.make_greeting(ranks)
        asked = _await_hello(self, fleet, links)
        if asked is None:
            return
        session = asked.session or greeting.session
        greeting = replace(greeting, session=session, outlives=bool(asked.session))
        with typed_start():
            welcome = self.greet(workers, fleet, replace(greeting, resumes=asked.resumes))
            attention = self.make_attention(workers, fleet, s_worker)
        links.tell(FIRST_STAGE, welcome)
        stage = LaterStage(
            self.number,
            self.before,
            self.behind,
            s_worker,
            attention,
            links,
            asked.num_lanes,
            self.make_relay(workers, fleet, links, greeting, asked, welcome.num_blocks),
        )
        try:
            stage.run()
        except Exception as error:
            raise_typed(error)

    def _regreeting(
        self, workers: Reached, fleet: HolderPool, hello: Hello, num_blocks: Seq[int]
    ) -> Regreeting | None:
        """What greets R-workers again after a loss, as they were greeted first; None:
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

    def make_greeting(self, ranks: Ranks | None) -> Hello:
        """What it greets its R-workers with, now and after a loss; in another session, if
        the first stage asks for that."""
        hello = make_hello(self.checkpoint, self.own_spec, self.resolved)
        return agreed_hello(hello, self.resolved, ranks)

    def greet(self, workers: Reached, fleet: HolderPool, hello: Hello) -> StageWelcome:
        """Greet its R-workers. What the first stage is to know of them."""
        resolved = self.resolved
        addresses = tuple(workers.addresses)
        if isinstance(fleet, GroupPool):
            welcomes, addresses = greet_members(fleet, hello), ()
        else:
            welcomes = greet(fleet, hello)
        if resolved.config.r_part.replicas:
            keepers = keepers_of(workers, resolved.config)
            welcomes = offer_for_replicas(fleet, hello, welcomes, keepers)
        blocks = [welcomes[i].num_blocks if i in welcomes else 0 for i in fleet.holders]
        return StageWelcome(self.number, tuple(blocks), hello.session, addresses)

    def make_attention(self, workers: Reached, fleet: HolderPool, s_worker: SWorker) -> Attention:
        """On its R-workers."""
        return make_attention(workers, fleet, self.own_spec, self.resolved, s_worker, None)

    def make_relay(
        self,
        workers: Reached,
        fleet: HolderPool,
        links: StageLinks,
        greeting: Hello,
        asked: StageHello,
        num_blocks: Seq[int],
    ) -> Relay:
        """Between the first stage, which sent ``asked``, and its R-workers, which offered
        so many KV blocks."""
        regreeting = self._regreeting(workers, fleet, greeting, num_blocks)
        addresses = () if isinstance(fleet, GroupPool) else workers.addresses
        return Relay(fleet, links, greeting.session, regreeting, addresses)

    def _load_model(self, ranks: Ranks | None) -> Model:
        """Its layers; of several S-workers that act as one, this one's share."""
        resolved = self.resolved
        return load_model(
            self.checkpoint,
            device=resolved.device if ranks is None else ranks.device,
            dtype=torch_dtype(resolved.dtype),
            kv_dtype=resolved.kv_dtype,
            max_model_len=resolved.config.s_part.max_model_len,
            shard=None if ranks is None else ranks.shard,
            layers=self.layers,
            with_embedding=False,
            with_head=False,
        )[1]


def _await_hello(setup: StageSetup, fleet: HolderPool, links: StageLinks) -> StageHello | None:
    """Wait for the first stage's greeting. None: it lets go.

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
        or replace(hello, num_lanes=expected.num_lanes, session=0, resumes=False) != expected
        or not 1 <= hello.num_lanes <= MAX_LANES
        or rest
    ):
        raise ConfigError(
            f"the first stage wants {hello}, and {setup.name} is {expected}: start all "
            "stages with the same options and the same model"
        )
    return hello


def greet_stages(
    fleet: HolderPool, links: StageLinks, setups: Seq[StageSetup], hello: Hello
) -> tuple[StageWelcome, ...]:
    """Send the later stages what they are to be, and wait until they are that. What they have
    answered.

    Args:
        hello: what the first stage's R-workers were greeted with; R-workers of later
            stages are kept and resumed as these are.

    Raises:
        WorkerError: one can't.
    """
    kept = hello.session if hello.outlives else 0
    asked = {
        x.number: replace(x.hello(len(fleet)), session=kept, resumes=hello.resumes) for x in setups
    }
    return _welcomed(fleet, links, asked)


def whole_columns(
    welcomes: Mapping[HolderId, Welcome], others: Seq[StageWelcome]
) -> tuple[dict[HolderId, Welcome], list[WorkerError]]:
    """Columns with an R-worker in every stage, with the KV blocks that all of
    these have; and what is missing of others.

    Args:
        welcomes: of the first stage's R-workers.
        others: of later stages.
    """
    there: dict[HolderId, Welcome] = {}
    missing = []
    for column, welcome in welcomes.items():
        lacking = [other.stage for other in others if not other.num_blocks[column]]
        missing += [
            WorkerError(f"the R-worker of column {column} of stage {stage} is not there")
            for stage in lacking
        ]
        least = min([welcome.num_blocks, *(other.num_blocks[column] for other in others)])
        if least:
            there[column] = replace(welcome, num_blocks=least)
    return there, missing


def _welcomed(
    fleet: HolderPool, links: StageLinks, hellos: dict[int, StageHello]
) -> tuple[StageWelcome, ...]:
    assert isinstance(fleet, ColumnPool)
    later = fleet.later
    with links.patient():
        later.greet(hellos)
        while (welcomes := later.welcomes(hellos)) is None:
            fleet.receive()
    for stage, welcome in welcomes.items():
        try:
            hellos[stage].check(welcome)
        except ProtocolError as lie:
            what = f"{stage_name(stage)} {lie.message}"
            raise WorkerError(what, code="stage_lost") from None
    return tuple(welcomes[stage] for stage in sorted(welcomes))


def _tell_failure(links: StageLinks, name: str, error: FastDecodeError) -> None:
    try:
        links.tell(FIRST_STAGE, Failed(name, error.code, error.message))
    except WorkerError:
        logger.debug("the first stage has gone before %s", name)


def about_layers(layers: Seq[range]) -> str:
    """Which stage has which, for people."""
    told = ", ".join([f"{each.start}-{each.stop - 1}" for each in layers])
    return f"{len(layers)} stages, layers {told}"
