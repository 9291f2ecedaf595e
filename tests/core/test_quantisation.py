"""What config files say of quantised weights."""

from __future__ import annotations

from typing import Any

import pytest
from published_configs import LLAMA2_7B

from fastdecode.core.dtype import DType
from fastdecode.core.errors import CheckpointError, UnsupportedModelError
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.quantisation import Quantisation, read_quantisation


def read(hf_quant_config: dict[str, Any] | None = None, **config: Any) -> Quantisation | None:
    return read_quantisation(
        {"quantization_config": config} if config else {}, "demo", hf_quant_config
    )


def group(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"g": {"weights": weights, "targets": ["Linear"]}}}  # fmt: skip


def transforms(*places: str) -> dict[str, Any]:
    """As SpinQuant's are written: which parts are multiplied by a rotation."""
    apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": apply, "randomize": False}}}


@pytest.mark.parametrize(
    ("config", "name", "bytes_per_weight"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8 in blocks of 128x128", 1),
        ({"quant_method": "fbgemm_fp8"}, "FP8", 1),
        ({"quant_method": "mxfp4"}, "MXFP4", 17 / 32),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8", 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", 9 / 16),
        ({"quant_method": "awq", "group_size": 128}, "AWQ", 0.5 + 20 / 128 / 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "GPTQ", 1),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
         "GPTQ", 0.5 + 20 / 128 / 8),
        (group(num_bits=4, type="int", group_size=32), "INT4", 0.5 + 16 / 32 / 8),
        (group(num_bits=4, type="float", group_size=16), "NVFP4", 9 / 16),
        (group(num_bits=8, type="float", strategy="channel"), "FP8", 1),
        ({**group(num_bits=8, type="float"), "transform_config":
          transforms("weight_input", "weight_output")}, "FP8", 1),
        ({**group(num_bits=8, type="float"), "sparsity_config": {"format": "dense"},
          "transform_config": {}}, "FP8", 1),
    ],
)  # fmt: skip
def test_formats(config: dict[str, Any], name: str, bytes_per_weight: float) -> None:
    found = read(**config)
    assert found is not None
    assert found.name == name
    assert found.bytes_per_weight == pytest.approx(bytes_per_weight, abs=1e-4)


def test_a_plain_config_says_nothing() -> None:
    assert read() is None
    assert read(hf_quant_config={}) is None


def test_modelopt_may_say_it_in_a_file_of_its_own() -> None:
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}  # fmt: skip
    found = read(hf_quant_config=told)
    assert found is not None and found.name == "FP8"
    assert not found.covers("lm_head") and found.covers("model.layers.0.mlp.up_proj")
    inner = {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}
    of_text = read_quantisation(inner, "demo", told)
    assert of_text is not None and of_text.name == "MXFP4"  # config.json has precedence


def test_modules_that_are_skipped() -> None:
    patterns = ["lm_head", "model.layers.*.self_attn", "re:.*shared_experts.*", "*.gate", "re:["]
    found = read(quant_method="mxfp4", modules_to_not_convert=patterns)
    assert found is not None
    skipped = ("lm_head", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.gate",
               "model.layers.3.mlp.shared_experts.up_proj")  # fmt: skip
    for module in skipped:
        assert not found.covers(module), module
    for module in ("model.layers.3.mlp.gate_proj", "model.layers.3.mlp.experts.1.up_proj"):
        assert found.covers(module), module
    assert found.module_bytes("lm_head", 2) == 2


def test_formats_that_differ_by_layer() -> None:
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
              "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}  # fmt: skip
    found = read(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found is not None and found.name == "FP8 and NVFP4 by layer"
    assert found.module_bytes("model.layers.0.self_attn.q_proj", 2) == 1
    assert found.module_bytes("model.layers.0.mlp.experts.7.up_proj", 2) == 9 / 16
    assert found.module_bytes("model.layers.1.self_attn.q_proj", 2) == 2


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*table of nested scales.*bfloat16.*GPTQ"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "new-thing"}, "'new-thing' can't be decoded: nothing is known of it"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2.*only e4m3"),
        ({"quant_method": "gptq", "bits": 3}, "gptq 3 bits.*2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin.*layouts"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv.*packed for gemm"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "activations are scaled"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24",
          "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "marlin-24.*packed otherwise"),
        (group(num_bits=3, type="int"), "int3"),
        ({"quant_method": "compressed-tensors"}, "names no weights"),
        ({**group(num_bits=4), "transform_config": {"rotations": 1}}, "transform_config"),
        ({"quant_method": "auto-round", "packing_format": "exllama"}, "exllama"),
        ({**group(num_bits=4), "sparsity_config": {"format": "sparse-24-bitmask"}},
         "sparsity sparse-24-bitmask.*zeros are left out"),
        ({**group(num_bits=4), "transform_config": transforms("weight_output", "q_attn")},
         "transform 'R1' at 'q_attn'.*activations are transformed"),
        ({**group(num_bits=4), "transform_config": transforms("input")}, "at 'input'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj": {"bits": 8}}},
         r"'dynamic' for '\+:.*up_proj'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"down": {"sym": True}}}, "'dynamic'"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a.q_proj": {"bits": 8}}},
         "'extra_config' for 'a.q_proj'"),
        ({"quant_method": "awq", "bits": 4, "dynamic": {"a": {"bits": 8}}}, "'dynamic'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq marlin"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "in int64"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "of mx_fp"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
         "llm_compressor"),
    ],
)  # fmt: skip
def test_what_is_not_decoded_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read(**config)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, "adapter"),
        ({"quant_method": "awq", "bits": 4, "pre_quant_scale": True}, "pre_quant_scale"),
        ({"quant_method": "auto-round", "super_bits": 6}, "super_bits"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype"),
        ({"quant_method": "mxfp4", "weight_rotation": "R1"}, "weight_rotation"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "smoothquant_val": 0.5},
         "smoothquant_val"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
          "quantized_layers": {"a": {"quant_algo": "FP8", "pre_quant_scale": True}}},
         "pre_quant_scale"),
        (group(num_bits=4, type="int", codebook="nf4"), "codebook"),
        ({**group(num_bits=4), "outlier_config": {"share": 0.01}}, "outlier_config"),
        ({"quant_method": "fbgemm_fp8", "scale_multiplier": 2.0}, "scale_multiplier"),
    ],
)  # fmt: skip
def test_read_quantisation_refuses_unknown_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"with {key}'.*isn't known"):
        read(**config)


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        ({"quant_method": "gptq"}, 1),
        ({"quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"}, 0),
        ({"quant_method": "gptq", "format": "gptq_v2"}, 0),
        ({"quant_method": "gptq", "sym": True}, None),
        ({"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq_v2"}, None),
        ({"quant_method": "gptq", "packing_format": "auto_round:gptqmodel"}, 0),
        ({"quant_method": "auto-round"}, 1),
        ({"quant_method": "auto-round", "packing_format": "auto_gptq"}, 1),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, 1),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}, 0),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, 0),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, 1),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, 0),
        ({"quant_method": "auto-round", "packing_format": "auto_round", "sym": True}, None),
    ],
)  # fmt: skip
def test_zero_points_are_as_the_packing_stores_them(
    config: dict[str, Any], offset: int | None
) -> None:
    found = read(**config, bits=4, group_size=128, data_type="int", iters=200, desc_act=False,
                 damp_percent=0.01, autoround_version="0.5.1", lm_head=False,
                 extra_config={"lm_head": {"bits": 16, "data_type": "float"}},
                 dynamic={"-:.*gate": {}, ".*down_proj": {"group_size": 64}})  # fmt: skip
    assert found is not None
    assert (found.name, found.packing, found.zero_offset) == ("GPTQ", "GPTQ", offset)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": 5}, "quant_method"),
        ({"something": 1}, "quant_method.*missing"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size.*two whole"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "weight_block_size"),
        ({"quant_method": "gptq", "group_size": 1.5}, "group_size"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "x"}, "modules_to_not_convert"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
          "quantized_layers": {"a": 1}}, "'a'.*an object"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(**config)


def test_a_quantised_model_that_names_no_dtype_computes_in_bfloat16() -> None:
    plain = {key: value for key, value in LLAMA2_7B.items() if "dtype" not in key}
    assert read_model_spec(plain, name="demo").dtype is DType.FLOAT32
    quantised = {**plain, "quantization_config": {"quant_method": "fp8"}}
    spec = read_model_spec(quantised, name="demo")
    assert spec.dtype is DType.BFLOAT16
    assert spec.quantisation is not None and spec.quantisation.name == "FP8"
