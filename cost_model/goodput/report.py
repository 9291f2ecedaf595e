"""A placement as text, JSON, or a placement file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cost_model.goodput.answer import Answer, hardware_text
from cost_model.goodput.placements import PlacementPlan
from cost_model.printing import picked
from cost_model.quantities import counted, round_to, seconds_text
from fastdecode.core.config.placement import PLACEMENT_FORMAT


def as_json(answer: Answer) -> dict[str, Any]:
    asked, best = answer.question, answer.best
    return {
        "format": "fastdecode.plan.goodput",
        "version": 1,
        **picked(asked, "model rate objective"),
        "slo": {**asdict(answer.slo), "semantics": asked.load.how},
        "verdict": answer.verdict,
        "chosen": best and best.kind,
        "nearest_slo_s": answer.nearest and (answer.nearest.ttft_s, answer.nearest.tpot_s),
        "nearest_sockets": answer.nearest and answer.nearest.sockets,
        "plans": {plan.kind: _plan_as_json(plan, answer) for plan in answer.plans},
        "times": answer.provenance,
        "workload": asked.described,
        **picked(answer, "notes limits"),
    }


def _plan_as_json(plan: PlacementPlan, answer: Answer) -> dict[str, Any]:
    price, (ttft_s, tpot_s) = plan.price(answer.question.prices), plan.quantiles
    return {
        "gpus": plan.num_gpus,
        "sockets": plan.num_sockets,
        "price": price,
        "goodput_per_gpu": plan.gpu_goodput,
        "goodput_per_price": plan.goodput / price,
        "attainment": plan.share,
        "keeps_slo": answer.keeps(plan),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        **picked(plan, "goodput binds segments"),
        **picked(plan.run, "prefill_busy decode_busy"),
        "port_busy": plan.run.link_busy,
        "most_buffered_tokens": plan.run.most_buffered,
        "instances": [
            {**picked(each, "role count sockets goodput"), **asdict(each.degrees)}
            for each in plan.instances
        ],
    }


def as_text(answer: Answer, *, explain: bool = False) -> str:
    """For people. ``explain`` adds what is behind it."""
    slo, asked = answer.slo, answer.question
    lines = [
        f"{asked.model}: {asked.rate:g} requests a second, of which {slo.attainment:.0%} are to "
        f"have their first token within {seconds_text(slo.ttft_s)}",
        f"and the others within {seconds_text(slo.tpot_s)} each ({asked.load.how}); "
        f"{counted(asked.num_gpus, 'GPU')}",
        f"{asked.described}",
        "",
        f"  Verdict  {answer.verdict}",
        *(f"  Limit    {limit}" for limit in answer.limits),
    ]
    for plan in answer.plans:
        lines += ["", *_plan_lines(plan, answer)]
    if explain:
        lines += ["", *_explain_lines(answer)]
    return "\n".join(lines)


def _plan_lines(plan: PlacementPlan, answer: Answer) -> list[str]:
    ttft_s, tpot_s = plan.quantiles
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
        f"    {hardware_text(plan)}, price {round_to(plan.price(answer.question.prices), 3):g}; "
        f"{round_to(plan.gpu_goodput, 3):g} requests a second and GPU",
        f"    at {answer.question.rate:g} a second {plan.share:.1%} keep the SLO; at the "
        f"{answer.slo.attainment:.0%} quantile TTFT {seconds_text(ttft_s)}, TPOT "
        f"{seconds_text(tpot_s)}; {plan.binds} binds",
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


def _shares(shares: Sequence[float]) -> str:
    return f"{sum(shares) / max(1, len(shares)):.0%}"


def placement_file(answer: Answer) -> dict[str, Any]:
    """What ``launch`` is to read."""
    plan = answer.best
    assert plan is not None
    return {
        "format": PLACEMENT_FORMAT,
        "model": answer.question.model,
        "instances": [
            {**picked(each, "role"), **asdict(each.degrees), "r_worker_sockets": each.sockets}
            for each in plan.instances
            for _ in range(each.count)
        ],
        "slo": asdict(answer.slo),
        "workload": {"rate": answer.question.rate, "described": answer.question.described},
    }
