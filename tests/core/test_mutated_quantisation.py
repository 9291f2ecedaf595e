"""Config files and tensor headers that somebody has damaged: a deliberate error
or an answer, never a crash."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdecode.core.errors import CheckpointError, ModelError
from fastdecode.core.model.encoded_tensors import find_weights
from fastdecode.core.model.quantisation import read_quantisation
from fastdecode.core.model.tensor_entry import ITEM_BITS, TensorEntry

CONFIGS: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["re:.*mtp.*"],
     "quantized_layers": {"a.b": {"quant_algo": "FP8"}, "a.c": {"quant_algo": "NVFP4"}}},
    {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
     "config_groups": {
         "group_0": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": {
             "block_structure": [128, 128], "num_bits": 8, "type": "float", "group_size": None}},
         "group_1": {"format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": {
             "group_size": 16, "num_bits": 4, "type": "float"}}}},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
]  # fmt: skip
STRANGE = (None, True, -1, 0, 3, 1 << 70, 1.5, float("nan"), "", "x", [], [1], {}, {"a": None},
           ["re:("], [[128, 128]], "FP8", "int")  # fmt: skip


def mutated(tree: Any, chance: random.Random) -> Any:
    """One value of a tree replaced, or left out."""
    tree = copy.deepcopy(tree)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(tree)
    for node, key in chance.sample(places, k=min(len(places), chance.randint(1, 3))):
        if isinstance(node, dict) and chance.random() < 0.2:
            node.pop(key, None)
        elif (isinstance(node, dict) and key in node) or isinstance(node, list):
            node[key] = chance.choice(STRANGE)
    return tree


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["quant_method"])
def test_configs(config: dict[str, Any]) -> None:
    chance, num_read = random.Random(0), 0
    for _ in range(500):
        tree = mutated({"quantization_config": config}, chance)
        told = mutated({"quantization": config}, chance) if chance.random() < 0.5 else None
        with contextlib.suppress(ModelError):
            found = read_quantisation(tree, "demo", told)
            num_read += 1
            for module in ("lm_head", "model.layers.3.self_attn.q_proj", "a.b"):
                assert found is None or 0 <= found.module_bytes(module, 2.0) <= 10
    assert 20 < num_read < 480


def entry(name: str, dtype: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, Path("demo"), dtype, shape, 0, 8)


TENSORS = {
    "fp8": [entry("m.weight", "F8_E4M3", 256, 128), entry("m.weight_scale_inv", "F32", 2, 1)],
    "nvfp4": [entry("m.weight", "U8", 8, 16), entry("m.weight_scale", "F8_E4M3", 8, 2),
              entry("m.weight_scale_2", "F32"), entry("m.input_scale", "F32")],
    "mxfp4": [entry("up_blocks", "U8", 2, 8, 2, 16), entry("up_scales", "U8", 2, 8, 2)],
    "int4": [entry("m.weight_packed", "I32", 8, 8), entry("m.weight_scale", "BF16", 8, 2),
             entry("m.weight_zero_point", "I32", 1, 2), entry("m.weight_g_idx", "I32", 64)],
    "gptq": [entry("m.qweight", "I32", 8, 16), entry("m.qzeros", "I32", 4, 2),
             entry("m.scales", "F16", 4, 16), entry("m.g_idx", "I32", 64)],
    "awq": [entry("m.qweight", "I32", 64, 2), entry("m.qzeros", "I32", 4, 2),
            entry("m.scales", "F16", 4, 16)],
}  # fmt: skip


@pytest.mark.parametrize("way", TENSORS)
def test_headers(way: str) -> None:
    chance, num_read = random.Random(1), 0
    config = {"quant_method": way, "bits": 4, "group_size": 16}
    quantisation = (
        read_quantisation({"quantization_config": config}, "demo")
        if way in ("gptq", "awq")
        else None
    )
    plain = {each.name: each for each in TENSORS[way]}
    whole = find_weights(plain, quantisation)
    assert len(whole) == 1 and all(each.encoding is not None for each in whole.values())
    for _ in range(500):
        tensors = dict(plain)
        name = chance.choice(list(tensors))
        old = tensors.pop(name)
        if chance.random() < 0.8:
            shape = [chance.choice((0, 1, 2, 3, 16, 64, 1 << 40, dim)) for dim in old.shape]
            shape = shape[: chance.randint(0, 5)] + [2] * chance.choice((0, 0, 0, 1))
            dtype = chance.choice((old.dtype, old.dtype, *ITEM_BITS))
            tensors[name] = entry(name, dtype, *shape)
        with contextlib.suppress(CheckpointError):
            for found in find_weights(tensors, quantisation).values():
                assert found.encoding is None or 0 not in found.shape
            num_read += 1
    assert num_read < 400


def test_a_weight_may_lie_in_several_files() -> None:
    tensors = {each.name: each for each in TENSORS["nvfp4"]}
    scale = tensors["m.weight_scale"]
    tensors["m.weight_scale"] = replace(scale, file=Path("other"))
    (weight,) = find_weights(tensors, None).values()
    assert weight.file == Path("demo") and weight.files == {Path("demo"), Path("other")}
    assert weight.num_bytes == 3 * 8  # without what concerns activations
