"""What the HTTP process counts and measures: for /metrics, the status page and its history.

Where a number means what one of vLLM's means, it has its name and its buckets. Times are seconds
of a clock that never goes back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from prometheus_client import core
from prometheus_client.registry import Collector

from fastdecode.server.client import OpenRequests
from fastdecode.server.link import StatusReport

TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
N_BUCKETS: Final = (1, 2, 5, 10, 20)
REJECTIONS: Final = (
    "queue_full", "draining", "starting", "stalled", "broken", "no_r_worker", "invalid",
    "invalid_api_key", "forbidden", "queue_timeout",
)  # fmt: skip
STAGES: Final = ("reading", "preparing", "waiting", "decoding")
"""How far a request has come: its body, its prompts' tokens, the first of its own."""
ENDS: Final = ("stop", "length", "abort", "error")
TOTALS: Final[Mapping[str, tuple[str, str]]] = {
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
        "Sequences that continued from a replica.", "resumed.num_sequences"),
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
        "Requests that another instance took over after a failure.", "num_moved"),
}  # fmt: skip
"""Counters of the engine: what they say, and where they are in its status report."""
LATELY_S: Final = 60.0
MOST_VALUES: Final = 20_000  # values of the last minute; of more, the latest count
SAMPLE_EVERY_S: Final = 2.0
MOST_SAMPLES: Final = 300  # ten minutes

Values: TypeAlias = "float | Mapping[Any, float]"
"""A number, or several by the value of a label or the values of several."""


class Histogram:
    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._buckets, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        return [(bound, sum(self._counts[: i + 1])) for i, bound in enumerate(bounds)]


class Lately:
    """Values that were observed within the last minute."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)  # with their times

    def observe(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))

    def quantiles(self, now_s: float, *parts: float) -> list[float | None]:
        """Return quantiles by nearest rank: observed values, or None without any."""
        found = sorted(value for at_s, value in self._values if at_s > now_s - LATELY_S)
        if not found:
            return [None] * len(parts)
        return [found[max(0, math.ceil(part * len(found)) - 1)] for part in parts]


class SampleHistory:
    """A sample of the server's state every ``SAMPLE_EVERY_S`` seconds, with gaps."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[str, float]] = {}
        """Sample of each interval since time 0, the oldest first."""
        self._before: tuple[float, float] | None = None
        """When the last sample was taken, and all tokens until then."""

    def note(self, now_s: float, num_tokens: float, seen: StatusReport) -> None:
        """Take a sample if one is due. ``num_tokens`` counts from the start of the server."""
        slot = int(now_s // SAMPLE_EVERY_S)
        if slot in self._samples:
            return
        before_s, before = self._before or (now_s, num_tokens)
        rate = (num_tokens - before) / (now_s - before_s) if now_s > before_s else 0.0
        self._samples[slot] = {
            "tokens_per_s": rate,  # since the sample before
            "num_running": seen.num_running,
            "num_waiting": seen.num_waiting,
            "kv_used": seen.kv_used,  # part of the KV blocks, 0 to 1
        }
        self._before = now_s, num_tokens
        if len(self._samples) > MOST_SAMPLES:
            del self._samples[next(iter(self._samples))]

    def columns(self, now_s: float) -> dict[str, Any]:
        """Return the samples as columns, the oldest first, with None for gaps."""
        end = max([*self._samples, int(now_s // SAMPLE_EVERY_S) - 1]) + 1
        begin = max(min(self._samples, default=end), end - MOST_SAMPLES)
        taken = [self._samples.get(slot) for slot in range(begin, end)]
        columns = {
            name: [each and round(each[name], 4) for each in taken]
            for name in ("tokens_per_s", "num_running", "num_waiting", "kv_used")
        }
        return {"every_s": SAMPLE_EVERY_S, "kept": MOST_SAMPLES, **columns}


class Metrics(Collector):
    """All that is counted. A request of several prompts, or of n > 1, counts once.
    ``max_model_len`` bounds the buckets of lengths."""

    def __init__(self, max_model_len: int, model_name: str = "") -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauge = partial(self._filled, core.GaugeMetricFamily)
        self._counter = partial(self._filled, core.CounterMetricFamily)
        self._seen: StatusReport | None = None
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = self.num_succeeded = 0
        self.ended = Counter(dict.fromkeys(ENDS, 0))
        self.rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self.aborted = Counter(dict.fromkeys(STAGES, 0))
        lengths = _lengths(max_model_len)
        self._histograms = {
            name: (text, Histogram(buckets))
            for name, text, buckets in (
                ("time_to_first_token_seconds", "Seconds from acceptance to the first token.",
                 TTFT_BUCKETS),
                ("inter_token_latency_seconds", "Seconds between tokens of a sequence.",
                 TOKEN_BUCKETS),
                ("request_time_per_output_token_seconds", "Mean seconds per token after the first.",
                 TOKEN_BUCKETS),
                ("e2e_request_latency_seconds", "Seconds from acceptance to the last token.",
                 REQUEST_BUCKETS),
                ("request_decode_time_seconds", "Seconds from the first to the last token.",
                 REQUEST_BUCKETS),
                ("request_prompt_tokens", "Prompt tokens of a request.", lengths),
                ("request_generation_tokens", "Tokens generated for a request.", lengths),
                ("request_params_n", "Completions asked for.", N_BUCKETS),
                ("request_params_max_tokens", "max_tokens asked for.", lengths),
            )
        }  # fmt: skip
        self.lately_ttft, self.lately_tpot = Lately(), Lately()
        self.history = SampleHistory()

    def first_token(self, opened: OpenRequests) -> None:
        first_s = opened.first_s or opened.accepted_s
        self._observe("time_to_first_token_seconds", first_s - opened.accepted_s)
        self.lately_ttft.observe(first_s, first_s - opened.accepted_s)

    def tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """Note a sequence's new tokens, and the seconds since its last ones."""
        self.generation_tokens += num_tokens
        if since_last_s is not None:
            self._observe("inter_token_latency_seconds", since_last_s / num_tokens, num_tokens)

    def finished(self, opened: OpenRequests, reason: str) -> None:
        """Note the end of a request; ``reason`` is one of ``ENDS``."""
        self.ended[reason] += 1
        if reason in ("abort", "error"):
            return
        self.num_succeeded += 1
        first_s, last_s, tpot_s = opened.first_s, opened.last_s, opened.tpot_s
        if first_s is None or last_s is None:
            return
        self.prompt_tokens += opened.num_prompt_tokens
        self.cached_tokens += opened.num_cached_tokens
        self._observe("e2e_request_latency_seconds", last_s - opened.accepted_s)
        self._observe("request_decode_time_seconds", last_s - first_s)
        if tpot_s is not None:
            self._observe("request_time_per_output_token_seconds", tpot_s)
            self.lately_tpot.observe(last_s, tpot_s)
        self._observe("request_prompt_tokens", opened.num_prompt_tokens)
        self._observe("request_generation_tokens", opened.num_tokens)
        self._observe("request_params_n", opened.requests[0].params.n)
        self._observe("request_params_max_tokens", opened.requests[0].max_tokens)

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name][1].observe(value, times)

    def see(self, now_s: float, seen: StatusReport) -> None:
        self._seen = seen
        self.history.note(now_s, self.generation_tokens, seen)

    def collect(self) -> Iterator[core.Metric]:
        if self._seen is not None:
            yield from self._of_engine(self._seen)
        tokens = {
            "prompt_tokens": ("Prompt tokens of requests that were answered.", self.prompt_tokens),
            "prefix_cache_queries": (
                "Prompt tokens that were looked up in the prefix cache.", self.prompt_tokens),
            "prefix_cache_hits": (
                "Prompt tokens that were found in the prefix cache.", self.cached_tokens),
            "generation_tokens": ("Tokens generated.", self.generation_tokens),
        }  # fmt: skip
        for name, (text, number) in tokens.items():
            yield self._counter(f"vllm:{name}", text, number)
        ends = "Requests that are over."
        yield self._counter("vllm:request_success", ends, self.ended, "finished_reason")
        for name, (text, histogram) in self._histograms.items():
            family = core.HistogramMetricFamily(f"vllm:{name}", text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], histogram.cumulative(), histogram.sum)
            yield family
        refused = "Requests that were refused."
        yield self._counter("fastdecode:rejected_requests", refused, self.rejected, "reason")
        gone = "Requests whose client went away."
        yield self._counter("fastdecode:aborted_requests", gone, self.aborted, "stage")

    def _of_engine(self, seen: StatusReport) -> Iterator[core.Metric]:
        """Yield what the latest report says; figures only exist after the first step."""
        figures, live = seen.figures, seen.num_live_r_workers
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", seen.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", seen.num_waiting)
        workers: dict[str, float] = {"alive": live, "lost": seen.num_r_workers - live}
        yield self._gauge("fastdecode:r_workers", "R-workers.", workers, "state")
        if not figures:
            return
        used = "Part of the KV blocks that is reserved; 1 is all."
        yield self._gauge("vllm:kv_cache_usage_perc", used, seen.kv_used)
        lanes = "Parts of the batch that take turns."
        yield self._gauge("fastdecode:lanes", lanes, figures["lanes"])
        for name, (text, path) in TOTALS.items():
            value: Any = figures
            for part in path.split("."):
                value = value[part]
            yield self._counter(name, text, value)
        blocks, loads = {}, {}
        for worker in figures["r_workers"]:
            name, num_used = worker["name"], worker["kv_blocks_used"]
            blocks[name, "used"], blocks[name, "free"] = num_used, worker["kv_blocks"] - num_used
            loads[name] = worker["load_tokens"]
        text = "KV blocks of an R-worker."
        yield self._gauge("fastdecode:r_worker_kv_blocks", text, blocks, "worker", "state")
        text = "Tokens cached on an R-worker."
        yield self._gauge("fastdecode:r_worker_load_tokens", text, loads, "worker")

    def _filled(self, kind: Any, name: str, text: str, values: Values, *labels: str) -> core.Metric:
        family = kind(name, text, labels=[*self._labels, *labels])
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            more = (key,) if isinstance(key, str) else key
            family.add_metric([*self._labels.values(), *more], value)
        filled: core.Metric = family
        return filled


def _lengths(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to ``most`` tokens."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most) or (1,)
