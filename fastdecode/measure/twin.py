"""A plan's batch, scaled down to this machine and run here, beside what profiles predict of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace

from cost_model.predict import System
from cost_model.shapes import read_model
from cost_model.stages import LinkModel, RPartModel, SPartModel
from cost_model.steady import PlanFile, SteadyBatch, predict_steady, scale_down
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.host.machine import default_kv_bytes
from fastdecode.core.measurement import RProfile, SProfile
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.measure.calibrate import SEffort, calibrate_s, time_steady_steps
from rworker.measure import Effort, Host, measure_r_part

# The twin's cached tokens, so that it is filled in seconds, and its sequences.
MAX_TWIN_TOKENS = 65_536
MAX_TWIN_BATCH = 64


class Twin:
    """A plan's batch as this machine can run it."""

    def __init__(self, model: str, device: str, plan: PlanFile) -> None:
        dtype, kv_dtype, planned = plan.question.dtype, plan.question.kv_dtype, plan.steady
        self.spec, cores = read_model(model), available_cores()
        kv_bytes = default_kv_bytes(2)  # weights, and what steps need, have as much as the cache
        self._kv = self.spec.kv_spec(DType.parse(kv_dtype, option="kv_dtype", of_kv=True))
        context = min(planned.context_tokens, self.spec.max_model_len // 2)
        self.batch = twin = scale_down(
            replace(planned, context_tokens=context),
            cores=cores,
            kv_tokens=min(MAX_TWIN_TOKENS, kv_bytes // self._kv.token_bytes),
            max_batch=MAX_TWIN_BATCH,
            one_lane=choose_device(device).type == "cpu",
        )
        self._memory_bytes = kv_bytes // twin.r_workers
        self._host = Host(twin.r_workers, max(1, cores // twin.r_workers))
        self._costs = TokenCosts(self.spec, DType.parse(dtype), kv_dtype)
        self._config = EngineConfig.of(
            model,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            r_workers=twin.r_workers,
            r_threads=self._host.num_threads,
            kv_memory_gb=self._memory_bytes / 1e9,
            max_num_sequences=max(twin.batch, 2),
            lanes=twin.lanes,
            schedule="greedy",
            prefix_cache="off",
        )

    def calibrate_s(self, say: Callable[[str], None]) -> SProfile:
        batch = self.batch.batch
        sizes = sorted({1, max(1, batch // 4), max(1, batch // 2), batch})
        return calibrate_s(self._config, SEffort(tuple(sizes), (16, 64), 9), say)

    def calibrate_r(self) -> RProfile:
        share, context = max(1, self.batch.batch // self.batch.r_workers), self.batch.context_tokens
        effort = Effort(
            sequences=tuple(sorted({1, max(1, share // 4), share})),
            contexts=tuple(sorted({16, max(16, context // 4), context})),
        )
        kv = replace(self._kv, block_size=self._config.r_part.block_size)
        dtype, attention = self._costs.dtype, self.spec.attention
        return measure_r_part(self._host, kv, attention, dtype, self._memory_bytes, effort)

    def run(self, s: SProfile, r: RProfile, num_steps: int) -> dict[str, tuple[float, float]]:
        """Return what is predicted and what is measured, by quantity."""
        s_part, link = SPartModel.from_profile(s, self._costs), LinkModel.within_process()
        r_part = RPartModel.from_profile(r, self._costs)
        system = System(s_part, r_part, link, 1, self._costs, Workload(0, 1))
        twin = self.batch
        with contextlib.closing(RunningEngine(self._config)) as running:
            steps = time_steady_steps(running, twin.batch, twin.context_tokens, num_steps)
        ran = replace(twin, context_tokens=round(steps.mean_context_tokens))
        predicted = predict_steady(system, ran)
        step_s, r_part_s = statistics.median(steps.step_s), statistics.median(steps.r_compute_s)
        measured = {"step_s": step_s, "tokens_per_s": twin.batch / step_s, "r_part_s": r_part_s}
        if twin.lanes == 1:
            measured["s_part_s"] = statistics.median(steps.without_r_s)
        return {name: (predicted[name], value) for name, value in measured.items()}


def describe(model: str, steady: SteadyBatch) -> str:
    return (
        f"{model}: {steady.batch} sequences of {steady.context_tokens} tokens in {steady.lanes} "
        f"lane(s), {steady.r_workers} R-worker(s)"
    )
