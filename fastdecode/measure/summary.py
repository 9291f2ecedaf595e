"""What a run took and gave: the numbers behind ``--summary``, and the few lines
that a person reads."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import asdict
from typing import Any

from cost_model.quantities import times_text
from fastdecode.engine.latency import LatencyHistogram
from fastdecode.engine.llm import LLM
from fastdecode.engine.stats import EngineStats

PERCENTILES = (50, 90, 99)


def summarise(llm: LLM, *, started_s: float, num_requests: int, num_failed: int) -> dict[str, Any]:
    """Timings in seconds, measured inside this process; see ``render`` for how
    to read them.

    ``total_s`` is wall time since ``started_s`` (of ``time.perf_counter``);
    beside loading and steps it holds imports, reading and writing.

    ``s_idle`` and ``r_idle`` are the bubbles: the parts of the time in which
    the S-worker waited for R-workers, and in which an R-worker, on average,
    computed nothing.
    """
    stats, facts, now = llm.stats, llm.facts, llm.snapshot().engine
    step_s = max(stats.step_s, 1e-12)
    return {
        "requests": num_requests,
        "failed": num_failed,
        "load_s": facts.load_s,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "total_s": time.perf_counter() - started_s,
        "steps": stats.num_steps,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_prompt_tokens": stats.num_cached_prompt_tokens,
        "gap_tokens": stats.num_gap_tokens,
        "output_tokens": stats.num_output_tokens,
        "output_tokens_per_s": stats.num_output_tokens / step_s,
        **_of_steps(stats, step_s, facts.num_r_workers // max(1, len(facts.stage_layers))),
        "load_mean_tokens": stats.load_mean,
        "load_peak_tokens": stats.load_peak,
        "ttft_s": _percentiles(stats.ttft),
        "tpot_s": _percentiles(stats.tpot),
        "peak_rss_bytes": peak_rss_bytes(),
        "model": llm.config.model,
        "dtype": facts.dtype.value,
        "kv_dtype": facts.kv_dtype.value,
        "kv_placement": facts.kv_placement,
        "r_workers": facts.num_r_workers,
        **_of_hybrid(stats),
        "r_workers_lost": now.num_r_workers - now.num_live_r_workers,
        "r_workers_rejoined": stats.num_rejoined,
        "recomputed": stats.num_recomputed,
        "replicas": _replicas(stats),
        "tiers": asdict(stats.tiers) if stats.tiers.num_slots else None,
        "swap": None if stats.swap is None else asdict(stats.swap),
        "session": _session(stats),
        "r_threads": facts.r_threads,
        "stage_layers": list(facts.stage_layers),
        "prompt_stage_layers": list(facts.prompt_stage_layers),
        "instances": _instances(llm),
    }


def _of_hybrid(stats: EngineStats) -> dict[str, Any]:
    if stats.hybrid is None:
        return {"hybrid_steps": None, "hybrid_closed": None}
    return {"hybrid_steps": dict(stats.hybrid.steps), "hybrid_closed": stats.hybrid.num_closed}


def _of_steps(stats: EngineStats, step_s: float, num_r_workers: int) -> dict[str, float]:
    """Of the time of all steps; with several stages, in the first one, which has
    so many R-workers."""
    return {
        "s_share": stats.s_compute_s / step_s,
        "wait_share": stats.wait_s / step_s,
        "r_share": stats.r_compute_s / step_s,
        "s_idle": stats.wait_s / step_s,
        "r_idle": max(0.0, 1 - stats.r_busy_s / (step_s * max(1, num_r_workers))),
    }


def _session(stats: EngineStats) -> dict[str, Any] | None:
    """What R-workers had kept of the job that is gone on with; None: nothing was
    asked for."""
    found = stats.attached
    if found is None:
        return None
    return {
        "sequences": found.num_sequences,
        "tokens": found.num_tokens,
        "sequences_kept": found.num_held_sequences,
        "tokens_kept": found.num_held_tokens,
    }


def _instances(llm: LLM) -> dict[str, Any] | None:
    """What has come of several instances; None: there is one engine."""
    chosen, stats = llm.config.instances, llm.stats
    if not chosen.instances:
        return None
    return {
        "instances": list(chosen.instances),
        "handed_over": stats.num_handed_over,
        "failed_fetches": stats.num_failed_fetches,
        "moved": stats.num_moved,
        "role_changes": stats.num_role_changes,
        "fetched_bytes": stats.fetched_bytes,
        "fetch_s": stats.fetch_s,
    }


def _replicas(stats: EngineStats) -> dict[str, Any] | None:
    """What has become of replicas; None: there are none."""
    figures, resumed = stats.replicas, stats.resumed
    if figures is None:
        return None
    return {
        "failovers": [asdict(failover) for failover in figures.failovers],
        "returns": [asdict(each) for each in figures.returns],
        "r_workers_recomputed": figures.num_recomputed_holders,
        "sequences_resumed": resumed.num_sequences,
        "tokens_resumed": resumed.num_tokens,
        "tokens_recomputed": resumed.num_tokens_lost,
        "unprotected_s": figures.unprotected_s,
        "rings": figures.num_rings,
        "lag_steps": {f"p{percent}": figures.lag(percent) for percent in (50, 99, 100)},
    }


def _percentiles(latency: LatencyHistogram) -> dict[str, float | None]:
    return {f"p{percent}": latency.percentile(percent) for percent in PERCENTILES}


def peak_rss_bytes() -> int:
    """Most memory this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _shares(s: dict[str, Any]) -> str:
    """Of the time that steps took."""
    num_stages = len(s.get("stage_layers") or [1])
    has_others = num_stages > 1 or bool(s.get("prompt_stage_layers"))
    if not s["r_workers"] and not has_others:
        return "time of a step: all of it on the S-worker's device, attention included"
    others = ["R-workers"] * bool(s["r_workers"]) + ["other stages"] * has_others
    told = (
        f"time of a step: layers with weights (S-part) {s['s_share']:.0%}, waiting for "
        f"{' and '.join(others)} {s['wait_share']:.0%}"
    )
    if not s["r_workers"]:
        return f"{told}; the stages' devices run attention, too"
    return (
        f"{told}; the busiest of {s['r_workers'] // num_stages} R-worker(s) computed "
        f"{s['r_share']:.0%} of the time, on average they were idle {s['r_idle']:.0%}"
    )


def _stages(s: dict[str, Any]) -> list[str]:
    """With several pipeline stages: who had what."""
    layers, of_prompts = s.get("stage_layers") or [], s.get("prompt_stage_layers") or []
    told = []
    if len(layers) > 1:
        each = s["r_workers"] // len(layers)
        own = f"{each} R-worker(s)" if each else "the KV cache of its layers on its device"
        told.append(
            f"{len(layers)} stages of {', '.join(map(str, layers))} layers, each with "
            f"{own}; the times above are the first stage's"
        )
    if of_prompts:
        told.append(
            f"{len(of_prompts)} stage(s) of {', '.join(map(str, of_prompts))} layers ran prompts "
            "only"
        )
    return told


def _sides(s: dict[str, Any]) -> list[str]:
    """With KV on both sides: which was used, and whether that was regretted."""
    steps, closed = s.get("hybrid_steps"), s.get("hybrid_closed")
    if not steps:
        return []
    total = sum(steps.values())
    modes = ", ".join(
        f"{mode} {number / total:.0%}"
        for mode, number in sorted(steps.items(), key=lambda item: -item[1])
    )
    line = f"hybrid KV, steps of the device's lane: {modes}"
    if set(steps) == {"gpu-only"} and not closed:
        line += " (R-workers were not needed, or would not have paid, as with --kv-placement gpu)"
    if "R-only" in steps:
        line += "; R-only: R-workers alone, where the device would have delayed them"
    if closed:
        line += (
            f"; {closed} time(s) new sequences stayed on the device for a while, since R-workers "
            "made the steps slower"
        )
    return [line]


def _failovers(s: dict[str, Any]) -> list[str]:
    """What neighbours went on with."""
    replicas = s.get("replicas")
    if not replicas or not replicas["failovers"]:
        return []
    stalls = [each["drain_s"] + each["resume_s"] for each in replicas["failovers"]]
    return [
        f"{len(stalls)} lost R-worker(s) were taken over from their replica, the slowest in "
        f"{max(stalls):.3f} s: {replicas['sequences_resumed']} sequences continued with "
        f"{replicas['tokens_resumed']} cached tokens, {replicas['tokens_recomputed']} tokens were "
        f"recomputed; a cache had no replica for {replicas['unprotected_s']:.1f} s; all were "
        f"protected again {replicas['rings']} time(s)",
        *_returns(replicas["returns"]),
    ]


def _returns(returns: list[dict[str, Any]]) -> list[str]:
    """Replacements that got a lost R-worker's cache back."""
    if not returns:
        return []
    stalls = [each["drain_s"] + each["resume_s"] for each in returns]
    copies = [each["copy_s"] for each in returns]
    return [
        f"{len(returns)} replacement R-worker(s) got a cache back from a neighbour: copied in the "
        f"background in {max(copies):.2f} s, taken over in {max(stalls):.3f} s"
    ]


_FAULTS = {
    "num_unread": "could not be read",
    "num_damaged": "were damaged",
    "num_unwritten": "could not be written",
    "num_late": "came too late",
}


def _tiers(s: dict[str, Any]) -> list[str]:
    """What lower tiers took, and gave back."""
    tiers = s.get("tiers")
    if not tiers:
        return []
    rate = tiers["fetched_bytes"] / max(tiers["fetch_s"], 1e-9) / 1e6
    told = f"; {tiers['num_failed']} could not be moved" if tiers["num_failed"] else ""
    faults = [f"{tiers[name]} {what}" for name, what in _FAULTS.items() if tiers[name]]
    told += f" ({', '.join(faults)})" if faults else ""
    return [
        f"KV blocks in lower tiers: {tiers['num_found']} found at the start, "
        f"{tiers['num_stored']} stored, {tiers['num_fetched']} restored at {rate:.0f} MB/s, "
        f"{tiers['num_dropped']} evicted{told}"
    ]


def _swapped(s: dict[str, Any]) -> list[str]:
    """What was copied of lanes' KV, in the first stage."""
    swap = s.get("swap")
    if not swap or not swap["num_steps"]:
        return []
    blocks_in, steps = swap["num_blocks_in"], swap["num_steps"]
    return [
        f"swap, for each step of the first stage: {blocks_in / steps:.0f} KV blocks in, "
        f"{swap['num_tokens_out'] / steps:.0f} tokens out; {swap['num_late_blocks']} blocks came "
        f"late, {swap['num_unused_blocks']} were not needed"
    ]


def render(summary: dict[str, Any]) -> str:
    """The summary in a few lines for a person."""
    s = summary
    trouble = []
    if s["r_workers_lost"] or s["r_workers_rejoined"]:
        trouble.append(
            f"R-workers: {s['r_workers_lost']} of {s['r_workers']} are lost, "
            f"{s['r_workers_rejoined']} were replaced; "
            f"{s['recomputed']} sequences were recomputed on other R-workers"
        )
    if s["cached_prompt_tokens"]:
        told = s["prompt_tokens"] + s["cached_prompt_tokens"]
        trouble.append(
            f"prefix cache: {s['cached_prompt_tokens']} prompt tokens were reused, "
            f"{s['cached_prompt_tokens'] / told:.0%} of all"
        )
    trouble += _tiers(s)
    return "\n".join(
        [
            f"{s['requests'] - s['failed']} requests done, {s['failed']} failed; "
            f"{s['prompt_tokens']} prompt and {s['output_tokens']} output tokens in {s['steps']} "
            "steps",
            f"{s['output_tokens_per_s']:.0f} output tokens/s; "
            f"load {s['load_s']:.2f} s, prefill {s['prefill_s']:.2f} s, decode "
            f"{s['decode_s']:.2f} s; "
            f"peak memory {s['peak_rss_bytes'] / 1e9:.2f} GB",
            _shares(s),
            f"KV cache: {s['load_mean_tokens']:.0f} tokens on average, "
            f"{s['load_peak_tokens']} at most; "
            f"time to first token {_shown(s['ttft_s'])}, per token {_shown(s['tpot_s'])}",
            *_stages(s),
            *_sides(s),
            *_failovers(s),
            *_swapped(s),
            *trouble,
        ]
    )


def _shown(percentiles: dict[str, float | None]) -> str:
    return f"{times_text(tuple(percentiles.values()))} (p50/p90/p99)"
