"""The best pipeline of each kind for so many machines, over a trace: prompts and
tokens in one pipeline, in several of them side by side, or each in their own
(DéjàVu, appendix B)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from cost_model.disaggregate.profile import MachineProfile
from cost_model.simulate.pipelines import (
    NO_FAILURES,
    Failures,
    Microbatch,
    PipelineRun,
    run_colocated,
    run_data_parallel,
    run_disaggregated,
)
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import RequestTrace

Kind = Literal["one pipeline", "data-parallel", "disaggregated"]
KINDS: tuple[Kind, ...] = ("one pipeline", "data-parallel", "disaggregated")


@dataclass(frozen=True)
class PipelineLayout:
    kind: Kind
    microbatch: int
    """Sequences."""
    pipelines: int
    """Side by side; 1 unless data-parallel."""
    prompt_stages: int
    """Of each pipeline; of the one with prompts, where it is disaggregated."""
    token_stages: int

    @property
    def machines(self) -> int:
        more = self.prompt_stages if self.kind == "disaggregated" else 0
        return self.pipelines * self.token_stages + more

    def __str__(self) -> str:
        stages = {
            "one pipeline": f"{self.token_stages}",
            "data-parallel": f"{self.pipelines} x {self.token_stages}",
            "disaggregated": f"{self.prompt_stages} + {self.token_stages}",
        }[self.kind]
        return f"{stages}, {self.microbatch}"


@dataclass(frozen=True)
class Simulated:
    layout: PipelineLayout
    makespan_s: float
    token_latency_s: float
    """The median microbatch's seconds from arrival to end, over its tokens."""
    busy_share: float


class Comparison:
    """Layouts for one trace and one kind of machine.

    Args:
        trace: requests; as many as a microbatch holds run together, in order,
            until the longest is over.
        machine_gb: None: anything fits.
        transfer_s: what streaming K and V adds to each prompt stage.
    """

    def __init__(
        self,
        trace: RequestTrace,
        profile: MachineProfile,
        machine_gb: Fraction | None = None,
        transfer_s: float = 0.0,
    ) -> None:
        if trace.unit != "s":
            raise ConfigError("--trace: pipelines know no steps; give arrivals as arrival_s")
        longest = max(request.num_prompt_tokens for request in trace.requests)
        if longest > profile.prompt_tokens:
            raise ConfigError(
                f"--trace has a prompt of {longest} tokens, but --profile was measured with "
                f"{profile.prompt_tokens}: measure it with prompts as long as the trace's"
            )
        self._trace = trace
        self._profile = profile
        self._machine_gb = machine_gb
        self._transfer_s = transfer_s
        self._microbatches: dict[int, list[Microbatch]] = {}

    @cached_property
    def _total_tokens(self) -> int:
        """Of the longest sequence at its end."""
        outputs = max(request.num_output_tokens for request in self._trace.requests)
        return self._profile.prompt_tokens + outputs

    def layouts(self, kind: Kind, machines: int) -> Iterator[PipelineLayout]:
        """All that use so many machines and fit."""
        for size in self._profile.microbatches:
            yield from filter(self._fits, _layouts(kind, machines, size))

    def best(
        self, kind: Kind, machines: int, progress: Callable[[], object] = lambda: None
    ) -> Simulated | None:
        """The layout with the shortest makespan; of equal ones, the smallest
        microbatch and the fewest prompt stages. None: nothing fits.

        Args:
            progress: called after each that was run.
        """
        every = enumerate(self.layouts(kind, machines))
        ordered = sorted((self._least_s(layout), order, layout) for order, layout in every)
        best: tuple[float, int, Simulated] | None = None
        for least_s, order, layout in ordered:
            if best is not None and least_s > best[0]:
                break  # nor can any of the others be better
            found = self.simulate(layout)
            if best is None or (found.makespan_s, order) < best[:2]:
                best = (found.makespan_s, order, found)
            progress()
        return None if best is None else best[2]

    def with_failures(self, one: Simulated, failures: Failures) -> dict[str, Simulated]:
        """One pipeline that loses a stage at these moments: with what is lost computed
        again, and with replicas."""
        return {
            "failures": self.simulate(one.layout, failures),
            "with replicas": self.simulate(one.layout, replace(failures, has_replicas=True)),
        }

    def simulate(self, layout: PipelineLayout, failures: Failures = NO_FAILURES) -> Simulated:
        """``failures``: of one pipeline."""
        microbatches = self._grouped(layout.microbatch)
        runs = self._run(layout, failures)
        finished_s = [each for run in runs for each in run.finished_s]
        per_token = [
            (end_s - each.arrived_s) / each.num_tokens
            for end_s, each in zip(finished_s, microbatches, strict=True)
        ]
        makespan_s = max(run.makespan_s for run in runs)
        busy_s = sum(sum(run.busy_s) for run in runs)
        busy_share = busy_s / (layout.machines * makespan_s)
        return Simulated(layout, makespan_s, statistics.median(per_token), busy_share)

    def _run(self, layout: PipelineLayout, failures: Failures) -> list[PipelineRun]:
        """One run for each pipeline that shares the trace."""
        microbatches = self._grouped(layout.microbatch)
        times = replace(self._profile.of(layout.microbatch), transfer_s=self._transfer_s)
        if layout.kind == "data-parallel":
            return run_data_parallel(microbatches, layout.pipelines, layout.token_stages, times)
        if layout.kind == "one pipeline":
            return [run_colocated(microbatches, layout.token_stages, times, failures)]
        stages = (layout.prompt_stages, layout.token_stages)
        return [run_disaggregated(microbatches, *stages, times)]

    def _least_s(self, layout: PipelineLayout) -> float:
        """No run can be shorter: the work of the busiest stage. A little less,
        for rounding."""
        microbatches = self._grouped(layout.microbatch)
        point = self._profile.of(layout.microbatch)
        tokens = sum(each.num_tokens for each in microbatches)
        prompts_s = len(microbatches) * point.prompt_s / layout.prompt_stages
        tokens_s = tokens * point.token_s / layout.token_stages
        both = layout.kind != "disaggregated"
        least_s = prompts_s + tokens_s if both else max(prompts_s, tokens_s)
        return least_s / layout.pipelines * (1 - 1e-9)

    def _fits(self, layout: PipelineLayout) -> bool:
        if self._machine_gb is None:
            return True
        memory, size = self._profile.memory, layout.microbatch
        kv_of_prompts = self._profile.prompt_tokens
        if layout.kind != "disaggregated":
            kv_of_prompts = self._total_tokens
        return memory.fits(
            layout.prompt_stages, size, kv_of_prompts, self._machine_gb
        ) and memory.fits(layout.token_stages, size, self._total_tokens, self._machine_gb)

    def _grouped(self, size: int) -> list[Microbatch]:
        if size not in self._microbatches:
            self._microbatches[size] = list(grouped(self._trace, size))
        return self._microbatches[size]


def grouped(trace: RequestTrace, size: int) -> Iterable[Microbatch]:
    """Requests in microbatches of ``size``: there once the last of them is, over
    once the longest is."""
    requests = trace.requests
    for begin in range(0, len(requests), size):
        group = requests[begin : begin + size]
        tokens = max(request.num_output_tokens for request in group)
        yield Microbatch(tokens, max(request.arrival for request in group))


def _layouts(kind: Kind, machines: int, size: int) -> Sequence[PipelineLayout]:
    if kind == "one pipeline":
        return [PipelineLayout(kind, size, 1, machines, machines)]
    if kind == "data-parallel":
        counts = (count for count in range(2, machines + 1) if machines % count == 0)
        each = ((count, machines // count) for count in counts)
        return [PipelineLayout(kind, size, count, stages, stages) for count, stages in each]
    return [PipelineLayout(kind, size, 1, few, machines - few) for few in range(1, machines)]
