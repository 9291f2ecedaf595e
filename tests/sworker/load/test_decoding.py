"""Every format's weights, bit for bit as its definition gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised import (
    Decoded,
    Draw,
    Tensors,
    bits_of,
    e2m1,
    e4m3,
    pack,
    pack_awq,
    raw,
    scaled,
    table,
)
from safetensors.torch import save_file
from torch import Tensor

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.checkpoint import _parse_header, _read_header
from fastdecode.core.model.encoded_tensors import find_weights
from fastdecode.core.model.quantisation import Quantisation, read_quantisation
from sworker.load.reader import TensorReader

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = [(1, 1), (3, 5), (128, 128), (129, 130), (300, 257)]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}


def told(**config: Any) -> Quantisation | None:
    return read_quantisation({"quantization_config": config}, "demo")


def read(
    path: Path, tensors: Tensors, dtype: torch.dtype, quantisation: Quantisation | None = None
) -> Tensors:
    """What is decoded of a file with these tensors."""
    file = path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    entries = {entry.name: entry for entry in _parse_header(file, _read_header(file))}
    weights = find_weights(entries, quantisation)
    with TensorReader(weights.values(), dtype) as reader:
        return {name: reader.read(entry).clone() for name, entry in weights.items()}


def check(
    path: Path, tensors: Tensors, expected: Decoded, quantisation: Quantisation | None = None,
    name: str = "m.weight",
) -> None:  # fmt: skip
    assert np.isfinite(expected).all() and np.unique(expected).size > 0
    for dtype in DTYPES:
        found = read(path, tensors, dtype, quantisation)
        assert set(found) == {name}
        rounded = torch.from_numpy(expected).to(dtype)
        assert torch.equal(found[name].view(torch.uint8), rounded.view(torch.uint8)), dtype


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_blocks(tmp_path: Path, shape: tuple[int, int], suffix: str) -> None:
    draw = Draw(sum(shape))
    codes = draw.fp8(*shape)
    scale = draw.scale(-(-shape[0] // 128), -(-shape[1] // 128))
    expected = scaled(table(e4m3, raw(codes)), scale.numpy(), (128, 128))
    tensors = {"m.weight": codes, f"m.weight{suffix}": scale}
    for quantisation in (None, told(quant_method="fp8", weight_block_size=[128, 128])):
        check(tmp_path, tensors, expected, quantisation)


def test_fp8_blocks_of_another_size(tmp_path: Path) -> None:
    draw = Draw(1)
    codes, scale = draw.fp8(50, 70), draw.scale(4, 3, dtype=torch.bfloat16)
    expected = scaled(table(e4m3, raw(codes)), scale.float().numpy(), (16, 32))
    quantisation = told(quant_method="fp8", weight_block_size=[16, 32])
    check(tmp_path, {"m.weight": codes, "m.weight_scale_inv": scale}, expected, quantisation)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (37,), (37, 1)])
def test_fp8_with_one_scale_or_one_a_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    draw, num = Draw(2), 37 if 37 in shape else 1
    codes, scale = draw.fp8(37, 53), draw.scale(*shape, dtype=torch.bfloat16)
    of_rows = scale.float().numpy().reshape(-1, 1)
    expected = scaled(table(e4m3, raw(codes)), of_rows, (37 // num, 53))
    tensors = {"m.weight": codes, "m.weight_scale": scale, "m.input_scale": draw.scale(),
               "m.k_scale": draw.scale(1)}  # fmt: skip
    check(tmp_path, tensors, expected, told(quant_method="modelopt", quant_algo="FP8"))


def test_fp8_of_stacked_experts(tmp_path: Path) -> None:
    draw = Draw(4)
    codes, scale = draw.fp8(3, 130, 140), draw.scale(3, 2, 2)
    expected = np.stack(
        [scaled(table(e4m3, raw(codes[e])), scale[e].numpy(), (128, 128)) for e in range(3)]
    )
    tensors = {"experts.up": codes, "experts.up_scale_inv": scale}
    check(tmp_path, tensors, expected, name="experts.up")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    draw = Draw(5)
    codes, exponents = draw.fp8(6, 96), draw.bytes(6, 3, low=100, high=150)
    exponents[0, 0] = 0  # 2^-127: not a normal number
    scale = np.float32(2.0) ** (exponents.numpy().astype(np.float32) - 127)
    expected = scaled(table(e4m3, raw(codes)), scale, (1, 32))
    tensors = {"m.weight": codes, "m.weight_scale": exponents.view(dtype)}
    found = read(tmp_path, tensors, torch.float32)["m.weight"]
    assert np.array_equal(found.numpy(), expected)


def test_mxfp4_of_stacked_experts(tmp_path: Path) -> None:
    draw = Draw(6)
    codes = draw.bytes(3, 10, 2, 16)
    exponents = draw.bytes(3, 10, 2, low=115, high=135)
    values = table(e2m1, bits_of(codes.view(3 * 10, 32), 4)).reshape(3, 10, 64)
    scale = 2.0 ** (exponents.numpy().astype(np.float64) - 127)
    expected = np.stack([scaled(values[e], scale[e], (1, 32)).T for e in range(3)])
    tensors = {"experts.up_blocks": codes, "experts.up_scales": exponents}
    check(tmp_path, tensors, np.ascontiguousarray(expected), name="experts.up")
    transformers = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = transformers.convert_moe_packed_tensors(codes, exponents)
    assert torch.equal(read(tmp_path, tensors, torch.bfloat16)["experts.up"], theirs)


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4(tmp_path: Path, seed: int) -> None:
    draw = Draw(seed)
    codes, scale, factor = draw.bytes(9, 24), draw.fp8(9, 3), draw.scale()
    values = table(e2m1, bits_of(codes, 4))
    whole = table(e4m3, raw(scale)) * factor.numpy()
    tensors = {"m.weight": codes, "m.weight_scale": scale, "m.weight_scale_2": factor,
               "m.input_scale": draw.scale()}  # fmt: skip
    quantisation = told(quant_method="modelopt", quant_algo="NVFP4", group_size=16)
    check(tmp_path, tensors, scaled(values, whole.astype(np.float32), (1, 16)), quantisation)
    divisor = draw.scale(1)
    packed = {"m.weight_packed": codes, "m.weight_scale": scale, "m.weight_global_scale": divisor}
    whole = table(e4m3, raw(scale)) / divisor.numpy()
    check(tmp_path, packed, scaled(values, whole.astype(np.float32), (1, 16)))


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    draw = Draw(7)
    codes, exponents = draw.bytes(5, 32), draw.bytes(5, 2, low=115, high=135)
    scale = 2.0 ** (exponents.numpy().astype(np.float64) - 127)
    expected = scaled(table(e2m1, bits_of(codes, 4)), scale, (1, 32))
    check(tmp_path, {"m.weight_packed": codes, "m.weight_scale": exponents}, expected)


def packed_config(bits: int, group: int | None) -> Quantisation | None:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "strategy": "group"}
    group_0 = {"weights": weights, "targets": ["Linear"]}
    return told(
        quant_method="compressed-tensors", format="pack-quantized", config_groups={"a": group_0}
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("zeros", [False, True])
def test_packed_integers(tmp_path: Path, bits: int, group: int | None, zeros: bool) -> None:
    draw, rows, columns = Draw(bits), 11, 96
    groups, middle = columns // (group or columns), 1 << (bits - 1)
    codes = draw.numbers(rows, columns, high=1 << bits)
    scale = draw.scale(rows, groups, dtype=torch.bfloat16)
    tensors = {"m.weight_packed": pack(codes, bits), "m.weight_scale": scale,
               "m.weight_shape": torch.tensor([rows, columns])}  # fmt: skip
    zero = np.full((rows, groups), middle)
    if zeros:
        zero = draw.numbers(rows, groups, high=1 << bits)
        tensors["m.weight_zero_point"] = pack(zero.T, bits).T
    expected = scaled(codes, scale.float().numpy(), (1, columns // groups), zero)
    check(tmp_path, tensors, expected, packed_config(bits, group))


def test_packed_integers_in_activation_order(tmp_path: Path) -> None:
    draw = Draw(8)
    codes, scale = draw.numbers(6, 64), draw.scale(6, 4, dtype=torch.bfloat16)
    index = torch.from_numpy(draw.random.permutation(np.arange(64) // 16).astype(np.int32))
    expected = scaled(codes - 8, scale.float().numpy()[:, index.numpy()], (1, 1))
    tensors = {"m.weight_packed": pack(codes, 4), "m.weight_scale": scale}
    check(tmp_path, {**tensors, "m.weight_g_idx": index}, expected, packed_config(4, 16))
    unfilled = torch.full((64,), -1, dtype=torch.int32)
    in_order = scaled(codes - 8, scale.float().numpy(), (1, 16))
    check(tmp_path, {**tensors, "m.weight_g_idx": unfilled}, in_order, packed_config(4, 16))


def test_int8(tmp_path: Path) -> None:
    draw = Draw(9)
    codes = draw.bytes(7, 13).view(torch.int8)
    scale = draw.scale(7, 1, dtype=torch.bfloat16)
    zero = draw.bytes(7, 1).view(torch.int8)
    tensors = {"m.weight": codes, "m.weight_scale": scale}
    values, own = codes.numpy().astype(np.int64), scale.float().numpy()
    check(tmp_path, tensors, scaled(values, own, (1, 13)))
    tensors["m.weight_zero_point"] = zero
    check(tmp_path, tensors, scaled(values, own, (1, 13), zero.numpy()))


def test_awq(tmp_path: Path) -> None:
    draw, inputs, outputs = Draw(10), 48, 24
    codes, zero = draw.numbers(inputs, outputs), draw.numbers(3, outputs)
    scale = draw.scale(3, outputs, dtype=torch.float16)
    tensors = {"m.qweight": pack_awq(codes), "m.qzeros": pack_awq(zero), "m.scales": scale}
    expected = scaled(codes, scale.float().numpy(), (16, 1), zero).T
    check(tmp_path, tensors, np.ascontiguousarray(expected), told(**AWQ))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("in_order", [True, False])
def test_gptq(tmp_path: Path, bits: int, version: str, in_order: bool) -> None:
    draw, inputs, outputs = Draw(bits), 48, 32
    codes = draw.numbers(inputs, outputs, high=1 << bits)
    stored = draw.numbers(3, outputs, high=1 << bits)
    scale = draw.scale(3, outputs, dtype=torch.float16)
    index = np.arange(inputs) // 16
    if not in_order:
        index = draw.random.permutation(index)
    tensors = {
        "m.qweight": pack(codes.T, bits).T,
        "m.qzeros": pack(stored, bits),
        "m.scales": scale,
        "m.g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    zero = (stored + 1) % (1 << bits) if version == "gptq" else stored
    expected = scaled(codes, scale.float().numpy()[index], (1, 1), zero[index]).T
    quantisation = told(**{**GPTQ, "bits": bits, "checkpoint_format": version})
    check(tmp_path, tensors, np.ascontiguousarray(expected), quantisation)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stored", [[0, 0], [1, 1], [0, 1], None], ids=str)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_symmetric_zero_is_the_middle(
    tmp_path: Path, bits: int, stored: list[int] | None, version: str
) -> None:
    """Also where the middle is stored as one less, or not at all."""
    draw, inputs, outputs, middle = Draw(bits), 32, 16, 1 << (bits - 1)
    codes = draw.numbers(inputs, outputs, high=1 << bits)
    scale = draw.scale(2, outputs, dtype=torch.float16)
    tensors = {"m.qweight": pack(codes.T, bits).T, "m.scales": scale}
    if stored is not None:
        tensors["m.qzeros"] = pack(middle - np.repeat(np.array([stored]), outputs, 0).T, bits)
    expected = scaled(codes, scale.float().numpy(), (16, 1), np.full((2, outputs), middle)).T
    quantisation = told(**{**GPTQ, "bits": bits, "sym": True, "checkpoint_format": version})
    check(tmp_path, tensors, np.ascontiguousarray(expected), quantisation)


def test_gptq_symmetric_with_other_zero_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"zero points that differ.*'sym' is true"):
        read(tmp_path, gptq_with(), torch.float32, told(**GPTQ, sym=True))


@pytest.mark.parametrize(
    "name",
    ["self_attn.kv_scale", "self_attn.k_scale", "kv_cache_scale", "k_zero_point", "v_zero_point",
     "self_attn.q_zero_point", "mlp.up_proj.input_amax", "v_amax", "weight_amax",
     "prob_output_scale"],
)  # fmt: skip
def test_scales_of_activations_and_kv_are_left_out(tmp_path: Path, name: str) -> None:
    """Scales of checkpoints, those with plain weights too."""
    for tensors in ({"m.weight": torch.ones(4, 4)}, gptq_with()):
        found = read(tmp_path, {**tensors, f"m.{name}": torch.ones(1)}, torch.float32, told(**GPTQ))
        assert list(found) == ["m.weight"]


def test_large_matrices_are_decoded_in_parts(tmp_path: Path) -> None:
    draw, rows, columns = Draw(11), 1100, 2048  # many chunks
    codes = draw.fp8(rows, columns)
    scale = draw.scale(9, 16)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    found = read(tmp_path, {"m.weight": codes, "m.weight_scale_inv": scale}, torch.float32)
    assert torch.equal(found["m.weight"], codes.float() * spread)
    numbers = draw.numbers(2048, 1040)
    zero = draw.numbers(16, 1040)
    own = draw.scale(16, 1040, dtype=torch.float16)
    gptq = {"m.qweight": pack(numbers.T, 4).T, "m.qzeros": pack(zero, 4), "m.scales": own}
    expected = (numbers - np.repeat((zero + 1) % 16, 128, 0)).astype(np.float32)
    expected *= np.repeat(own.float().numpy(), 128, 0)
    quantisation = told(**{**GPTQ, "group_size": 128})
    found = read(tmp_path, gptq, torch.float32, quantisation)
    assert np.array_equal(found["m.weight"].numpy(), expected.T)


def test_fp8_blocks_as_transformers_decodes_them() -> None:
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    draw = Draw(12)
    codes, scale = draw.fp8(256, 384), draw.scale(2, 3)
    out = theirs.Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    expected = scaled(table(e4m3, raw(codes)), scale.numpy(), (128, 128))
    assert torch.equal(out, torch.from_numpy(expected).bfloat16())


def wrong(**changes: Tensor | None) -> Tensors:
    draw = Draw(13)
    tensors: dict[str, Tensor | None] = {
        "m.weight": draw.fp8(200, 100),
        "m.weight_scale_inv": draw.scale(2, 1),
        **{name.replace("__", "."): tensor for name, tensor in changes.items()},
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


NAN = float("nan")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (wrong(m__weight_scale_inv=None), r"F8_E4M3.*no scale.*bfloat16"),
        (wrong(m__weight_scale_inv=torch.ones(3, 1)), r"\[3, 1\].*200x100.*blocks.*again"),
        (wrong(m__weight_scale_inv=torch.ones(2, 1, 1)), r"\[2, 1, 1\].*blocks"),
        (wrong(m__weight_scale_inv=torch.ones(0, 1)), r"\[0, 1\].*blocks"),
        (wrong(m__weight_scale_inv=torch.ones(2, 1).int()), "dtype I32, not one of F32"),
        (wrong(m__weight_scale_inv=torch.tensor([[1.0], [NAN]])), "isn't finite.*again"),
        (wrong(m__weight_scale_inv=torch.tensor([[255], [1]]).byte()), "isn't a number"),
        (wrong(n__weight=torch.ones(4).to(torch.float8_e5m2)), "F8_E5M2.*isn't decoded"),
        ({"m.weight_packed": torch.ones(4, 4).int()}, "no scales"),
        ({"up_blocks": torch.ones(2, 4, 2, 16).byte()}, "no scales"),
        (
            {"m.weight_packed": torch.ones(4, 16).byte(), "m.weight_scale": Draw(0).fp8(4, 2)},
            "weight_global_scale",
        ),
        (
            {"m.weight": torch.ones(4, 16).byte(), "m.weight_scale": Draw(0).fp8(4, 2),
             "m.weight_scale_2": torch.ones(2)},
            "isn't one number",
        ),
        ({"m.qweight": torch.ones(4, 4).int()}, "AWQ or as GPTQ"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: Tensors, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(tmp_path, tensors, torch.float32)


def gptq_with(**changes: Tensor | None) -> Tensors:
    tensors: dict[str, Tensor | None] = {
        "qweight": torch.ones(4, 8).int(),
        "qzeros": torch.ones(2, 1).int(),
        "scales": torch.ones(2, 8).half(),
        "g_idx": (torch.arange(32) // 16).int(),
        **changes,
    }
    return {f"m.{name}": tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (gptq_with(g_idx=torch.arange(16).int()), r"g_idx.*\[16\], not \[32\]"),
        (gptq_with(g_idx=torch.full((32,), 2).int()), "beyond the 2 that there are"),
        (gptq_with(g_idx=torch.arange(32).float()), "dtype F32"),
        (gptq_with(qzeros=torch.ones(2, 2).int()), r"qzeros.*\[2, 2\], not \[2, 1\]"),
        (gptq_with(scales=torch.ones(5, 8).half()), r"scales.*\[5, 8\].*32x8"),
        (gptq_with(qzeros=None), r"no m\.qzeros"),
    ],
)
def test_gptq_that_does_not_fit_is_refused(tmp_path: Path, tensors: Tensors, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(tmp_path, tensors, torch.float32, told(**GPTQ))
