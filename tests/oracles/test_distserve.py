"""The published simulator: equal to its authors', run for these cases. Times in
ms, as they print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cost_model.goodput.placements import Degrees
from fastdecode.core.errors import ConfigError
from oracles.distserve.profile import first_stage_ms, published_model, published_models
from oracles.distserve.simulator import simulate_colocated, simulate_disaggregated

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "distserve" / "cases.json").read_text("utf-8")
)
OPT_13B = published_model("OPT 13B")


def test_latencies_of_a_stage() -> None:
    prefill = OPT_13B.stage(2, 1, "distserve").prefill_ms(500, 300**2 + 200**2, 1)
    assert prefill == pytest.approx(50.350022, abs=1e-6)
    assert prefill + first_stage_ms(500) == pytest.approx(52.400022, abs=1e-6)
    decode = OPT_13B.stage(1, 1, "distserve").decode_ms(20, 20 * 701, 1)
    assert decode == pytest.approx(29.494480, abs=1e-6)
    assert decode + first_stage_ms(20 * 700) == pytest.approx(32.894480, abs=1e-6)
    one = OPT_13B.stage(1, 1, "distserve")
    assert one.prefill_ms(512, 512**2, 1) == pytest.approx(73.1486810534344, rel=1e-12)
    assert one.prefill_ms(8192, 32 * 256**2, 1) == pytest.approx(868.9042288808323, rel=1e-12)
    assert one.decode_ms(1, 513, 1) == pytest.approx(20.294827592002925, rel=1e-12)
    assert one.decode_ms(94, 94 * 513, 1) == pytest.approx(53.78644953299753, rel=1e-12)
    assert one.decode_ms(95, 95 * 513, 1) < one.decode_ms(94, 94 * 513, 1), "they switch, downwards"


def test_one_request() -> None:
    (times,) = simulate_disaggregated([(0.0, 200, 3)], OPT_13B, Degrees(1, 1), Degrees(1, 1))
    assert times.ttft_s * 1e3 == pytest.approx(41.789888501, abs=1e-6)
    assert times.tpot_s is not None
    assert times.tpot_s * 1e3 == pytest.approx(22.119950604, abs=1e-6)


@pytest.mark.parametrize("case", CASES["runs"])
def test_equal_to_the_authors(case: dict[str, Any]) -> None:
    """Both back ends, pipelines, several instances, bursts."""
    model = published_model(case["model"])
    requests = [(at_s, prompt, output) for at_s, prompt, output in case["requests"]]
    *prefill, num_prefill = case["prefill"]
    if case["backend"] == "vllm":
        degrees = Degrees(*prefill)
        found = simulate_colocated(requests, model, degrees, num_instances=num_prefill)
    else:
        *decode, num_decode = case["decode"]
        pair = (Degrees(*prefill), Degrees(*decode))
        found = simulate_disaggregated(requests, model, *pair, num_prefill, num_decode)
    assert [each.ttft_s * 1e3 for each in found] == pytest.approx(case["ttft_ms"], abs=1e-6)
    tpots = [each.tpot_s for each in found if each.tpot_s is not None]
    assert [tpot_s * 1e3 for tpot_s in tpots] == pytest.approx(case["tpot_ms"], abs=1e-6)


def test_says_what_it_has_no_numbers_of() -> None:
    assert set(published_models()) == {f"facebook/opt-{size}" for size in ("13b", "66b", "175b")}
    with pytest.raises(ConfigError, match=r"facebook/opt-13b, .* only"):
        published_model("Llama-2 7B")
    with pytest.raises(ConfigError, match=r"can't run facebook/opt-13b with tp=5, pp=1.*1x1"):
        OPT_13B.stage(5, 1, "distserve")
    with pytest.raises(ConfigError, match="it has no times of it"):
        published_model("opt-175b").stage(8, 1, "distserve")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ((0.0, 70_000, 1), "prompts have 1 to 66144"),
        ((0.0, 5, 0), "outputs at least 1"),
        ((0.0, 49_000, 1001), "contexts up to 50000"),
    ],
)
def test_refuses_requests_that_would_never_end(request_: tuple[float, int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate_disaggregated([request_], OPT_13B, Degrees(1, 1), Degrees(1, 1))
