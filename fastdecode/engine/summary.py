"""What a run took and gave: the numbers behind ``--summary``, and the few lines that a person reads."""

from __future__ import annotations

import resource
import sys
from typing import Any

from fastdecode.engine.batch import BatchResult
from fastdecode.engine.llm import LLM


def summarise(llm: LLM, result: BatchResult) -> dict[str, Any]:
    """Timings in seconds, measured inside this process; see ``render`` for how to read them."""
    stats = llm.stats
    step_s = max(stats.step_s, 1e-12)
    return {
        "requests": result.num_requests,
        "failed": result.num_failed,
        "load_s": llm.load_s,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "total_s": llm.load_s + stats.step_s,
        "steps": stats.num_steps,
        "prompt_tokens": stats.num_prompt_tokens,
        "output_tokens": stats.num_output_tokens,
        "output_tokens_per_s": stats.num_output_tokens / step_s,
        "s_share": stats.s_compute_s / step_s,
        "wait_share": stats.wait_s / step_s,
        "r_share": stats.r_compute_s / step_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "model": llm.config.model,
        "dtype": llm.dtype.value,
        "kv_dtype": llm.kv_dtype.value,
        "r_workers": llm.config.r_workers,
        "r_threads": llm.r_threads,
    }


def peak_rss_bytes() -> int:
    """Most memory this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def render(summary: dict[str, Any]) -> str:
    """The summary in a few lines for a person."""
    s = summary
    return "\n".join(
        [
            f"{s['requests'] - s['failed']} requests done, {s['failed']} failed; "
            f"{s['prompt_tokens']} prompt and {s['output_tokens']} output tokens in {s['steps']} steps",
            f"{s['output_tokens_per_s']:.0f} output tokens/s; "
            f"load {s['load_s']:.2f} s, prefill {s['prefill_s']:.2f} s, decode {s['decode_s']:.2f} s; "
            f"peak memory {s['peak_rss_bytes'] / 1e9:.2f} GB",
            f"of each step on average: S-part {s['s_share']:.0%}, waiting for R-workers {s['wait_share']:.0%} "
            f"(the busiest of {s['r_workers']} R-workers computed {s['r_share']:.0%} of the time)",
        ]
    )
