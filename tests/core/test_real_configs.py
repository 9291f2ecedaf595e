"""74 real ``config.json``, with the facts that are read of them: models of this
year are accepted with the right number of parameters, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import FastDecodeError, UnsupportedModelError
from fastdecode.core.model.families import check_implemented, read_model_spec
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec

FILE = Path(__file__).resolve().parents[1] / "data" / "real_configs.json"
MODELS: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
"""By name: ``config``, ``hf_quant_config`` where there is one, and ``parameters``
(of the text part) or the reason why it is ``refused``."""
ACCEPTED = [name for name, model in MODELS.items() if "refused" not in model]


def read(model: dict[str, Any], **options: Any) -> ModelSpec:
    return read_model_spec(
        model["config"], name="demo", hf_quant_config=model.get("hf_quant_config"), **options
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    model = MODELS[name]
    spec = read(model)
    assert spec.num_parameters == model["parameters"]
    assert (spec.quantisation is not None) == model["is_quantised"]
    check_implemented(model["config"], name="demo", hf_quant_config=model.get("hf_quant_config"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ACCEPTED])
def test_refused_by_name(name: str) -> None:
    """The architecture and the reason come before quantised weights and code."""
    model = MODELS[name]
    with pytest.raises(UnsupportedModelError) as caught:
        read(model)
    assert model["config"]["architectures"][0] in str(caught.value)
    assert model["refused"] in str(caught.value)


def test_llama4_serves_what_sees_all_before_it() -> None:
    spec = read(MODELS["meta-llama/Llama-4-Scout-17B-16E-Instruct"])
    assert spec.max_model_len == 8191
    turning = [rope is not None for rope in spec.ropes]
    assert turning == [(layer + 1) % 4 != 0 for layer in range(48)]


def test_gpt_oss_in_full() -> None:
    spec = read(MODELS["openai/gpt-oss-120b"])
    windows = [layer.sliding_window for layer in spec.attention]
    assert windows == [128, None] * 18
    assert spec.num_sinks == 64
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.gate) == (128, 4, "clamped")
    assert spec.max_model_len == 131072


def test_step_with_lists_that_have_an_entry_a_layer() -> None:
    """As it was published: names of its own, one entry for each layer, the ones that
    predict ahead among them. transformers counts as many parameters."""
    config = {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 128896,
        "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
        "num_nextn_predict_layers": 3, "max_position_embeddings": 262144, "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
        "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280,
        "share_expert_dim": 1280, "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "moe_router_scaling_factor": 3.0, "need_fp32_gate": True,
        "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 32.0, "original_max_position_embeddings": 131072},
        "swiglu_limits": [0.0] * 43 + [7, 7, 0, 0, 0],
        "swiglu_limits_shared": [None] * 43 + [16, 16, 0, 0, 0],
    }  # fmt: skip
    spec = read({"config": config})
    assert spec.num_parameters == 196956130368
    assert spec.layer_q_heads[:5] == (64, 96, 96, 96, 64)
    ropes = [(rope.kind, rope.theta, rope.dim) for rope in spec.ropes[:2] if rope]
    assert ropes == [("llama3", 5e6, 64), ("default", 1e4, 128)]
    found = [spec.layer_moe(layer) for layer in (2, 3, 42, 44)]
    gates = [(moe.gate, moe.limit, moe.shared_limit) for moe in found if moe]
    assert gates == [("plain", 0, 0), ("plain", 0, 0), ("clamped_after", 7, 16)]
    last = stage_spec(spec, range(40, 45))
    assert [last.layer_moe(layer) for layer in (2, 4)] == found[2:]


def _paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in fields.items():
        found.append((*before, name))
        if isinstance(value, dict):
            found += _paths(value, (*before, name))
    return found


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted(MODELS)), st.data())
def test_whatever_a_field_holds_the_config_is_read_or_refused(
    name: str, data: st.DataObject
) -> None:
    model = copy.deepcopy(MODELS[name])
    for path in data.draw(
        st.lists(st.sampled_from(_paths(model["config"])), min_size=1, max_size=3)
    ):
        holder: Any = model["config"]
        for step in path[:-1]:
            holder = holder.get(step) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue  # an earlier change took it away
        if data.draw(st.booleans()):
            holder.pop(path[-1], None)
        else:
            holder[path[-1]] = data.draw(_JSON)
    try:
        spec = read(model)
    except FastDecodeError:
        return
    assert len(spec.attention) == len(spec.ropes) == spec.num_layers
    assert spec.num_parameters > 0
    assert hash(spec) == hash(read(model))
