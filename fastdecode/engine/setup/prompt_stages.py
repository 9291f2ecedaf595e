"""Stages that run prompts only (``--prompt-pp``): how they reach the R-workers of
those that decode, and what they attend with."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import Holder
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.setup.reach import check_written, reach_stage_addresses
from fastdecode.engine.setup.resolve import kv_spec
from fastdecode.engine.setup.stages import StageSetup
from fastdecode.engine.setup.workers import Reached, reach_stage_ranks
from fastdecode.engine.stages.later_stage import StageRelay
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.prompts import LanePrompts, PromptPlan
from fastdecode.engine.stages.writers import WriterMembers, WriterPool, WriterRelay, members_of
from fastdecode.engine.step.attention import Attention
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import MAX_BLOCKS, Hello
from fastdecode.wire.stages import StageHello, StageWelcome
from sworker.dtypes import torch_dtype
from sworker.paged import PagedKV
from sworker.worker import SWorker


@dataclass(frozen=True)
class PromptStageSetup(StageSetup):
    """What a stage of prompts is made of; see ``StageSetup``."""

    @property
    def layers(self) -> range:
        return self.resolved.prompt_layers[self.number - len(self.resolved.layers)]

    @property
    def before(self) -> int:
        """See ``StageSetup``."""
        return self.number - 1 if self.number > len(self.resolved.layers) else 0

    @property
    def behind(self) -> int | None:
        """See ``StageSetup``."""
        num_stages = len(self.resolved.layers) + len(self.resolved.prompt_layers)
        return self.number + 1 if self.number + 1 < num_stages else None

    def reach_threads(self, hub: InprocHub[Any, Any], reached: Seq[Reached]) -> Reached:
        """The R-workers that keep its layers, of a stage that is a thread.

        Args:
            hub: its own, without connections; gets connections to R-workers that are threads.
            reached: the R-workers of each token stage.
        """
        if self.resolved.transport == "zmq":
            return self._reach_addresses()
        for stage in self._written:
            workers = reached[stage]
            for number, door in enumerate(workers.doors):  # standby ones are the last
                connect(hub, self.name, door, f"R-worker s{stage}-r{number}")
        connections = hub.connections

        def close(lost: Collection[int], timeout_s: float) -> None:
            for connection in connections:
                connection.close()

        return Reached(hub, close)

    def reach_ranks(self) -> Reached:
        """The same, of a stage that is a rank of an MPI job, and the other stages.

        Raises:
            ConfigError: ranks can't be shared out to the stages.
        """
        from fastdecode.wire.mpi.hub import connect_stage
        from fastdecode.wire.mpi.job import join

        check_written(self.resolved)
        job, ranks = join(), self.resolved.ranks
        if self.resolved.transport == "zmq":
            elsewhere = self._reach_addresses()
            return reach_stage_ranks(self.number, ranks, elsewhere=elsewhere)
        r_ranks = [rank for stage in self._written for rank in ranks.r_workers(job.size, stage)]
        hub, others = connect_stage(job, ranks, self.number, r_ranks)
        links = StageLinks(others, is_asked=True, first_prompt_stage=ranks.num_stages)
        connections = hub.connections[: len(hub.connections) - len(links)]

        def close(lost: Collection[int], timeout_s: float) -> None:
            for index, connection in enumerate(connections):
                if index in lost:
                    connection.give_up()
            for other in links.gone:
                others[other].give_up()
            hub.close()

        return Reached(hub, close, stages=links)

    def _reach_addresses(self) -> Reached:
        """The R-workers that keep its layers, at their addresses."""
        return reach_stage_addresses(self.resolved, *self._written, ends_them=False)

    @property
    def _written(self) -> tuple[int, ...]:
        """The token stages to whose R-workers it writes."""
        return tuple(members_of(self.layers, self.resolved.layers))

    def make_pool(self, workers: Reached, links: StageLinks) -> WriterPool:
        """See ``StageSetup``."""
        cluster, layers = self.resolved.config.cluster, self.resolved.layers
        timeouts = cluster.worker_timeout_s, cluster.worker_silence_s
        num_r_workers = len(workers.hub.connections) - len(links)
        num_columns = num_r_workers // len(self._written) - cluster.spare_r_workers
        if self.resolved.config.r_part.r_partition == "heads":
            num_columns = 1
        members = WriterMembers(
            workers.hub,
            *timeouts,
            stages=links,
            written=self._written,
            num_columns=num_columns,
            absent=workers.absent,
            at_addresses=workers.at_addresses,
        )
        return WriterPool(members, members_of(self.layers, layers))

    def greet(self, workers: Reached, fleet: HolderPool, hello: Hello) -> StageWelcome:
        """See ``StageSetup``. Their own stages greet them."""
        return StageWelcome(self.number, (MAX_BLOCKS,) * len(fleet))

    def make_attention(self, workers: Reached, fleet: HolderPool, s_worker: SWorker) -> Attention:
        """See ``StageSetup``. Prompts are attended here, and stored there."""
        resolved, spec = self.resolved, self.own_spec
        kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
        first_lane, most_tokens = resolved.schedule.num_lanes, resolved.max_model_len
        num_tokens = resolved.schedule.num_prompt_lanes * most_tokens
        num_blocks, dtype = -(-num_tokens // kv.block_size), torch_dtype(resolved.activation_dtype)
        cache = PagedKV(kv, spec.attention, num_blocks, s_worker.device, dtype=dtype)
        cache.sinks = s_worker.model.sinks
        holder = Holder(workers.kind, False, workers.answers_at_once, kv.token_bytes)
        plan = PromptPlan(
            spec.attention,
            resolved.kv_dtype,
            fleet,
            s_worker.device,
            (holder,) * len(fleet),
            slot_bytes=resolved.slot_bytes(spec),
            sinks=s_worker.model.sinks,
            rooms=LanePrompts(cache, first_lane, most_tokens),
        )
        plan.prepare(resolved.most_lanes)
        return plan

    def make_relay(
        self,
        workers: Reached,
        fleet: HolderPool,
        links: StageLinks,
        greeting: Hello,
        asked: StageHello,
        num_blocks: Seq[int],
    ) -> StageRelay:
        """See ``StageSetup``.

        Raises:
            ConfigError: R-workers take no prompts.
        """
        assert isinstance(fleet, WriterPool)
        if len(asked.sessions) != len(self.resolved.layers) or not all(asked.sessions):
            raise ConfigError(
                f"the first stage named {len(asked.sessions)} sessions to {self.name}"
            )
        fleet.writers.sessions = asked.sessions
        return WriterRelay(fleet)
