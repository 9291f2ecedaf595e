"""Stages that run prompts only (``--prompt-pp``): how they reach the R-workers of
those that decode, and what they attend with."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import Holder
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.setup.reach import stage_ranks
from fastdecode.engine.setup.resolve import kv_spec
from fastdecode.engine.setup.stages import StageSetup
from fastdecode.engine.setup.workers import LEAST_STUCK_S, Reached
from fastdecode.engine.stages.layer_hub import LayerHub, homes_of, stages_of
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.prompts import LanePrompts
from fastdecode.engine.step.remote import Attention, AttentionPlan
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import MAX_BLOCKS
from fastdecode.wire.stages import StageHello, StageWelcome
from sworker.dtypes import torch_dtype
from sworker.paged import PagedKV
from sworker.ranks.group import Ranks
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
        """The R-workers that keep its layers, as threads of this process.

        Args:
            hub: its own, without connections.
            reached: the R-workers of each token stage.
        """
        homes = homes_of(self.layers, self.resolved.layers)
        for stage in stages_of(homes):
            workers = reached[stage]
            for name, door in zip(workers.addresses, workers.doors, strict=True):
                connect(hub, self.name, door, f"R-worker {name}")
        num_columns = self.resolved.config.r_part.r_workers
        connections = hub.connections

        def close(lost: Collection[int], timeout_s: float) -> None:
            for connection in connections:
                connection.close()

        return Reached(LayerHub(hub, homes, num_columns), close)

    def reach_ranks(self) -> Reached:
        """The same, as ranks of this job, and the other stages.

        Raises:
            ConfigError: ranks can't be shared out to the stages.
        """
        from fastdecode.wire.mpi import joining
        from fastdecode.wire.mpi.stages import connect_stage

        job, ranks = joining.join(), stage_ranks(self.resolved.config.s_part)
        silence_s = self.resolved.config.cluster.worker_silence_s
        homes = homes_of(self.layers, self.resolved.layers)
        fed = stages_of(homes)
        hub, others = connect_stage(
            job, ranks, self.number, stuck_after_s=max(LEAST_STUCK_S, silence_s), fed=fed
        )
        links = StageLinks(others, is_asked=True, first_prompt_stage=ranks.num_stages)
        num_columns = len(ranks.r_workers(job, 0))
        connections = hub.connections[: len(fed) * num_columns]

        def close(lost: Collection[int], timeout_s: float) -> None:
            for index, connection in enumerate(connections):
                if index % num_columns in lost:
                    connection.give_up()
            for other in links.gone:
                others[other].give_up()
            hub.close()

        return Reached(LayerHub(hub, homes, num_columns), close, stages=links)

    def greet(
        self, workers: Reached, fleet: WorkerPool, ranks: Ranks | None = None
    ) -> StageWelcome:
        """See ``StageSetup``. Their own stages greet them."""
        return StageWelcome(self.number, (MAX_BLOCKS,) * len(fleet))

    def make_attention(self, workers: Reached, fleet: WorkerPool, s_worker: SWorker) -> Attention:
        """See ``StageSetup``. Prompts are attended here, and stored there."""
        resolved, spec = self.resolved, self.own_spec
        kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
        first_lane, most_tokens = resolved.schedule.num_lanes, resolved.max_model_len
        num_tokens = resolved.schedule.num_prompt_lanes * most_tokens
        num_blocks, dtype = -(-num_tokens // kv.block_size), torch_dtype(resolved.dtype)
        cache = PagedKV(kv, spec.attention, num_blocks, s_worker.device, dtype=dtype)
        cache.sinks = s_worker.model.sinks
        holder = Holder(workers.kind, False, workers.answers_at_once, kv.token_bytes)
        plan = AttentionPlan(
            spec.attention,
            resolved.kv_dtype,
            fleet,
            s_worker.device,
            (holder,) * len(fleet),
            slot_bytes=resolved.slot_bytes(spec),
            sinks=s_worker.model.sinks,
            prompts=LanePrompts(cache, first_lane, most_tokens),
        )
        plan.prepare(resolved.most_lanes)
        return plan

    def told(self, workers: Reached, hello: StageHello) -> None:
        """See ``StageSetup``.

        Raises:
            ConfigError: R-workers take no prompts.
        """
        assert isinstance(workers.hub, LayerHub)
        if len(hello.sessions) != len(self.resolved.layers) or not all(hello.sessions):
            raise ConfigError(
                f"the first stage named {len(hello.sessions)} sessions to {self.name}"
            )
        workers.hub.sessions[:] = hello.sessions
