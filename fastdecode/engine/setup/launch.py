"""From a resolved configuration to a running engine: load the model, start and greet R-workers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.model.checkpoint import Checkpoint, open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.engine import Engine
from fastdecode.engine.executor import Watch
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.heads import share_out_heads
from fastdecode.engine.fleet.replicas import limits, new_session, replicate
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.engine.fleet.workers import (
    REACH_TIMEOUT_S,
    Reached,
    Replacements,
    reach_addresses,
    reach_inline,
    reach_ranks,
    reach_threads,
)
from fastdecode.engine.recovery import Recovery
from fastdecode.engine.setup.devices import describe_device
from fastdecode.engine.setup.ranks import meet_ranks
from fastdecode.engine.setup.resolve import ResolvedConfig, kv_spec, resolve_for_this_host
from fastdecode.engine.setup.s_worker import make_s_worker
from fastdecode.engine.step.local import LocalConnection, reach_device
from fastdecode.engine.step.mixed import MixedAttention
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.prompts import HeldPrompts
from fastdecode.engine.step.remote import Attention, AttentionPlan
from fastdecode.schedule.cache.costs import costs_of
from fastdecode.schedule.cache.retention import Policy, policy_of
from fastdecode.schedule.hybrid.control import HybridOptions
from fastdecode.schedule.hybrid.told import Guess
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.wire.messages import PROTOCOL_VERSION, Hello, Welcome
from fastdecode.wire.transport import TIMEOUT
from sworker.dtypes import torch_dtype
from sworker.failures import typed_start
from sworker.kernels.threads import openmp_library
from sworker.load.weights import load_model
from sworker.model.skeleton import Model
from sworker.paged import PagedKV
from sworker.ranks.group import Ranks
from sworker.worker import SWorker

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01
"""Whether those that are left have answered, when one was lost while all were greeted."""


class RunningEngine:
    """An engine, the model that it runs and the R-workers that serve it. Close
    it when done.

    Args:
        config: what the user chose.
        progress: told what is being done, one line at a time.
        trace: told what every step did.
        times: what is known of step times before the first one, and told how
            long each took; None: all is learnt.

    Raises:
        ConfigError, ModelError: an option or the model directory is bad.
        CapacityError: there isn't the memory for the model.
        WorkerError: an R-worker failed to start, or refused to serve.
    """

    @typed_start()
    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
    ) -> None:
        tell = progress or logger.info
        started = time.perf_counter()
        self._checkpoint = open_checkpoint(config.model)
        self.spec = self._checkpoint.spec(max_model_len=config.s_part.max_model_len)
        self.resolved = resolve_for_this_host(config, self.spec)
        self.codec = TextCodec.load(config.model, self.resolved.max_model_len)
        # R-workers first: that one of them can't be reached is better known
        # before than after a large model is loaded.
        self._ranks: Ranks | None = None
        workers = _reach_workers(self.resolved)
        self._workers = workers
        self._device = _device_beside(self.resolved)
        self._is_closed = False
        cluster = config.cluster
        self._fleet = Fleet(
            workers.hub,
            cluster.worker_timeout_s,
            cluster.worker_silence_s,
            absent=workers.absent,
            device=self._device,
        )
        self.num_r_workers = workers.num_r_workers
        try:
            self.engine = self._start(tell, trace, MeasuredTimes() if times is None else times)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def _start(
        self, tell: Callable[[str], None], trace: Trace | None, times: MeasuredTimes
    ) -> Engine:
        """Load the model, greet all holders, and make the engine of them."""
        workers, cluster = self._workers, self.resolved.config.cluster
        model = self._load_model(tell)
        where = f"; before them, {self._device.peer}" if self._device is not None else ""
        tell(workers.greeting + where)
        session = new_session() if self.resolved.config.r_part.replicas else 0
        hello = replace(_hello(self._checkpoint, self.spec, self.resolved), session=session)
        deadlines = Deadlines(cluster.worker_timeout_s, cluster.worker_silence_s)
        replacements = workers.replacements and workers.replacements(hello, deadlines)
        welcomes = self._greet(hello, replacements)
        replicas = None
        if session:
            num_blocks = sum(welcome.num_blocks for welcome in welcomes.values())
            options = LinkOptions(
                workers.addresses, cluster.link_bytes, cluster.worker_timeout_s, session
            )
            welcomes, replicas = replicate(self._fleet, hello, welcomes, options)
            if replacements is not None:
                replacements.limit(limits(welcomes, len(self._fleet)))
            offered = sum(welcome.num_blocks for welcome in welcomes.values())
            tell(
                f"replicas: sequences have {offered} of {num_blocks} KV blocks; each R-worker "
                "keeps its neighbour's in as many"
            )
        self.welcomes = tuple(welcomes.values())
        blocks = tuple(
            welcomes[i].num_blocks if i in welcomes else 0
            for i in map(HolderId, range(len(self._fleet)))
        )
        recovery = Recovery(self._fleet, replacements, replicas=replicas)
        return self._make_engine(model, workers, blocks, recovery, trace, times)

    def _load_model(self, tell: Callable[[str], None]) -> Model:
        """The model, or this rank's part of it once the others have been met."""
        config, resolved = self.resolved.config, self.resolved
        where = describe_device(resolved.device, resolved.free)
        tell(
            f"loading {config.model} ({self.spec.num_parameters / 1e6:.1f} M parameters, "
            f"{resolved.dtype}) on {where}: {resolved.memory}; {_about_kept_blocks(config)}"
        )
        if config.s_part.tp > 1:
            self._ranks = meet_ranks(
                config.s_part.tp, resolved.device, config.cluster.worker_timeout_s
            )
        device, shard = (
            (self._ranks.device, self._ranks.shard) if self._ranks else (resolved.device, None)
        )
        return load_model(
            self._checkpoint,
            device=device,
            dtype=torch_dtype(resolved.dtype),
            max_model_len=config.s_part.max_model_len,
            shard=shard,
        )[1]

    def _greet(self, hello: Hello, replacements: Replacements | None) -> dict[HolderId, Welcome]:
        """The answers of those that are there, by holder; of those that have
        come in a lost one's place meanwhile, too.

        Raises:
            ConfigError: one can't hold such a cache.
            WorkerError: too few are there.
        """
        welcomes = self._fleet.greet(hello)
        lost = dict(self._fleet.lost)
        if replacements is not None and lost:
            while not (found := replacements.look(lost)) and replacements.timeout_s == math.inf:
                time.sleep(_LOOK_EVERY_S)
            for holder, welcome in found.items():
                replacements.admit(holder)
                self._fleet.revive(HolderId(holder))
                welcomes[HolderId(holder)] = welcome
        live, at_least = self.num_live_r_workers, self.resolved.config.cluster.min_r_workers
        if live < at_least:
            too_few = ConfigError(
                Given("min_r_workers", at_least), f": there are only {live} R-workers"
            )
            raise next(iter(self._lost), too_few)
        if self._lost:
            missing = "; ".join(error.message for error in self._lost)
            logger.warning(
                "the job starts with %d of %d R-workers: %s", live, self.num_r_workers, missing
            )
        return welcomes

    def _make_engine(
        self,
        model: Model,
        workers: Reached,
        blocks: tuple[int, ...],
        recovery: Recovery,
        trace: Trace | None,
        times: MeasuredTimes,
    ) -> Engine:
        """The engine, once R-workers have said what room they have: ``blocks`` of each."""
        resolved = self.resolved
        s_worker = make_s_worker(self.spec, model, resolved, self._ranks)
        attention = _attention(workers, self._fleet, self.spec, resolved, s_worker, self._device)
        pipeline = Pipeline(s_worker, attention, resolved.schedule.num_lanes, trace)
        at_once = all(holder.answers_at_once for holder in attention.holders)
        scheduler = make_scheduler(
            resolved.schedule,
            blocks,
            resolved.config.r_part.block_size,
            times,
            opening_steps=0 if at_once else 1,
            hybrid=_hybrid_options(self._device is not None, resolved, attention.holders),
            cache_identity=self._cache_identity(),
            cache_policy=self._cache_policy(),
        )
        lanes = scheduler.hybrid or _lane_control(resolved, times)
        watch = Watch(trace or NoTrace(), times, lanes)
        eos = self._eos_token_ids()
        return Engine(
            s_worker, pipeline, self._fleet, Lifecycle(scheduler), self.codec, eos, recovery, watch
        )

    def _cache_identity(self) -> str | None:
        """What K and V of a token depend on beside the tokens, while R-workers
        keep them; None: nothing is kept."""
        resolved, options = self.resolved, self.resolved.config
        if not options.keeps_blocks:
            return None
        parts = (self._checkpoint.model_hash, resolved.dtype, resolved.kv_dtype)
        return "/".join(map(str, (*parts, resolved.max_model_len, options.r_part.block_size)))

    def _cache_policy(self) -> Policy:
        config = self.resolved.config
        return policy_of(config.cache.cache_policy, config.r_part.block_size, costs_of(self.spec))

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Those that the model's configs name, or else the tokenizer's."""
        eos = self.codec.eos_token_id
        own = () if eos is None or eos >= self.spec.vocab_size else (eos,)
        return self.spec.eos_token_ids or own

    @property
    def _lost(self) -> list[WorkerError]:
        """Why those R-workers are lost that are."""
        return self._workers.lost(self._fleet)

    @property
    def has_hung_r_workers(self) -> bool:
        return any(error.code == TIMEOUT for error in self._lost)

    @property
    def num_live_r_workers(self) -> int:
        return self.num_r_workers - len(self._lost)

    def close(self) -> None:
        """Stop the R-workers, S-workers beside this one and what encodes
        prompts. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.codec.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._device is not None:
            self._device.close()
        self._workers.close(self._fleet.gone, self.resolved.config.cluster.worker_timeout_s)


def _about_kept_blocks(config: EngineConfig) -> str:
    """Whether there is a prefix cache, and why not, if nobody has said so."""
    if config.keeps_blocks:
        return "prefix cache on"
    if config.cache.prefix_cache == "off":
        return "prefix cache off"
    beside = "replicas" if config.r_part.replicas else "KV on both sides"
    return f"prefix cache off, which isn't there with {beside} yet"


def _lane_control(resolved: ResolvedConfig, times: MeasuredTimes) -> LaneControl | None:
    if not resolved.adapts_lanes:
        return None
    return LaneControl(times, resolved.schedule.num_lanes, most=resolved.most_lanes)


def _device_beside(resolved: ResolvedConfig) -> LocalConnection | None:
    """The cache on the device beside R-workers', if there is one."""
    if resolved.config.r_part.kv_placement != "hybrid":
        return None
    return LocalConnection(resolved.device, resolved.device_kv_bytes)


def _hybrid_options(
    is_hybrid: bool, resolved: ResolvedConfig, holders: Seq[Holder]
) -> HybridOptions | None:
    """The device is the last of the holders."""
    if not is_hybrid:
        return None
    device = HolderId(len(holders) - 1)
    most_tpot_s = resolved.config.r_part.away_tpot_s or math.inf
    return HybridOptions(device, Guess(holders[device].token_bytes), most_tpot_s)


def _attention(
    workers: Reached,
    fleet: Fleet,
    spec: ModelSpec,
    resolved: ResolvedConfig,
    s_worker: SWorker,
    device: LocalConnection | None,
) -> Attention:
    token_bytes = kv_spec(resolved.config, spec, resolved.kv_dtype).token_bytes
    holder = Holder(workers.kind, resolved.prompts_on_r, workers.answers_at_once, token_bytes)
    if workers.attention is not None:
        return workers.attention(fleet, holder, s_worker)
    holders = (holder,) * len(fleet)
    if device is not None:
        on_device = replace(
            holder, kind=HolderKind.DEVICE, attends_prompts=False, answers_at_once=True
        )
        holders = (*holders[:-1], on_device)
    give_up = workers.give_up_heads
    plan = AttentionPlan(
        spec.attention,
        resolved.kv_dtype,
        fleet,
        s_worker.device,
        holders,
        give_up,
        slot_bytes=resolved.slot_bytes(spec),
        prompts=_held_prompts(spec, resolved, s_worker.device),
    )
    plan.prepare(resolved.most_lanes)
    return plan if device is None else MixedAttention(plan, device)


def _reach_workers(resolved: ResolvedConfig) -> Reached:
    if resolved.transport == "local":
        return reach_device(resolved.device, resolved.kv_bytes)
    workers = _reach_r_workers(resolved)
    return share_out_heads(workers) if resolved.config.r_part.r_partition == "heads" else workers


def _reach_r_workers(resolved: ResolvedConfig) -> Reached:
    config, cluster = resolved.config, resolved.config.cluster
    if resolved.transport == "mpi":
        return reach_ranks(config.s_part.tp, silence_s=cluster.worker_silence_s)
    if resolved.transport == "zmq":
        return reach_addresses(
            cluster.r_worker_addresses,
            key_file=cluster.key,
            silence_s=cluster.worker_silence_s,
            min_workers=cluster.min_r_workers,
            reach_timeout_s=min(REACH_TIMEOUT_S, cluster.worker_timeout_s),
        )
    kv_bytes, num_threads = resolved.kv_bytes, resolved.r_threads
    if resolved.transport == "inline":
        # A runtime's threads serve both parts only where both want as many.
        library = openmp_library() if num_threads == torch.get_num_threads() else None
        return reach_inline(kv_bytes=kv_bytes, num_threads=num_threads, openmp_library=library)
    return reach_threads(config.r_part.r_workers, kv_bytes=kv_bytes, num_threads=num_threads)


def _hello(checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig) -> Hello:
    kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
    return Hello(PROTOCOL_VERSION, checkpoint.model_hash, kv, spec.attention, resolved.dtype)


def _held_prompts(
    spec: ModelSpec, resolved: ResolvedConfig, device: torch.device
) -> HeldPrompts | None:
    """The device's room for prompts under way, if there is any."""
    kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
    num_blocks = resolved.memory.held_bytes // kv.block_bytes
    return HeldPrompts(PagedKV(kv, spec.attention, num_blocks, device)) if num_blocks else None
