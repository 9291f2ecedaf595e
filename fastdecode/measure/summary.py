"""Figures of a run: the file of ``--summary``, and the lines that a person reads."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import asdict
from typing import Any

from cost_model.printing import times_text
from fastdecode.engine.llm import LLM
from fastdecode.engine.stats import EngineStats, LatencyHistogram


def summarise(llm: LLM, started_s: float, num_requests: int, num_failed: int) -> dict[str, Any]:
    """Return the figures of a run. Times are seconds, measured inside this process.

    ``total_s`` is wall time since ``started_s`` (of ``time.perf_counter``). It includes imports,
    reading and writing.

    ``s_idle`` and ``r_idle`` are the bubbles: the share of the time in which the S-worker waited
    for R-workers, and in which an R-worker, on average, computed nothing. With several stages,
    shares are those of the first.
    """
    stats, facts, now = llm.stats, llm.facts, llm.snapshot().engine
    step_s = max(stats.step_s, 1e-12)
    num_r_workers = max(1, facts.num_r_workers // max(1, len(facts.stage_layers)))
    found, hybrid, chosen = stats.attached, stats.hybrid, llm.config.instances
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
        "s_share": stats.s_compute_s / step_s,
        "wait_share": stats.wait_s / step_s,
        "r_share": stats.r_compute_s / step_s,
        "s_idle": stats.wait_s / step_s,
        "r_idle": max(0.0, 1 - stats.r_busy_s / (step_s * num_r_workers)),
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
        "hybrid_steps": None if hybrid is None else dict(hybrid.steps),
        "hybrid_closed": None if hybrid is None else hybrid.num_closed,
        "r_workers_lost": now.num_r_workers - now.num_live_r_workers,
        "r_workers_rejoined": stats.num_rejoined,
        "recomputed": stats.num_recomputed,
        "replicas": _replicas(stats),
        "tiers": asdict(stats.tiers) if stats.tiers.num_slots else None,
        "swap": None if stats.swap is None else asdict(stats.swap),
        "session": found
        and {  # what R-workers had kept of a resumed job
            "sequences": found.num_sequences,
            "tokens": found.num_tokens,
            "sequences_kept": found.num_held_sequences,
            "tokens_kept": found.num_held_tokens,
        },
        "r_threads": facts.r_threads,
        "stage_layers": list(facts.stage_layers),
        "instances": {
            "instances": list(chosen.instances),
            "handed_over": stats.num_handed_over,
            "failed_fetches": stats.num_failed_fetches,
            "moved": stats.num_moved,
            "role_changes": stats.num_role_changes,
            "fetched_bytes": stats.fetched_bytes,
            "fetch_s": stats.fetch_s,
        }
        if chosen.instances
        else None,
    }


def _replicas(stats: EngineStats) -> dict[str, Any] | None:
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
    return {f"p{percent}": latency.percentile(percent) for percent in (50, 90, 99)}


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def render(s: dict[str, Any]) -> str:
    ttft, tpot = (times_text(tuple(s[name].values())) for name in ("ttft_s", "tpot_s"))
    parts = (_stages, _hybrid, _failovers, _swap, _losses, _prefix_cache, _tiers)
    return "\n".join([
        f"{s['requests'] - s['failed']} requests done, {s['failed']} failed; "
        f"{s['prompt_tokens']} prompt and {s['output_tokens']} output tokens in {s['steps']} steps",
        f"{s['output_tokens_per_s']:.0f} output tokens/s; load {s['load_s']:.2f} s, prefill "
        f"{s['prefill_s']:.2f} s, decode {s['decode_s']:.2f} s; peak memory "
        f"{s['peak_rss_bytes'] / 1e9:.2f} GB",
        _shares(s),
        f"KV cache: {s['load_mean_tokens']:.0f} tokens on average, {s['load_peak_tokens']} at "
        f"most; time to first token {ttft} (p50/p90/p99), per token {tpot} (p50/p90/p99)",
        *filter(None, (part(s) for part in parts)),
    ])  # fmt: skip


def _shares(s: dict[str, Any]) -> str:
    num_stages = len(s["stage_layers"] or [1])
    has_others = num_stages > 1
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


def _stages(s: dict[str, Any]) -> str:
    layers = s["stage_layers"]
    if len(layers) < 2:
        return ""
    each = s["r_workers"] // len(layers)
    own = f"{each} R-worker(s)" if each else "the KV cache of its layers on its device"
    return (
        f"{len(layers)} stages of {', '.join(map(str, layers))} layers, each with {own}; the times "
        "above are the first stage's"
    )


def _hybrid(s: dict[str, Any]) -> str:
    steps, closed = s["hybrid_steps"], s["hybrid_closed"]
    if not steps:
        return ""
    total = sum(steps.values())
    most_first = sorted(steps.items(), key=lambda item: -item[1])
    modes = ", ".join(f"{mode} {number / total:.0%}" for mode, number in most_first)
    told = f"hybrid KV, steps of the device's lane: {modes}"
    if set(steps) == {"gpu-only"} and not closed:
        told += " (R-workers were not needed, or would not have paid, as with --kv-placement gpu)"
    if "R-only" in steps:
        told += "; R-only: R-workers alone, while no sequence was on the device"
    if closed:
        told += (
            f"; {closed} time(s) new sequences stayed on the device for a while, since R-workers "
            "made the steps slower"
        )
    return told


def _failovers(s: dict[str, Any]) -> str:
    replicas = s["replicas"]
    if not replicas or not replicas["failovers"]:
        return ""
    slowest = max(each["drain_s"] + each["resume_s"] for each in replicas["failovers"])
    told = (
        f"{len(replicas['failovers'])} lost R-worker(s) were taken over from their replica, the "
        f"slowest in {slowest:.3f} s: {replicas['sequences_resumed']} sequences continued with "
        f"{replicas['tokens_resumed']} cached tokens, {replicas['tokens_recomputed']} tokens were "
        f"recomputed; a cache had no replica for {replicas['unprotected_s']:.1f} s"
    )
    if replicas["rings"]:
        told += f"; all were protected again {replicas['rings']} time(s)"
    if returns := replicas["returns"]:
        copy_s = max(each["copy_s"] for each in returns)
        slowest = max(each["drain_s"] + each["resume_s"] for each in returns)
        told += (
            f"\n{len(returns)} replacement R-worker(s) got a cache back from a neighbour: copied "
            f"in the background in {copy_s:.2f} s, taken over in {slowest:.3f} s"
        )
    return told


def _swap(s: dict[str, Any]) -> str:
    swap = s["swap"]
    if not swap or not swap["num_steps"]:
        return ""
    steps = swap["num_steps"]
    return (
        f"swap, for each step of the first stage: {swap['num_blocks_in'] / steps:.0f} KV blocks "
        f"in, {swap['num_tokens_out'] / steps:.0f} tokens out; {swap['num_late_blocks']} blocks "
        f"came late, {swap['num_unused_blocks']} were not needed"
    )


def _losses(s: dict[str, Any]) -> str:
    if not s["r_workers_lost"] and not s["r_workers_rejoined"]:
        return ""
    return (
        f"R-workers: {s['r_workers_lost']} of {s['r_workers']} are lost, "
        f"{s['r_workers_rejoined']} were replaced; "
        f"{s['recomputed']} sequences were recomputed on other R-workers"
    )


def _prefix_cache(s: dict[str, Any]) -> str:
    cached = s["cached_prompt_tokens"]
    if not cached:
        return ""
    share = cached / (s["prompt_tokens"] + cached)
    return f"prefix cache: {cached} prompt tokens were reused, {share:.0%} of all"


def _tiers(s: dict[str, Any]) -> str:
    tiers = s["tiers"]
    if not tiers:
        return ""
    rate = tiers["fetched_bytes"] / max(tiers["fetch_s"], 1e-9) / 1e6
    told = (
        f"KV blocks in lower tiers: {tiers['num_found']} found at the start, "
        f"{tiers['num_stored']} stored, {tiers['num_fetched']} restored at {rate:.0f} MB/s, "
        f"{tiers['num_dropped']} evicted"
    )
    told += f"; {tiers['num_failed']} could not be moved" if tiers["num_failed"] else ""
    faults = [
        f"{tiers[name]} {what}"
        for name, what in (
            ("num_unread", "could not be read"),
            ("num_damaged", "were damaged"),
            ("num_unwritten", "could not be written"),
            ("num_late", "came too late"),
        )
        if tiers[name]
    ]
    return told + (f" ({', '.join(faults)})" if faults else "")
