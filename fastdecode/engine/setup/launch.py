"""From a resolved configuration to a running engine: load the model, start and greet R-workers."""

from __future__ import annotations

import gc
import logging
import math
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from typing import Any

import torch
from msgspec import structs

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId, HolderKind
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.stages import stage_spec
from fastdecode.core.resuming import Session
from fastdecode.core.trace import Trace
from fastdecode.engine.engine import Engine
from fastdecode.engine.extensions import (
    EngineState,
    Extension,
    Recovery,
    ReplicaRecovery,
    StepTiming,
)
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.greeting import greet, limits, offer_for_replicas
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.replacements import Replacements
from fastdecode.engine.fleet.replicas import Replicas, new_session
from fastdecode.engine.fleet.resharing import Resharing
from fastdecode.engine.requests import Requests
from fastdecode.engine.session import Recorder, attach
from fastdecode.engine.setup.devices import describe_device
from fastdecode.engine.setup.greeting import (
    about_replicas,
    keepers_of,
    make_hello,
    make_replicas,
    make_stage_replicas,
    open_tiers,
)
from fastdecode.engine.setup.ranks import check_launched, meet_ranks
from fastdecode.engine.setup.reach import (
    device_beside,
    has_stage_ranks,
    make_attention,
    reach_workers,
)
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.engine.setup.s_worker import load_stage, make_s_worker
from fastdecode.engine.setup.scheduling import measured_times, schedule_for
from fastdecode.engine.setup.stages import (
    ThreadStages,
    connected,
    greet_stages,
    later_setups,
    whole_columns,
)
from fastdecode.engine.setup.workers import pools_of
from fastdecode.engine.stages.pool import ColumnPool, ColumnReplacements, StagePool
from fastdecode.engine.stages.steps import FirstStage
from fastdecode.engine.step.device import DeviceAttention
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.transfers import KVExchange, Transfers
from fastdecode.schedule.lanes import LaneChoice, LaneControl
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.ring import neighbour
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import GrammarMasks
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import Hello, Welcome
from fastdecode.wire.transport import TIMEOUT
from sworker.failures import typed_start
from sworker.model.skeleton import Model
from sworker.ranks.group import Ranks

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01
"""Whether those that are left have answered, when one was lost while all were greeted."""


class RunningEngine:
    """An engine, the model that it runs and the R-workers that serve it. Close it when done.

    Args:
        progress: Called with what is being done, one line at a time.
        times: What is known of step times before the first one. Gets how long each step took.
            If None, the schedule measures what it needs.
        session: Of a run that another process may continue, for R-workers at addresses. None if
            none can.
        colocation: Other engines' R-workers in this process, which reach this one's.
        is_instance: Other engines continue its prompts, and it continues theirs. With a
            ``colocation`` they do anyway.

    Raises:
        ConfigError, ModelError: If an option or the model directory is bad.
        CapacityError: If there isn't the memory for the model.
        WorkerError: If an R-worker failed to start, or refused to serve.
    """

    @typed_start()
    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
        session: Session | None = None,
        colocation: Colocation | None = None,
        *,
        is_instance: bool = False,
    ) -> None:
        started = time.perf_counter()
        check_launched(config.s_part, has_r_workers=not config.r_part.is_on_device)
        self._checkpoint = open_checkpoint(config.model, config.s_part.load_format)
        self.spec = self._checkpoint.spec(max_model_len=config.s_part.max_model_len)
        self.resolved = resolve_for_this_host(config, self.spec, beside=colocation)
        self._own_spec = stage_spec(self.spec, self.resolved.layers[0])
        self._opened = ExitStack()
        try:
            self._is_instance = is_instance or colocation is not None
            self._open(session, colocation)
            self.engine = self._start(
                progress or logger.info,
                trace,
                measured_times(self.resolved) if times is None else times,
            )
            self._opened.callback(_freeze_objects())
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def _open(self, session: Session | None, colocation: Colocation | None) -> None:
        """Reach the peers that serve the engine. R-workers come before the model: that one of
        them can't be reached is better known before than after a large one is loaded."""
        config, cluster = self.resolved.config, self.resolved.config.cluster
        self.codec = TextCodec.load(self._checkpoint.directory, self.resolved.max_model_len)
        self._opened.callback(self.codec.close)
        self._ranks: Ranks | None = None
        hub: InprocHub[Any, Any] = InprocHub()
        self._workers = reach_workers(self.resolved, hub, colocation)
        close, self._gone = self._workers.close, self._workers.absent
        self._opened.callback(lambda: close(self._gone, cluster.worker_timeout_s))
        self._setups = later_setups(self._checkpoint, self.spec, self.resolved)
        self._stage_addresses: dict[int, Seq[str]] = {}
        if self._setups and not has_stage_ranks(self.resolved):
            self._start_stages(hub, colocation)
        self._device = device_beside(self.resolved, colocation)
        if self._device is not None:
            self._opened.callback(self._device.close)
        self._session = session if self.resolved.transport == "zmq" else None
        pool, self._fleet = pools_of(self._workers, config, self._device, self.resolved.layers)
        self._gone = pool.gone  # as it is, whenever they are closed
        if config.r_part.replicas and not self._workers.keepers:
            neighbour(
                HolderId(0),
                self._workers.num_holders,
                on_disk=config.r_part.is_replicated_on_disk,
                num_spares=self._workers.num_spares,
            )  # or it is refused

    def _start_stages(self, hub: InprocHub[Any, Any], beside: Colocation | None) -> None:
        num_threads = max(1, torch.get_num_threads() // self.resolved.stages_at_once)
        if self.resolved.device.type == "cpu":
            self._opened.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(num_threads)
        stages = ThreadStages(self._setups, hub, num_threads, beside)
        self._opened.callback(stages.close)
        self._workers = connected(self._workers, hub, stages.links)
        self._stage_addresses = stages.addresses

    def _start(
        self, tell: Callable[[str], None], trace: Trace | None, times: MeasuredTimes | None
    ) -> Engine:
        """Load the model, greet all holders, and make the engine of them."""
        workers, config, cluster = self._workers, self.resolved.config, self.resolved.config.cluster
        session, has_replicas = self._session, config.r_part.replicas
        model = self._load_model(tell)
        where = f"; before them, {self._device.peer}" if self._device is not None else ""
        tell(workers.greeting + where)
        hello = make_hello(self._checkpoint, self._own_spec, self.resolved, self._ranks)
        if session is not None:
            hello = structs.replace(hello, session=session.number, outlives=config.keeps_blocks)
        self._reading = new_session() if self._is_instance else 0
        hello = structs.replace(hello, reading=self._reading)
        deadlines = Deadlines(cluster.worker_timeout_s, cluster.worker_silence_s)
        replacements = self._replacements(hello, deadlines)
        resumes = session is not None and session.is_resumed and hello.outlives
        greeting = structs.replace(hello, resumes=resumes)
        welcomes = self._greet(greeting, replacements)
        replicas = None
        if has_replicas:
            all_blocks = welcomes
            if workers.stages is None:
                welcomes, replicas = make_replicas(self._fleet, greeting, welcomes, workers, config)
            else:
                keepers = keepers_of(workers, config)
                welcomes = offer_for_replicas(self._fleet, greeting, welcomes, keepers)
            tell(about_replicas(all_blocks, welcomes, workers, config))
            if replacements is not None:
                blocks_of = {x: y.num_blocks for x, y in welcomes.items()}
                replacements.limit(limits(blocks_of, workers.num_holders))
        if workers.stages is not None:
            others = greet_stages(self._fleet, self._setups, greeting)
            for other in others:  # of threads they are known, and kept up to date
                self._stage_addresses.setdefault(other.stage, other.addresses)
            welcomes, missing = whole_columns(welcomes, others)
            if missing:
                self._check_enough(len(welcomes), missing)
            if has_replicas:
                replicas = make_stage_replicas(self._fleet, hello.session, workers, config, others)
        self.welcomes = tuple(welcomes.values())
        blocks = tuple(
            welcomes[i].num_blocks if i in welcomes else 0
            for i in map(HolderId, range(len(self._fleet)))
        )
        open_tiers(tell, self._fleet, welcomes, self.resolved, self._checkpoint)
        engine = self._make_engine(model, blocks, trace, times, replicas, replacements)
        counts = engine.stats.attached
        if counts is not None and counts.num_sequences:
            tell(
                f"going on with the job's session: R-workers have kept {counts.num_held_tokens} of "
                f"{counts.num_tokens} tokens of {counts.num_sequences} unfinished sequences"
            )
        return engine

    def _replacements(self, hello: Hello, deadlines: Deadlines) -> Replacements | None:
        """Return what looks for R-workers that replace lost ones. None: they have no
        replacements."""
        fleet, config = self._fleet, self.resolved.config
        places = self._workers.places(config, hello, deadlines)
        if isinstance(fleet, GroupPool) and config.r_part.r_partition == "heads":
            return Resharing(fleet, hello, deadlines, places)
        if isinstance(fleet, ColumnPool) and places is not None:
            return ColumnReplacements(fleet, hello, places, deadlines.timeout_s)
        return places

    def _load_model(self, tell: Callable[[str], None]) -> Model:
        """Load the model, or this rank's part of it once the others have been met."""
        config, resolved = self.resolved.config, self.resolved
        where = describe_device(resolved.device, resolved.free, config.s_part.device)
        if config.s_part.pp > 1:
            told = ", ".join([f"{each.start}-{each.stop - 1}" for each in resolved.layers])
            where += f" in {len(resolved.layers)} stages, layers {told}"
        tell(
            f"loading {config.model} ({self.spec.num_parameters / 1e6:.1f} M parameters, "
            f"{resolved.dtype}) on {where}: {resolved.memory}; "
            f"prefix cache {'on' if config.keeps_blocks else 'off'}"
        )
        decoding = self._checkpoint.about_decoding(self.spec, resolved.dtype)
        for line in filter(None, (decoding, resolved.about_products, resolved.why_placed)):
            tell(line)
        if config.s_part.tp > 1:
            self._ranks = meet_ranks(resolved)
            self._opened.callback(self._ranks.close)
        return load_stage(self._checkpoint, resolved, 0, self._ranks)[1]

    def _greet(self, hello: Hello, replacements: Replacements | None) -> dict[HolderId, Welcome]:
        """Return the answers of those that are there, by holder; of those that have
        come in a lost one's place meanwhile, too.

        Raises:
            ConfigError: If one can't hold such a cache.
            WorkerError: If too few are there.
        """
        welcomes, lost = greet(self._fleet, hello), dict(self._fleet.lost)
        if replacements is not None and lost:
            while not (found := replacements.look(lost)) and replacements.timeout_s == math.inf:
                time.sleep(_LOOK_EVERY_S)
            for holder, welcome in found.items():
                replacements.admit(holder)
                self._fleet.revive(HolderId(holder))
                welcomes[HolderId(holder)] = welcome
        self._check_enough(self._workers.num_holders - len(self._lost), self._lost)
        return welcomes

    def _check_enough(self, num_live: int, lost: Seq[WorkerError]) -> None:
        """
        Raises:
            WorkerError: If no R-worker (of columns, with stages) is there.
        """
        if not num_live:
            raise lost[0]
        if lost:
            missing = "; ".join(error.message for error in lost)
            logger.warning(
                "the job starts with %d of %d R-workers%s: %s",
                num_live,
                self._workers.num_holders,
                " a stage" if self._workers.stages is not None else "",
                missing,
            )

    def _make_engine(
        self,
        model: Model,
        blocks: tuple[int, ...],
        trace: Trace | None,
        times: MeasuredTimes | None,
        replicas: Replicas | None,
        replacements: Replacements | None,
    ) -> Engine:
        """Make the engine, once R-workers have offered their room: ``blocks`` of each."""
        resolved, fleet, session = self.resolved, self._fleet, self._session
        s_worker = make_s_worker(self.spec, model, resolved, self._ranks)
        attention = make_attention(
            self._workers, fleet, self._own_spec, resolved, s_worker, self._device
        )
        onward = FirstStage(s_worker, fleet) if isinstance(fleet, ColumnPool) else None
        pipeline = Pipeline(s_worker, attention, resolved.schedule.num_lanes, trace, onward)
        scheduler = schedule_for(
            resolved,
            self.spec,
            attention.holders,
            blocks,
            times,
            is_instance=self._is_instance,
            # No part is called what another run has called one in the same caches.
            first_part_id=0 if session is None else secrets.randbelow(1 << 30) << 32,
        )
        # What a later stage cannot read is known too late for a step that has begun;
        # and a step on the device runs all layers without a look at the disk.
        joins_early = resolved.config.s_part.pp == 1 and self._workers.kind is not HolderKind.DEVICE
        lifecycle = Lifecycle(scheduler, joins_early=joins_early)
        own = () if self.codec.eos_token_id is None else (self.codec.eos_token_id,)
        named = (*self.spec.eos_token_ids, *(x for x in own if x < self.spec.vocab_size))
        eos = tuple(dict.fromkeys(named))  # by the model's configs and its tokenizer's
        masks = GrammarMasks(self.codec, self.spec.vocab_size, eos)
        self._opened.callback(masks.close)
        requests = Requests(self.codec, eos, self.spec.vocab_size, masks)
        state = EngineState(fleet, lifecycle, requests)
        if isinstance(attention, DeviceAttention) and attention.swap is not None:
            state.stats.swap = attention.swap.kv.figures
        if session is not None and session.is_resumed and resolved.config.keeps_blocks:
            state.stats.attached = attach(fleet, scheduler.ledger.cache, session)
        elif session is not None:
            session.begin()
        if replicas is None:
            recovery = Recovery(state, replacements)
        else:
            replicas.begin()  # of what is attached, too
            recovery = ReplicaRecovery(state, replicas, replacements)
        return Engine(s_worker, pipeline, state, recovery, self._extensions(state, times), trace)

    def _extensions(self, state: EngineState, times: MeasuredTimes | None) -> list[Extension]:
        extensions: list[Extension] = []
        if times is not None:
            lanes: LaneChoice | None = state.lifecycle.scheduler.hybrid
            resolved = self.resolved
            if lanes is None and resolved.lanes.adapt:
                most, num_stages = resolved.lanes.most, len(resolved.layers)
                first = resolved.schedule.num_lanes
                lanes = LaneControl(times, first, most=most, num_stages=num_stages)
            extensions.append(StepTiming(times, lanes))
        has_tiers = any(welcome.has_tier for welcome in self.welcomes)
        if has_tiers or self._is_instance:
            extensions.append(Transfers(state))
        if self._is_instance:
            config = self.resolved.config
            pace = (config.instances.fetch_gbps or 0.0) * 1e9 / 8, config.cluster.worker_timeout_s
            extensions.append(KVExchange(state, self.spec, self._address_of, self._reading, *pace))
        if self._session is not None:
            extensions.append(Recorder(self._session, state.lifecycle.sequences))
        return extensions

    def _address_of(self, worker: int) -> str:
        """Return what other instances' R-workers call one of these, by its index in the pool."""
        members, stage = self._fleet.members, 0
        if worker == self._workers.num_holders and isinstance(self._device, ReachedDevice):
            return self._device.address
        if isinstance(members, StagePool):
            stage, worker = members.origin(worker)
        addresses = self._stage_addresses[stage] if stage else self._workers.addresses
        return addresses[worker]

    @property
    def _lost(self) -> list[WorkerError]:
        return list(self._fleet.gone.values())

    @property
    def has_hung_r_workers(self) -> bool:
        return any(error.code == TIMEOUT for error in self._lost)

    @property
    def num_r_workers(self) -> int:
        """R-workers that it began with, in all stages."""
        if self._workers.kind is HolderKind.DEVICE:
            return 0
        return self._workers.num_holders * len(self.resolved.layers)

    @property
    def num_live_r_workers(self) -> int:
        return max(0, self.num_r_workers - len(self._lost))

    def close(self) -> None:
        """Stop the R-workers, S-workers beside this one and what encodes
        prompts. Safe to call twice."""
        self._opened.close()


def _freeze_objects() -> Callable[[], object]:
    """Leave all objects that exist now out of Python's garbage collections.

    Modules, the model and the engine live as long as the engine is open. A full collection would
    visit each of them in the middle of a step. If the application or another engine has frozen
    objects, nothing is done: to thaw them is its owner's decision.

    Returns: What undoes it, for when the engine is closed. Else what the engine leaves would stay.
    """
    if gc.get_freeze_count():
        return lambda: None
    gc.collect()
    gc.freeze()
    return gc.unfreeze
