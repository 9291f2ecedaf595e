"""ModelSpec: real models' configs in the styles in which they were published,
and refusals of all the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_configs import (
    BLOOM_560M,
    GEMMA2_2B,
    GPT2,
    LLAMA2_7B,
    LLAMA31_8B,
    MISTRAL_7B,
    PHI3_MINI,
    PUBLISHED,
    PYTHIA_70M,
    QWEN3_06B,
    QWEN25_05B,
)

from cost_model.shapes import read_model
from fastdecode.cli.main import main
from fastdecode.core.dtype import DType
from fastdecode.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from fastdecode.core.model.checkpoint import check_model, open_checkpoint
from fastdecode.core.model.families import alibi_slopes, read_model_spec
from fastdecode.core.model.spec import ModelSpec


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
    assert spec.ropes[0] is not None
    rope = spec.ropes[0]
    assert (rope.kind, rope.theta, rope.original_max_len) == ("llama3", 500000.0, 8192)
    assert spec.attention[0].scale == 128**-0.5
    assert len(spec.attention) == 32
    assert spec.kv_spec(DType.FLOAT16).token_bytes == 128 << 10


def test_old_and_new_styles_are_read_alike() -> None:
    new = without(LLAMA31_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new["rope_parameters"] = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert read(new) == read(LLAMA31_8B)
    neox = without(PYTHIA_70M, "rotary_pct", "rotary_emb_base")
    rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert read(neox, rope_parameters=rope) == read(PYTHIA_70M)
    older = {**LLAMA31_8B, "rope_scaling": {**LLAMA31_8B["rope_scaling"], "type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    assert read(older) == read(LLAMA31_8B)


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


def test_scales_soft_caps_and_slopes() -> None:
    assert read(GEMMA2_2B, query_pre_attn_scalar=144).attention[0].scale == 144**-0.5
    assert read(GEMMA2_2B).attention[0].logit_softcap == 50.0
    assert read(GEMMA2_2B, attn_logit_softcapping=None).attention[0].logit_softcap is None
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert read(BLOOM_560M).attention[0].alibi_slopes == alibi_slopes(16)
    scales = [layer.scale for layer in read(GPT2, scale_attn_by_inverse_layer_idx=True).attention]
    assert scales == [64**-0.5 / (i + 1) for i in range(12)]


@pytest.mark.parametrize(
    ("config", "scaling", "served"),
    [
        (LLAMA2_7B, {"type": "linear", "factor": 4.0}, 16384),
        (LLAMA2_7B, {"type": "dynamic", "factor": 2.0}, 8192),
        (QWEN25_05B, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
         131072),
        (LLAMA2_7B, {"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 1024},
         4096),
    ],
)  # fmt: skip
def test_scaled_length(config: dict[str, Any], scaling: dict[str, Any], served: int) -> None:
    assert read(config, rope_scaling=scaling).max_model_len == served


def test_longrope_chooses_its_factors_by_the_length_asked_for() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = {**PHI3_MINI, "max_position_embeddings": 131072, "rope_scaling": scaling}
    short, long = read(config), read_model_spec(config, name="demo", max_model_len=50000)
    assert short.ropes[0] is not None
    assert long.ropes[0] is not None
    assert (short.max_model_len, short.ropes[0].frequency_factors[0]) == (4096, 1.0)
    assert (long.max_model_len, long.ropes[0].frequency_factors[0]) == (50000, 2.0)


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
    spec = read_model_spec(LLAMA2_7B, name="demo", generation_config=generation)
    assert spec.eos_token_ids == (7, 9, 2), "those of both configs"
    assert read_model_spec(LLAMA2_7B, name="demo", generation_config={}).eos_token_ids == (2,)
    assert read(LLAMA2_7B, eos_token_id=None).eos_token_ids == ()
    out = read(GPT2, vocab_size=97)  # small checkpoints keep their family's default ids
    assert (out.eos_token_ids, out.bos_token_id) == ((), None)


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        (LLAMA2_7B, {"architectures": ["MambaForCausalLM"]},
         r"'MambaForCausalLM'.*recurrent.*Supported are LlamaForCausalLM.*Bloom"),
        (LLAMA2_7B, {"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
        (LLAMA2_7B, {"num_local_experts": 8}, "mixture of experts"),
        (LLAMA2_7B, {"is_encoder_decoder": True}, "encoder-decoder"),
        (LLAMA2_7B, {"hidden_act": "tanhshrink"}, r"'tanhshrink'.*silu"),
        (LLAMA2_7B, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA2_7B, {"rope_scaling": {"rope_type": "mrope"}}, r"'mrope'.*llama3"),
        (LLAMA2_7B, {"rope_parameters": {"early_layers": {"rope_theta": 1e4}}}, "early_layers"),
        (LLAMA2_7B, {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types"),
        (BLOOM_560M, {"apply_residual_connection_post_layernorm": True}, "residual"),
        (GPT2, {"add_cross_attention": True}, "cross-attention"),
        (GEMMA2_2B, {"use_bidirectional_attention": True}, "bidirectional"),
        (QWEN3_06B, {"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
    ],
)  # fmt: skip
def test_what_we_do_not_implement_is_refused(
    config: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        read(config, **changes)
    assert "demo/config.json" in str(caught.value)


def test_the_architecture_is_refused_first_and_quantised_weights_second() -> None:
    quantised = {"quantization_config": {"quant_method": "zip"}, "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(UnsupportedModelError, match=r"'DeepseekV3ForCausalLM'.*MLA"):
        read(LLAMA2_7B, architectures=["DeepseekV3ForCausalLM"], **quantised)
    with pytest.raises(UnsupportedModelError, match="quantised"):
        read(LLAMA2_7B, num_local_experts=8, **quantised)
    assert read(LLAMA2_7B, auto_map={"AutoModel": "x.Y"}) == read(LLAMA2_7B)


def test_weights_are_quantised_if_any_file_says_so(tmp_path: Path) -> None:
    quantised = {"quantization": {"quant_algo": "ZIP8"}}
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json"):
        read_model_spec(LLAMA2_7B, name="demo", hf_quant_config=quantised)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantised))
    for check in (check_model, open_checkpoint, read_model):
        with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json"):
            check(tmp_path if check is not read_model else str(tmp_path))  # type: ignore[operator]


def test_the_text_part_of_a_model_of_several_parts_is_read() -> None:
    """What the whole says of all parts overrules what the text part says."""
    text = {**without(LLAMA2_7B, "architectures", "tie_word_embeddings"), "eos_token_id": 2}
    whole = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama_with_eyes",
        "text_config": text, "vision_config": {"hidden_size": 7},
        "tie_word_embeddings": True, "eos_token_id": [2, 9], "dtype": "bfloat16",
    }  # fmt: skip
    assert read(whole) == read(
        LLAMA2_7B, tie_word_embeddings=True, eos_token_id=[2, 9], torch_dtype="bfloat16"
    )


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (LLAMA2_7B, {"hidden_size": None}, "hidden_size"),
        (LLAMA2_7B, {"hidden_size": "4096"}, "hidden_size"),
        (LLAMA2_7B, {"hidden_size": True}, "hidden_size"),
        (LLAMA2_7B, {"hidden_size": 4097}, "hidden_size"),
        (LLAMA2_7B, {"vocab_size": 1 << 40}, "vocab_size"),
        (LLAMA2_7B, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA2_7B, {"num_attention_heads": 5000}, "num_attention_heads"),
        (LLAMA2_7B, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA2_7B, {"intermediate_size": 1.5}, "intermediate_size"),
        (LLAMA2_7B, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA2_7B, {"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        (LLAMA2_7B, {"rope_theta": 0}, "rope_theta"),
        (LLAMA2_7B, {"max_position_embeddings": 1 << 60}, "max_position_embeddings"),
        (LLAMA2_7B, {"eos_token_id": [-1]}, "eos_token_id"),
        (LLAMA2_7B, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (LLAMA2_7B, {"architectures": "Llama"}, "architectures"),
        (LLAMA2_7B, {"architectures": None, "model_type": None}, "architectures"),
        (LLAMA2_7B, {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA2_7B, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (PHI3_MINI, {"rope_scaling": {"type": "longrope", "short_factor": [1.0],
                                      "long_factor": [1.0]}}, "short_factor'.*48 numbers"),
        (GEMMA2_2B, {"sliding_window": None, "layer_types": ["sliding_attention"] * 26},
         "sliding_window"),
        (GEMMA2_2B, {"layer_types": ["sliding_attention"]}, "layer_types'.*26 entries"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(config: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"demo/config.json.*'{field}.*(fetch it again|correct)"
    ):
        read(config, **changes)


def test_a_bad_field_of_the_generation_config_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*'eos_token_id'"):
        read_model_spec(LLAMA2_7B, name="demo", generation_config={"eos_token_id": "x"})


def test_what_cannot_run_is_said_before_tokenizer_and_weights_are_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    for check in (open_checkpoint, check_model):
        with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
            check(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    check_model(tmp_path)
    with pytest.raises(CheckpointError, match="weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("command", ["generate", "run-batch", "serve", "calibrate s", "doctor"])
def test_commands_name_the_architecture_first(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    lines = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines.write_text(json.dumps(asked) + "\n")
    files = ["--input", str(lines), "--output", str(tmp_path / "out.jsonl")]
    more = {
        "serve": [str(tmp_path), "--port", "0"],
        "doctor": ["--model", str(tmp_path)],
        "calibrate s": ["--model", str(tmp_path), "--out", str(tmp_path / "p")],
    }.get(command, ["--model", str(tmp_path), *files])
    assert main([*command.split(), *more]) == 2
    assert "'MambaForCausalLM' is not supported" in capsys.readouterr().err
