"""ModelSpec: real models' configs in the styles in which they were published,
and refusals of all the rest."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.dtype import DType
from fastdecode.core.errors import (
    CheckpointError,
    ConfigError,
    FastDecodeError,
    UnsupportedModelError,
)
from fastdecode.core.model.families import alibi_slopes, read_model_spec
from fastdecode.core.model.spec import ModelSpec

LLAMA2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PHI3_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "bos_token_id": 1,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32064,
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
OPT_350M: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
    "bos_token_id": 2, "do_layer_norm_before": False, "eos_token_id": 2, "ffn_dim": 4096,
    "hidden_size": 1024, "max_position_embeddings": 2048, "num_attention_heads": 16,
    "num_hidden_layers": 24, "torch_dtype": "float16", "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
    "bos_token_id": 50256, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
    "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
PYTHIA_70M: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 8,
    "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_parallel_residual": True,
    "vocab_size": 50304,
}  # fmt: skip
BLOOM_560M: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom",
    "apply_residual_connection_post_layernorm": False, "bos_token_id": 1, "eos_token_id": 2,
    "layer_norm_epsilon": 1e-05, "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
    "offset_alibi": 100, "seq_length": 2048, "vocab_size": 250880,
}  # fmt: skip

PUBLISHED = {
    "Llama-2-7B": (LLAMA2_7B, 6_738_415_616),
    "Llama-3.1-8B": (LLAMA31_8B, 8_030_261_248),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5-0.5B": (QWEN25_05B, 494_032_768),
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920),
    "Phi-3-mini": (PHI3_MINI, 3_821_079_552),
    "Gemma-2-2B": (GEMMA2_2B, 2_614_341_888),
    "OPT-350M": (OPT_350M, 331_196_416),
    "GPT-2": (GPT2, 124_439_808),
    "Pythia-70M": (PYTHIA_70M, 70_426_624),
    "BLOOM-560M": (BLOOM_560M, 559_214_592),
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_model_spec({**config, **changes}, name="demo")


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    assert read(config).num_parameters == num_parameters


def test_llama3_in_full() -> None:
    spec = read(LLAMA31_8B)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (32, 8, 128)
    assert spec.dtype is DType.BFLOAT16
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.bos_token_id == 128000
    assert spec.max_model_len == 131072
    assert spec.rope is not None
    assert (spec.rope.kind, spec.rope.theta, spec.rope.original_max_len) == (
        "llama3",
        500000.0,
        8192,
    )
    assert spec.attention[0].scale == 128**-0.5
    assert len(spec.attention) == 32
    assert spec.kv_spec(DType.FLOAT16).token_bytes == 128 << 10


def test_old_and_new_styles_are_read_alike() -> None:
    new = without(LLAMA31_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new["rope_parameters"] = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert read(new) == read(LLAMA31_8B)
    older = {**LLAMA31_8B, "rope_scaling": {**LLAMA31_8B["rope_scaling"], "type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    assert read(older) == read(LLAMA31_8B)


def test_pythia_new_style_partial_rotary() -> None:
    new = without(PYTHIA_70M, "rotary_pct", "rotary_emb_base")
    new["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.25,
    }
    assert read(new) == read(PYTHIA_70M)
    assert read(PYTHIA_70M).rope.dim == 16  # type: ignore[union-attr]


def test_windows_follow_each_familys_rule() -> None:
    def windows(config: dict[str, Any], **changes: Any) -> list[int | None]:
        return [layer.sliding_window for layer in read(config, **changes).attention]

    assert set(windows(MISTRAL_7B)) == {4096}
    assert set(windows(MISTRAL_7B, sliding_window=None)) == {None}
    assert set(windows(without(MISTRAL_7B, "sliding_window"))) == {4096}, "the family's default"
    assert set(windows(QWEN25_05B)) == {None}, "use_sliding_window is false"
    on = windows(QWEN25_05B, use_sliding_window=True, max_window_layers=20, sliding_window=100)
    assert on == [None] * 20 + [100] * 4
    assert windows(GEMMA2_2B) == [4096, None] * 13
    types = ["full_attention", "sliding_attention"] * 13
    assert windows(GEMMA2_2B, layer_types=types) == [None, 4096] * 13
    assert set(windows(PHI3_MINI)) == {2047}


def test_scales_and_soft_caps() -> None:
    assert read(GEMMA2_2B, query_pre_attn_scalar=144).attention[0].scale == 144**-0.5
    assert read(GEMMA2_2B).attention[0].logit_softcap == 50.0
    assert read(GEMMA2_2B, attn_logit_softcapping=None).attention[0].logit_softcap is None
    scales = [layer.scale for layer in read(GPT2, scale_attn_by_inverse_layer_idx=True).attention]
    assert scales == [64**-0.5 / (i + 1) for i in range(12)]


def test_opt_350m_shape() -> None:
    spec = read(OPT_350M)
    assert (spec.norm_placement, spec.final_norm, spec.embedding_size, spec.hidden_size) == (
        "post",
        False,
        512,
        1024,
    )
    assert (spec.num_learned_positions, spec.learned_position_offset, spec.max_model_len) == (
        2050,
        2,
        2048,
    )


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert read(BLOOM_560M).attention[0].alibi_slopes == alibi_slopes(16)


@pytest.mark.parametrize(
    ("config", "scaling", "served"),
    [
        (LLAMA2_7B, {"type": "linear", "factor": 4.0}, 16384),
        (LLAMA2_7B, {"type": "dynamic", "factor": 2.0}, 8192),
        (
            QWEN25_05B,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131072,
        ),
        (
            LLAMA2_7B,
            {"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 1024},
            4096,
        ),
    ],
)
def test_scaled_length(config: dict[str, Any], scaling: dict[str, Any], served: int) -> None:
    assert read(config, rope_scaling=scaling).max_model_len == served


def test_longrope_chooses_its_factors_by_the_length_asked_for() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = {**PHI3_MINI, "max_position_embeddings": 131072, "rope_scaling": scaling}
    short, long = read(config), read_model_spec(config, name="demo", max_model_len=50000)
    assert short.rope is not None
    assert long.rope is not None
    assert (short.max_model_len, short.rope.frequency_factors[0]) == (4096, 1.0)
    assert (long.max_model_len, long.rope.frequency_factors[0]) == (50000, 2.0)


def test_max_model_len_lowers_the_limit_and_never_raises_it() -> None:
    assert read_model_spec(LLAMA2_7B, name="demo", max_model_len=100).max_model_len == 100
    for length in (0, -1, 4097):
        with pytest.raises(ConfigError, match=r"max_model_len=.* 1\.\.4096"):
            read_model_spec(LLAMA2_7B, name="demo", max_model_len=length)


def test_nothing_runs_in_float64() -> None:
    for name in ("float64", "torch.float64", "double"):
        spec = read(LLAMA2_7B, torch_dtype=name)
        assert spec.choose_dtype("bf16") is DType.BFLOAT16
        with pytest.raises(
            UnsupportedModelError,
            match=r"demo/config\.json: the dtype 'float64'.*float32, bfloat16",
        ):
            spec.choose_dtype("auto")
    assert read(LLAMA2_7B).choose_dtype("auto") is DType.FLOAT16


def test_end_of_text_ids() -> None:
    generation = {"eos_token_id": [7, 9, 7]}
    assert read_model_spec(LLAMA2_7B, name="demo", generation_config=generation).eos_token_ids == (
        7,
        9,
    )
    assert read_model_spec(LLAMA2_7B, name="demo", generation_config={}).eos_token_ids == (2,)
    assert read(LLAMA2_7B, eos_token_id=None).eos_token_ids == ()
    out = read(GPT2, vocab_size=97)  # small checkpoints keep their family's default ids
    assert (out.eos_token_ids, out.bos_token_id) == ((), None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"auto_map": {"AutoModel": "modeling.Model"}}, r"auto_map.*never run.*delete"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config.*quantised"),
        (
            {"architectures": ["MambaForCausalLM"]},
            r"'MambaForCausalLM'.*Those that are: LlamaForCausalLM.*Bloom",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "isn't implemented"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"hidden_act": "tanhshrink"}, r"'tanhshrink'.*silu"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "mrope"}}, r"'mrope'.*llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "different layers"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types"),
    ],
)
def test_what_we_do_not_implement_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        read(LLAMA2_7B, **changes)
    assert "demo/config.json" in str(caught.value)


def test_other_families_features_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="residual"):
        read(BLOOM_560M, apply_residual_connection_post_layernorm=True)
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        read(GPT2, add_cross_attention=True)
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        read(GEMMA2_2B, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read(QWEN3_06B, layer_types=["chunked_attention"] * 28)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 4097}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 5000}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"intermediate_size": 1.5}, "intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"max_position_embeddings": 1 << 60}, "max_position_embeddings"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"architectures": "Llama"}, "architectures"),
        ({"architectures": None, "model_type": None}, "architectures"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"demo/config.json.*'{field}.*(fetch it again|correct)"
    ):
        read(LLAMA2_7B, **changes)


def test_bad_fields_of_other_families_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*'eos_token_id'"):
        read_model_spec(LLAMA2_7B, name="demo", generation_config={"eos_token_id": "x"})
    with pytest.raises(CheckpointError, match=r"'short_factor'.*48 numbers"):
        read(
            PHI3_MINI,
            rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        )
    with pytest.raises(CheckpointError, match="'sliding_window'"):
        read(GEMMA2_2B, sliding_window=None, layer_types=["sliding_attention"] * 26)
    with pytest.raises(CheckpointError, match=r"'layer_types'.*26 entries"):
        read(GEMMA2_2B, layer_types=["sliding_attention"])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_FIELDS = sorted(
    {field for config, _ in PUBLISHED.values() for field in config} | {"head_dim", "layer_types"}
)
_ROPE = st.dictionaries(
    st.sampled_from(["type", "rope_type", "factor", "low_freq_factor", "high_freq_factor",
                     "short_factor", "beta_fast", "original_max_position_embeddings", "rope_theta",
                     "partial_rotary_factor", "mscale"]),
    _JSON | st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"])
    | st.floats(0, 100),
)  # fmt: skip


@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=2),
    _ROPE,
)
def test_any_config_is_read_or_refused(
    name: str, changes: dict[str, Any], rope: dict[str, Any]
) -> None:
    config = copy.deepcopy(PUBLISHED[name][0])
    if rope:
        config["rope_scaling"] = rope
    config.update(changes)
    try:
        spec = read_model_spec(config, name="demo")
    except FastDecodeError:
        return
    assert len(spec.attention) == spec.num_layers
    assert spec.num_parameters > 0
    assert spec.max_model_len >= 1
    assert hash(spec) == hash(read_model_spec(config, name="demo"))


def test_needs_no_torch() -> None:
    code = (
        "import sys, fastdecode.core.model.families; "
        "assert not {'torch', 'safetensors', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
