"""A placement as text, JSON, or a placement file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.goodput.placements import Degrees, InstanceGroup, PlacementPlan, PlacementPrices
from cost_model.goodput.queueing import crossing, mean_ttft_s
from cost_model.goodput.slo import Slo
from cost_model.quantities import counted, round_to, seconds_text
from fastdecode.core.config.placement import PLACEMENT_FORMAT


@dataclass(frozen=True)
class Nearest:
    """A TTFT and a TPOT that could be kept, by requests that never wait."""

    ttft_s: float
    tpot_s: float
    degrees: Degrees
    """Of the instance that keeps the TPOT."""
    sockets: int | None
    """Of it; 0: its K and V are on the GPU; None: no instance decodes."""
    is_bound: bool
    """More sockets would make it shorter, and there may be none."""

    @property
    def told(self) -> str:
        """On what the TPOT is kept."""
        if self.sockets is None:
            return ""
        if not self.sockets:
            return f", the latter on {self.degrees} with KV on the GPU"
        more = ", which are all that there may be: more make it shorter" if self.is_bound else ""
        return f", the latter on {self.degrees} and {counted(self.sockets, 'socket')}{more}"


@dataclass(frozen=True)
class Answer:
    """Both kinds of plan, and which one it is to be."""

    model: str
    slo: Slo
    how: str
    rate: float
    num_gpus: int
    """That there are."""
    prices: PlacementPrices
    objective: str
    disaggregated: PlacementPlan | None
    colocated: PlacementPlan | None
    nearest: Nearest | None
    """Where no plan keeps the SLO."""
    provenance: str
    workload: str
    notes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    """Of the search, that bind."""

    @property
    def plans(self) -> list[PlacementPlan]:
        return [plan for plan in (self.disaggregated, self.colocated) if plan is not None]

    def keeps(self, plan: PlacementPlan) -> bool:
        """It keeps the SLO at the asked rate, on the GPUs that there are."""
        enough = plan.num_gpus <= self.num_gpus
        return enough and plan.is_carried

    @property
    def best(self) -> PlacementPlan | None:
        """The cheapest that keeps the SLO: by GPUs, or by price. None: none does."""
        fitting = [plan for plan in self.plans if self.keeps(plan)]
        return min(fitting, key=self._cost, default=None)

    def _cost(self, plan: PlacementPlan) -> tuple[float, float, bool]:
        gpus, price = float(plan.num_gpus), plan.price(self.prices)
        first, second = (gpus, price) if self.objective == "gpu" else (price, gpus)
        return first, second, plan.kind == "disaggregated"

    @property
    def verdict(self) -> str:
        best = self.best
        if best is None:
            return self._infeasible()
        other = self.colocated if best is self.disaggregated else self.disaggregated
        words = "disaggregate" if best.kind == "disaggregated" else "don't disaggregate"
        if other is None:
            return f"{words}: the other way, no instance keeps the SLO"
        if not self.keeps(other):
            return (
                f"{words}: the other way takes {counted(other.num_gpus, 'GPU')}, or misses the SLO"
            )
        if _gpus(best) == _gpus(other):
            return f"{words}: either way takes {_gpus(best)}"
        ratio = f"{round_to(best.gpu_goodput / other.gpu_goodput, 3):g}"
        beside = f"{_gpus(best)} instead of {_gpus(other)}"
        if best.num_gpus == other.num_gpus:
            return f"{words}: {beside}"
        return f"{words}: {ratio} times the goodput a GPU of the other way; {beside}"

    def _infeasible(self) -> str:
        if self.nearest is not None:
            ttft, tpot = seconds_text(self.nearest.ttft_s), seconds_text(self.nearest.tpot_s)
            return (
                f"no instance keeps the SLO, at any rate; the nearest that one keeps: "
                f"ttft={ttft.replace(' ', '')},tpot={tpot.replace(' ', '')}{self.nearest.told}"
            )
        least = min(self.plans, key=lambda plan: plan.num_gpus)
        most = round_to(max(plan.carried_by(self.num_gpus) for plan in self.plans), 3)
        if least.num_gpus <= self.num_gpus:
            return f"the SLO is missed at {self.rate:g} requests a second; try a lower --rate"
        return (
            f"{self.rate:g} requests a second take {counted(least.num_gpus, 'GPU')} and there are "
            f"{self.num_gpus}, which carry about {most:g}: give more, or lower --rate"
            if most
            else f"{self.num_gpus}, too few for any instance that keeps the SLO: give more"
        )


def _gpus(plan: PlacementPlan) -> str:
    sockets = f" and {counted(plan.num_sockets, 'socket')}" if plan.num_sockets else ""
    return f"{counted(plan.num_gpus, 'GPU')}{sockets}"


def as_json(answer: Answer) -> dict[str, Any]:
    best = answer.best
    return {
        "format": "fastdecode.plan.goodput",
        "version": 1,
        "model": answer.model,
        "rate": answer.rate,
        "slo": {
            "ttft_s": answer.slo.ttft_s,
            "tpot_s": answer.slo.tpot_s,
            "attainment": answer.slo.attainment,
            "semantics": answer.how,
        },
        "objective": answer.objective,
        "verdict": answer.verdict,
        "chosen": None if best is None else best.kind,
        "nearest_slo_s": answer.nearest and (answer.nearest.ttft_s, answer.nearest.tpot_s),
        "nearest_sockets": answer.nearest and answer.nearest.sockets,
        "plans": {plan.kind: _plan_as_json(plan, answer) for plan in answer.plans},
        "times": answer.provenance,
        "workload": answer.workload,
        "notes": list(answer.notes),
        "limits": list(answer.limits),
    }


def _plan_as_json(plan: PlacementPlan, answer: Answer) -> dict[str, Any]:
    ttft_s, tpot_s = plan.quantiles(answer.slo)
    return {
        "gpus": plan.num_gpus,
        "sockets": plan.num_sockets,
        "price": plan.price(answer.prices),
        "goodput": plan.goodput,
        "goodput_per_gpu": plan.gpu_goodput,
        "goodput_per_price": plan.goodput / plan.price(answer.prices),
        "attainment": plan.share,
        "keeps_slo": answer.keeps(plan),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "binds": binds(plan, answer.slo),
        "prefill_busy": plan.run.prefill_busy,
        "decode_busy": plan.run.decode_busy,
        "port_busy": plan.run.link_busy,
        "most_buffered_tokens": plan.run.most_buffered,
        "segments": plan.segments,
        "instances": [_instances_as_json(each) for each in plan.instances],
    }


def _instances_as_json(each: InstanceGroup) -> dict[str, Any]:
    return {
        "role": each.role,
        "count": each.count,
        "tp": each.degrees.tp,
        "pp": each.degrees.pp,
        "sockets": each.sockets,
        "goodput": each.goodput,
    }


def binds(plan: PlacementPlan, slo: Slo) -> str:
    """Which limit the requests come nearer to."""
    ttft_s, tpot_s = plan.quantiles(slo)
    return "ttft" if ttft_s / slo.ttft_s >= tpot_s / slo.tpot_s else "tpot"


def as_text(answer: Answer, *, explain: bool = False) -> str:
    slo = answer.slo
    lines = [
        f"{answer.model}: {answer.rate:g} requests a second, of which {slo.attainment:.0%} are to "
        f"have their first token within {seconds_text(slo.ttft_s)}",
        f"and the others within {seconds_text(slo.tpot_s)} each ({answer.how}); "
        f"{counted(answer.num_gpus, 'GPU')}",
        f"{answer.workload}",
        "",
        f"  Verdict  {answer.verdict}",
        *(f"  Limit    {limit}" for limit in answer.limits),
    ]
    for plan in answer.plans:
        lines += ["", *_plan_lines(plan, answer)]
        if any(each.is_on_device for each in plan.instances):
            lines.append("    KV on the GPU: start it as fastdecode instance --kv-placement gpu")
    if explain:
        lines += ["", *_explain_lines(answer)]
    return "\n".join(lines)


def _plan_lines(plan: PlacementPlan, answer: Answer) -> list[str]:
    ttft_s, tpot_s = plan.quantiles(answer.slo)
    chosen = "  <- chosen" if plan is answer.best else ""
    lines = [f"  {plan.kind}{chosen}"]
    for each in plan.instances:
        sockets = f", {counted(each.sockets, 'socket')} each" if each.sockets else ""
        sockets += ", KV on the GPU" if each.is_on_device else ""
        gpus = counted(each.degrees.num_gpus, "GPU")
        lines.append(
            f"    {each.count} x {each.role} ({each.degrees}: {gpus}{sockets}), "
            f"{round_to(each.goodput, 3):g} requests a second each"
        )
    lines += [
        f"    {_gpus(plan)}, price {round_to(plan.price(answer.prices), 3):g}; "
        f"{round_to(plan.gpu_goodput, 3):g} requests a second and GPU",
        f"    at {answer.rate:g} a second {plan.share:.1%} keep the SLO; at the "
        f"{answer.slo.attainment:.0%} quantile TTFT {seconds_text(ttft_s)}, TPOT "
        f"{seconds_text(tpot_s)}; {binds(plan, answer.slo)} binds",
    ]
    return lines


def _explain_lines(answer: Answer) -> list[str]:
    lines = [f"  Times     {answer.provenance}"]
    for plan in answer.plans:
        run = plan.run
        if plan.kind == "disaggregated":
            lines += [
                f"  Busy      prefill {_shares(run.prefill_busy)}, decode "
                f"{_shares(run.decode_busy)}, prefill hosts' ports {_shares(run.link_busy)}",
                f"  Buffer    at most {run.most_buffered:,} tokens on a prefill instance",
            ]
        else:
            lines.append(f"  Busy      instances for both {_shares(run.decode_busy)}")
    lines += [f"  Note      {note}" for note in answer.notes]
    return lines


def queueing_notes(prompt_s: float, two_gpus_s: float | None, rate: float) -> list[str]:
    """What closed forms say of a mean prompt's queue.

    Args:
        prompt_s: of a mean prompt on one GPU.
        two_gpus_s: on two that share every layer; None: there are none.
    """
    mean_s = mean_ttft_s(prompt_s, prompt_s, rate)
    mean = seconds_text(mean_s) if math.isfinite(mean_s) else "grows without end"
    notes = [f"one GPU, prompts alone, closed form: mean TTFT {mean} at {rate:g}/s"]
    if two_gpus_s is not None and 1.0 <= prompt_s / two_gpus_s <= 2.0:
        x = crossing(prompt_s / two_gpus_s)
        notes.append(
            f"two GPUs: tensor parallel is {round_to(prompt_s / two_gpus_s, 3):g} times as fast, "
            f"better than a pipeline below {round_to(x / prompt_s, 3):g} requests a second"
        )
    return notes


def _shares(shares: Sequence[float]) -> str:
    mean = sum(shares) / len(shares) if shares else 0.0
    return f"{mean:.0%}"


def placement_file(answer: Answer) -> dict[str, Any]:
    """What ``launch`` is to read."""
    plan = answer.best
    assert plan is not None
    return {
        "format": PLACEMENT_FORMAT,
        "model": answer.model,
        "instances": [
            {
                "role": each.role,
                "tp": each.degrees.tp,
                "pp": each.degrees.pp,
                "r_worker_sockets": each.sockets,
            }
            for each in plan.instances
            for _ in range(each.count)
        ],
        "slo": {"ttft_s": answer.slo.ttft_s, "tpot_s": answer.slo.tpot_s,
                "attainment": answer.slo.attainment},
        "workload": {"rate": answer.rate, "described": answer.workload},
    }  # fmt: skip
