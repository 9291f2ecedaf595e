"""What the HTTP process counts and measures of the requests that it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdecode.core.sequence import Request
from fastdecode.server.client import OpenRequests
from fastdecode.server.messages import StatusReport
from fastdecode.server.metrics import (
    N_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    length_buckets,
)
from fastdecode.server.recent import Lately, SampleHistory

REJECTIONS = (
    "queue_full", "draining", "starting", "stalled", "broken", "no_r_worker", "invalid",
    "invalid_api_key", "forbidden", "queue_timeout",
)  # fmt: skip
TOTALS: Mapping[str, tuple[str, str]] = {
    "vllm:num_preemptions_total": (
        "Sequences whose blocks were taken back for others.", "num_suspended"),
    "fastdecode:steps_total": ("Steps made.", "num_steps"),
    "fastdecode:s_busy_seconds_total": ("Seconds the S-worker computed.", "s_compute_s"),
    "fastdecode:s_wait_seconds_total": ("Seconds the S-worker waited for R-workers.", "wait_s"),
    "fastdecode:r_busy_seconds_total": (
        "Seconds the R-workers computed, all together.", "r_busy_s"),
    "fastdecode:recomputed_sequences_total": (
        "Sequences that were started again: their R-worker was lost.", "num_recomputed"),
    "fastdecode:resumed_sequences_total": (
        "Sequences that went on from a replica.", "resumed.num_sequences"),
    "fastdecode:rejoined_r_workers_total": (
        "R-workers that took the place of lost ones.", "num_rejoined"),
    "fastdecode:offloaded_kv_blocks_total": (
        "Kept KV blocks that were copied to a lower tier.", "tiers.num_stored"),
    "fastdecode:restored_kv_blocks_total": (
        "Kept KV blocks that came back from one.", "tiers.num_fetched"),
    "fastdecode:failed_kv_block_moves_total": (
        "Kept KV blocks that could not be copied, or did not come back.", "tiers.num_failed"),
    "fastdecode:handed_over_requests_total": (
        "Requests whose prompts another instance ran.", "num_handed_over"),
    "fastdecode:moved_requests_total": (
        "Requests that another instance went on with after a failure.", "num_moved"),
}  # fmt: skip
"""Counters of the engine: what they say, and where they are in its status report."""
STAGES = ("reading", "preparing", "waiting", "decoding")
"""How far a request has come: its body, its prompts' tokens, the first of its own."""


class Observations:
    """Counters and histograms. A request of several prompts, or of n > 1,
    counts once."""

    def __init__(self, max_model_len: int) -> None:
        tokens = length_buckets(max_model_len)
        self.prompt_tokens = Counter("Prompt tokens of requests that were answered.")
        self.generation_tokens = Counter("Tokens generated.")
        self.cached_tokens = Counter("Prompt tokens that were found in the prefix cache.")
        self.lately_ttft, self.lately_tpot = Lately(), Lately()
        self.history = SampleHistory()
        self.ended = Counter(
            "Requests that are over.", "finished_reason", ("stop", "length", "abort", "error")
        )
        self.succeeded = Counter("Requests that were answered.")
        self.ttft = Histogram("Seconds from acceptance to the first token.", TTFT_BUCKETS)
        self.itl = Histogram("Seconds between tokens of a sequence.", TOKEN_BUCKETS)
        self.tpot = Histogram("Mean seconds per token after the first.", TOKEN_BUCKETS)
        self.e2e = Histogram("Seconds from acceptance to the last token.", REQUEST_BUCKETS)
        self.decode = Histogram("Seconds from the first to the last token.", REQUEST_BUCKETS)
        self.sizes = {
            "request_prompt_tokens": Histogram("Prompt tokens of a request.", tokens),
            "request_generation_tokens": Histogram("Tokens generated for a request.", tokens),
            "request_params_n": Histogram("Completions asked for.", N_BUCKETS),
            "request_params_max_tokens": Histogram("max_tokens asked for.", tokens),
        }
        self.rejected = Counter("Requests that were refused.", "reason", REJECTIONS)
        self.aborted = Counter("Requests whose client went away.", "stage", STAGES)

    def first_token(self, opened: OpenRequests) -> None:
        """A request has its first token."""
        first_s = opened.first_s or opened.accepted_s
        self.ttft.observe(first_s - opened.accepted_s)
        self.lately_ttft.observe(first_s, first_s - opened.accepted_s)

    def tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """A sequence has so many more, so long after its last ones."""
        self.generation_tokens.add(num_tokens)
        if since_last_s is not None:
            self.itl.observe(since_last_s / num_tokens, num_tokens)

    def finished(self, opened: OpenRequests, reason: str) -> None:
        """A request is over: stop, length, abort or error."""
        self.ended.add(1, reason)
        if reason in ("abort", "error"):
            return
        self.succeeded.add(1)
        requests = opened.requests
        first_s, last_s = opened.first_s, opened.last_s
        if first_s is None or last_s is None:
            return
        num_prompt = sum(len(request.prompt_token_ids) for request in requests)
        self.prompt_tokens.add(num_prompt)
        self.cached_tokens.add(opened.num_cached_tokens)
        self.e2e.observe(last_s - opened.accepted_s)
        self.decode.observe(last_s - first_s)
        per_sequence = opened.num_tokens / sum(request.params.n for request in requests)
        if per_sequence > 1:
            tpot_s = (last_s - first_s) / (per_sequence - 1)
            self.tpot.observe(tpot_s)
            self.lately_tpot.observe(last_s, tpot_s)
        self._observe_sizes(requests[0], num_prompt, opened.num_tokens)

    def _observe_sizes(self, request: Request, num_prompt: int, num_tokens: int) -> None:
        self.sizes["request_prompt_tokens"].observe(num_prompt)
        self.sizes["request_generation_tokens"].observe(num_tokens)
        self.sizes["request_params_n"].observe(request.params.n)
        self.sizes["request_params_max_tokens"].observe(request.max_tokens)

    def see(self, now_s: float, seen: StatusReport) -> None:
        """The engine has said how it is: a sample for the history."""
        tokens = self.generation_tokens.total
        self.history.note(now_s, tokens, seen.num_running, seen.num_waiting, seen.kv_used)

    def families(self, seen: StatusReport | None) -> dict[str, Counter | Histogram | Gauge]:
        """All of them by name, with what was last seen of the engine."""
        own: dict[str, Counter | Histogram | Gauge] = {
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:prefix_cache_queries_total": self.prompt_tokens.named(
                "Prompt tokens that were looked up in the prefix cache."
            ),
            "vllm:prefix_cache_hits_total": self.cached_tokens,
            "vllm:generation_tokens_total": self.generation_tokens,
            "vllm:request_success_total": self.ended,
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:inter_token_latency_seconds": self.itl,
            "vllm:request_time_per_output_token_seconds": self.tpot,
            "vllm:e2e_request_latency_seconds": self.e2e,
            "vllm:request_decode_time_seconds": self.decode,
            **{f"vllm:{name}": family for name, family in self.sizes.items()},
            "fastdecode:rejected_requests_total": self.rejected,
            "fastdecode:aborted_requests_total": self.aborted,
        }
        return own if seen is None else {**_gauges(seen), **own}


def _gauges(seen: StatusReport) -> dict[str, Counter | Histogram | Gauge]:
    def now(text: str, value: float) -> Gauge:
        return Gauge(text, ({}, value))

    live, num = seen.num_live_r_workers, seen.num_r_workers
    workers = Gauge("R-workers.", ({"state": "alive"}, live), ({"state": "lost"}, num - live))
    return {
        "vllm:num_requests_running": now("Sequences that run.", seen.num_running),
        "vllm:num_requests_waiting": now("Sequences that wait.", seen.num_waiting),
        "fastdecode:r_workers": workers,
        **_of_figures(seen),
    }


def _of_figures(seen: StatusReport) -> dict[str, Counter | Histogram | Gauge]:
    """What only the engine knows; nothing before its first step."""
    figures = seen.figures
    if not figures:
        return {}

    def counter(text: str, path: str) -> Counter:
        value: Any = figures
        for name in path.split("."):
            value = value[name]
        found = Counter(text)
        found.add(value)
        return found

    workers = figures["r_workers"]
    blocks = [
        ({"worker": worker["name"], "state": state}, count)
        for worker in workers
        for state, count in (
            ("used", worker["kv_blocks_used"]),
            ("free", worker["kv_blocks"] - worker["kv_blocks_used"]),
        )
    ]
    loads = [({"worker": worker["name"]}, worker["load_tokens"]) for worker in workers]
    return {
        "vllm:kv_cache_usage_perc": Gauge(
            "Part of the KV blocks that is reserved; 1 is all.", ({}, seen.kv_used)
        ),
        "fastdecode:lanes": Gauge("Parts of the batch that take turns.", ({}, figures["lanes"])),
        **{name: counter(*described) for name, described in TOTALS.items()},
        "fastdecode:r_worker_kv_blocks": Gauge("KV blocks of an R-worker.", *blocks),
        "fastdecode:r_worker_load_tokens": Gauge("Tokens cached on an R-worker.", *loads),
    }


def line_of(opened: OpenRequests) -> dict[str, Any]:
    """What the request log says of the engine's part, in seconds."""
    requests = opened.requests
    first_s, last_s = opened.first_s, opened.last_s
    num_sequences = sum(request.params.n for request in requests)
    line: dict[str, Any] = {
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": opened.num_tokens,
        "max_tokens": requests[0].max_tokens,
        "n": requests[0].params.n,
        "prompts": len(requests),
        "ttft_s": None if first_s is None else round(first_s - opened.accepted_s, 6),
        "tpot_s": None,
    }
    per_sequence = opened.num_tokens / num_sequences
    if first_s is not None and last_s is not None and per_sequence > 1:
        line["tpot_s"] = round((last_s - first_s) / (per_sequence - 1), 6)
    return line
