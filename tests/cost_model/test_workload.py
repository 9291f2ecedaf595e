"""What models and workloads cost, against numbers known from their papers and configs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.shapes import KnownModel, known_models, model_named, read_model
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

KV_KIB = {"Llama-2 7B": 512, "Llama-2 13B": 800, "Llama-3 8B": 128, "OPT 175B": 4608}
WIRE_MIB = {"Llama-2 7B": 1.0, "Llama-2 13B": 1.5625, "Llama-3 8B": 0.625, "Llama-3 70B": 2.8125}


def costs(name: str, kv_dtype: str = "float16") -> TokenCosts:
    return TokenCosts(model_named(name), DType.FLOAT16, kv_dtype)


MANY = list(known_models().values())


def test_models_known_by_name() -> None:
    assert len(MANY) >= 60
    for model in MANY:
        for each in model.spellings:
            assert model_named(each).name == model.name


@pytest.mark.parametrize("model", MANY, ids=lambda model: model.name)
def test_every_shape_is_what_its_name_says(model: KnownModel) -> None:
    """``models.json`` has what transformers counts on the meta device."""
    assert model_named(model.name).num_parameters == model.parameters
    said = re.search(r"([\d.]+)([MB])\b", model.name)
    if said is not None and "x" not in model.name:
        size = float(said[1]) * {"M": 1e6, "B": 1e9}[said[2]]
        assert model.parameters == pytest.approx(size, rel=0.35)


@pytest.mark.parametrize("name", KV_KIB)
def test_kv_bytes_a_token(name: str) -> None:
    assert costs(name).kv_bytes == KV_KIB[name] * 1024


@pytest.mark.parametrize("name", WIRE_MIB)
def test_wire_bytes_a_token(name: str) -> None:
    c = costs(name)
    assert c.num_layers * (c.out_bytes + c.back_bytes) == WIRE_MIB[name] * 2**20


def test_integers_shrink_the_cache_but_for_their_scales() -> None:
    layer = {dtype: costs("Llama-3 8B", dtype).kv_layer_bytes for dtype in KV_BYTES}
    assert layer == {dtype: 2 * 8 * head for dtype, head in KV_BYTES.items()}


KV_BYTES = {"int8": 128 + 4, "int4": 64 + 4, "float16": 256, "float32": 512, "fp8": 128}


@given(prompt=st.integers(0, 300), output=st.integers(1, 300), window=st.integers(1, 600))
def test_attended_tokens_are_the_mean_over_the_steps(prompt: int, output: int, window: int) -> None:
    workload = Workload(prompt, output)
    contexts = [prompt + step for step in range(1, output + 1)]
    assert workload.mean_context_tokens == pytest.approx(sum(contexts) / output)
    exact = sum(min(context, window) for context in contexts) / output
    # The windowed mean integrates where this sums.
    assert workload.mean_attended_tokens(window) == pytest.approx(exact, rel=0.01, abs=0.6)


@given(prompt=st.integers(0, 1000), output=st.integers(1, 1000), data=st.data())
def test_half_the_load(prompt: int, output: int, data: st.DataObject) -> None:
    """Spread starts hold (S + F) / 2S of what sequences hold that start
    together: about half for a small F."""
    interval = data.draw(st.integers(1, output))
    together = Workload(0, output, output).mean_context_tokens
    spread = Workload(0, output, interval).mean_context_tokens
    assert together == output
    assert spread / together == pytest.approx((output + interval) / (2 * output))
    assert Workload(prompt, output, interval).mean_context_tokens == prompt + spread


def test_models_on_disk(tmp_path: Path) -> None:
    known = known_models()["Llama-3 8B"]
    (tmp_path / "config.json").write_text(json.dumps(known.config))
    for where in (tmp_path, tmp_path / "config.json"):
        assert read_model(str(where)).num_parameters == known.parameters


@pytest.mark.parametrize(
    "text", ["", "[1, 2", "[]", '{"model_type": "llama"}', '{"architectures": ["Nope"]}']
)
def test_broken_configs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Exception, match=r"config\.json") as caught:
        read_model(str(tmp_path))
    assert getattr(caught.value, "exit_code", None) == 2


def test_unknown_models_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean Llama-2 7B"):
        read_model("llama-2-7")
    with pytest.raises(ConfigError, match="no file"):
        read_model(str(tmp_path / "config.json"))
