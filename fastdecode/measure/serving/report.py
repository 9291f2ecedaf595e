"""Figures of a load, and the search for the greatest rate that keeps an SLO."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cost_model.goodput.slo import RequestTimes, Slo
from fastdecode.measure.serving.client import Record

CLIENT_LAG_S = 0.010  # a client that sends later than this measures itself
_MAX_DOUBLINGS = 12
_HALVINGS = 5


def report(records: Sequence[Record], slo: Slo | None) -> dict[str, Any]:
    done = [record for record in records if record.error is None]
    duration_s = max((record.chunk_s[-1] for record in done), default=0.0)
    gaps = [b - a for record in done for a, b in itertools.pairwise(record.chunk_s)]
    tokens = sum(record.num_tokens for record in done)
    messages: dict[str, str] = {}  # of the first error of each kind
    for record in records:
        if record.error is not None and record.message:
            messages.setdefault(record.error, record.message)
    figures: dict[str, Any] = {
        "requests": len(records),
        "answered": len(done),
        "errors": dict(Counter(r.error for r in records if r.error is not None)),
        "error_messages": messages,
        "without_usage": sum(not record.has_usage for record in done),
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s if duration_s else 0.0,
        "prompt_tokens": sum(record.num_prompt for record in done),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / duration_s if duration_s else 0.0,
        "chunks": sum(len(record.chunk_s) for record in done),
        "ttft_s": summary([record.ttft_s for record in done]),
        "tpot_s": summary([r.tpot_s for r in done if r.tpot_s is not None]),
        "itl_s": summary(gaps),
        "e2e_s": summary([record.e2e_s for record in done]),
        "client_lag_s": summary([record.sent_s - record.due_s for record in records]),
    }
    lag = figures["client_lag_s"]
    figures["client_was_the_limit"] = lag is not None and lag["p99"] > CLIENT_LAG_S
    if slo is not None:
        kept = sum(slo.is_met_by(RequestTimes(0.0, r.ttft_s, r.tpot_s)) for r in done)
        figures["attainment"] = kept / len(records) if records else 0.0
        figures["goodput_per_s"] = kept / duration_s if duration_s else 0.0
    return figures


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and nearest-rank percentiles, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": math.ceil(len(ordered) * p / 100) - 1 for p in (50, 90, 99)}
    found = {name: ordered[rank] for name, rank in ranks.items()}
    return {"mean": sum(ordered) / len(ordered), **found}


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered in "
        f"{figures['duration_s']:.2f} s: {figures['requests_per_s']:.2f} requests/s, "
        f"{figures['output_tokens_per_s']:.0f} output tokens/s"
    ]
    for kind, num in figures["errors"].items():
        message = figures["error_messages"].get(kind)
        lines.append(f"  errors: {kind}: {num}" + (f", first: {message}" if message else ""))
    if figures["without_usage"]:
        lines.append(
            f"  answers without usage: {figures['without_usage']}; their chunks are counted as "
            "tokens"
        )
    lines.append(f"{'':8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}  ms")
    for name in ("ttft", "tpot", "itl", "e2e"):
        times = figures[f"{name}_s"]
        if times is not None:
            row = "".join(f"{times[key] * 1e3:10.2f}" for key in ("mean", "p50", "p90", "p99"))
            lines.append(f"{name.upper():8}{row}")
    if "attainment" in figures:
        lines.append(
            f"goodput {figures['goodput_per_s']:.2f} requests/s; "
            f"{figures['attainment']:.1%} of requests kept the SLO"
        )
    if "greatest_rate" in figures:
        rate, keep = figures["greatest_rate"], f"{figures['wanted_attainment']:.1%} of requests"
        lines.append(
            f"greatest rate found at which {keep} keep the SLO: {rate:.3g} requests/s"
            if rate
            else f"no rate was found at which {keep} keep the SLO"
        )
    if figures["client_was_the_limit"]:
        lag_ms = figures["client_lag_s"]["p99"] * 1e3
        lines.append(
            f"the client itself was the limit: it sent {lag_ms:.0f} ms late (p99); use a lower "
            "rate, or another machine"
        )
    return "\n".join(lines)


def find_goodput(
    measure: Callable[[float], dict[str, Any]],
    measure_alone: Callable[[], dict[str, Any]],
    first_rate: float,
    attainment: float,
    tell: Callable[[str], None],
) -> tuple[float, dict[str, Any] | None]:
    """Find the greatest rate, within 3%, at which ``attainment`` of the requests keep the SLO.

    If the first rate is too great, requests run one after the other once (``measure_alone``). If
    not even those keep the SLO, no rate does. Return the rate, or 0, and the figures at it.
    """
    best, figures, rate = 0.0, None, first_rate
    bad: float | None = None
    for _ in range(_MAX_DOUBLINGS + _HALVINGS):
        now = measure(rate)
        tell(f"{rate:.3g} requests/s: {now['attainment']:.1%} kept the SLO")
        if now["attainment"] >= attainment:
            best, figures = rate, now
            if now["client_was_the_limit"]:
                break
        else:
            if bad is None and not best:
                alone = measure_alone()
                tell(f"one request at a time: {alone['attainment']:.1%} kept the SLO")
                if alone["attainment"] < attainment:
                    return 0.0, alone
            bad = rate
        if bad is not None and bad - best <= 0.03 * bad:
            break
        if bad is None:
            rate *= 2
        else:
            rate = (best + bad) / 2 if best else bad / 2
            if rate < first_rate / 2**_MAX_DOUBLINGS:
                break
    return best, figures
