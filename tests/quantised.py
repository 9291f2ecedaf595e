"""Quantised tensors for tests: random codes in every format, encoders of given weights, and slow
decoders that follow the formats' definitions value by value.

Nothing here shares code with what it checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Decoded = np.ndarray  # float32


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def raw(tensor: Tensor) -> np.ndarray:
    """Bytes, [..., last dim · item size]."""
    if tensor.dim() == 0:
        tensor = tensor.view(1)
    return tensor.contiguous().view(torch.uint8).numpy()


def bits_of(words: Tensor, bits: int) -> np.ndarray:
    """Unsigned numbers of so many bits that lie in a row of words, lowest first."""
    flat = raw(words)
    out = []
    for row in flat.reshape(-1, flat.shape[-1]):
        number = int.from_bytes(row.tobytes(), "little")
        count = 8 * len(row) // bits
        out.append([number >> (bits * i) & ((1 << bits) - 1) for i in range(count)])
    return np.array(out, dtype=np.int64)


def pack(values: np.ndarray, bits: int) -> Tensor:
    """[rows, n] numbers of so many bits → int32 [rows, ceil(n · bits / 32)]."""
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * i) for i, value in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        rows.append(np.frombuffer(number.to_bytes(4 * num_words, "little"), dtype="<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def pack_awq(values: np.ndarray) -> Tensor:
    """As AutoAWQ: the value at place p of a word is the one at order[p]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows, columns = values.shape
    return pack(values.reshape(rows, columns // 8, 8)[:, :, order].reshape(rows, columns), 4)


def scaled(
    values: np.ndarray, scale: np.ndarray, block: tuple[int, int], zero: np.ndarray | None = None
) -> Decoded:
    """(value - zero) · scale, one weight at a time, in float32."""
    out = np.empty(values.shape, np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            at = row // block[0], column // block[1]
            value = np.float32(values[row, column])
            if zero is not None:
                value = np.float32(value - np.float32(zero[at]))
            out[row, column] = value * np.float32(scale[at])
    return out


def table(of: Callable[[int], float], codes: np.ndarray) -> np.ndarray:
    known = {code: of(code) for code in np.unique(codes).tolist()}
    return np.vectorize(known.__getitem__, otypes=[np.float32])(codes)


class Draw:
    """Random parts of quantised tensors."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def fp8(self, *shape: int) -> Tensor:
        codes = self.random.integers(0, 256, shape, dtype=np.uint8)
        codes[(codes & 127) == 127] = 0  # not a number
        return torch.from_numpy(codes).view(torch.float8_e4m3fn)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.from_numpy(self.random.integers(low, high, shape, dtype=np.uint8))

    def numbers(self, *shape: int, high: int = 16) -> np.ndarray:
        return self.random.integers(0, high, shape)

    def scale(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = np.asarray(self.random.uniform(0.01, 2.0, shape), dtype=np.float32)
        return torch.from_numpy(drawn).to(dtype)


def fp8_blocks(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Codes and scales [⌈N/block⌉, ⌈K/block⌉] of a matrix, as DeepSeek made them."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[at].abs().max().clamp_min(1e-8) / 448
            codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def nearest_e2m1(values: Tensor) -> Tensor:
    """4-bit codes, uint8."""
    table = torch.tensor([e2m1(code) for code in range(16)])
    return (values.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def pairs(codes: Tensor) -> Tensor:
    """4-bit codes → bytes, the first in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def edit_checkpoint(
    source: Path, target: Path, quantise: Callable[[str, Tensor], Tensors | None], **config: Any
) -> Path:
    """A copy of a single-file checkpoint in which ``quantise`` has replaced
    tensors, and ``config`` fields of config.json."""
    target.mkdir()
    tensors: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        made = quantise(name, tensor)
        tensors.update({name: tensor} if made is None else made)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              target / "model.safetensors")  # fmt: skip
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    read = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**read, **config}))
    return target


# --- weights as every format stores them, and what they are decoded to
# -----------------------------------------------------------------------------

Made = tuple[Tensors, Tensor]
"""Tensors by what is added to a module's name, and the decoded weight, float32."""


def _draw_scales(weight: Tensor, group: int, top: float) -> Tensor:
    """[N, K / group]: such that the largest of a group becomes ``top``."""
    groups = weight.view(weight.shape[0], -1, group)
    return groups.abs().amax(-1).clamp_min(1e-6) / top


def as_fp8_blocks(weight: Tensor) -> Made:
    codes, scale = fp8_blocks(weight, 48)
    decoded = scaled(table(e4m3, raw(codes)), scale.numpy(), (48, 48))
    return {".weight": codes, ".weight_scale_inv": scale}, torch.from_numpy(decoded)


def as_fp8(weight: Tensor) -> Made:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    decoded = scaled(table(e4m3, raw(codes)), scale.view(1, 1).numpy(), tuple(weight.shape))
    parts = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}
    return parts, torch.from_numpy(decoded)


def as_nvfp4(weight: Tensor) -> Made:
    wanted = _draw_scales(weight, 16, 6.0)
    factor = wanted.max() / 448
    scale = (wanted / factor).to(torch.float8_e4m3fn)
    whole = torch.from_numpy(table(e4m3, raw(scale)) * factor.numpy()).clamp_min(1e-9)
    codes = nearest_e2m1(weight / whole.repeat_interleave(16, 1))
    decoded = scaled(table(e2m1, codes.numpy()), table(e4m3, raw(scale)) * factor.numpy(), (1, 16))
    parts = {".weight": pairs(codes), ".weight_scale": scale, ".weight_scale_2": factor}
    return parts, torch.from_numpy(decoded)


def as_int4(weight: Tensor) -> Made:
    scale = _draw_scales(weight, 16, 7.0).bfloat16()
    codes = (weight / scale.float().repeat_interleave(16, 1)).round().clamp(-8, 7) + 8
    decoded = scaled(codes.numpy() - 8, scale.float().numpy(), (1, 16))
    packed = pack(codes.numpy().astype(np.int64), 4)
    shape = torch.tensor(weight.shape)
    parts = {".weight_packed": packed, ".weight_scale": scale, ".weight_shape": shape}
    return parts, torch.from_numpy(decoded)


def _with_zeros(weight: Tensor) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Codes [K, N], zero points [K / 16, N], scales alike in float16."""
    groups = weight.T.reshape(-1, 16, weight.shape[0])
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).clamp_min(1e-4).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float().unsqueeze(1) + zero.unsqueeze(1)).round().clamp(0, 15)
    return (
        codes.view(weight.T.shape).numpy().astype(np.int64),
        zero.numpy().astype(np.int64),
        scale,
    )


def as_awq(weight: Tensor) -> Made:
    codes, zero, scale = _with_zeros(weight)
    decoded = scaled(codes, scale.float().numpy(), (16, 1), zero).T
    parts = {".qweight": pack_awq(codes), ".qzeros": pack_awq(zero), ".scales": scale}
    return parts, torch.from_numpy(np.ascontiguousarray(decoded))


def as_gptq(weight: Tensor) -> Made:
    codes, zero, scale = _with_zeros(weight)
    index = np.arange(codes.shape[0]) // 16
    decoded = scaled(codes, scale.float().numpy(), (16, 1), zero).T
    parts = {".qweight": pack(codes.T, 4).T, ".qzeros": pack(zero - 1, 4), ".scales": scale,
             ".g_idx": torch.from_numpy(index.astype(np.int32))}  # fmt: skip
    return parts, torch.from_numpy(np.ascontiguousarray(decoded))


WAYS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "fp8-blocks": (as_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [48, 48]}),
    "fp8": (as_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (as_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "int4": (as_int4, {"quant_method": "compressed-tensors", "format": "pack-quantized",
                       "config_groups": {"g": {"targets": ["Linear"], "weights": {
                           "num_bits": 4, "type": "int", "group_size": 16}}}}),
    "awq": (as_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
}  # fmt: skip


def quantise_checkpoint(source: Path, directory: Path, way: str) -> tuple[Path, Path]:
    """A checkpoint whose projections are quantised, and one that holds, in
    float32, what they are decoded to. Biases, norms and embeddings stay."""
    encode, config = WAYS[way]
    made: dict[str, Made] = {}

    def quantise(name: str, tensor: Tensor) -> Tensors | None:
        if not name.endswith("_proj.weight"):
            return None
        made[name] = encode(tensor)
        stem = name.removesuffix(".weight")
        return {stem + suffix: part for suffix, part in made[name][0].items()}

    quantised = edit_checkpoint(
        source, directory / way, quantise, quantization_config=config, torch_dtype="float32"
    )
    plain = edit_checkpoint(
        source,
        directory / f"{way}-decoded",
        lambda name, _: {name: made[name][1]} if name in made else None,
    )
    return quantised, plain


def as_mxfp4(stacked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of experts [E, K, N], as gpt-oss stores them: blocks [E, N, K / 32, 16], scales
    [E, N, K / 32], and what they are decoded to."""
    turned = stacked.transpose(1, 2)
    groups = turned.reshape(*turned.shape[:2], -1, 32)
    exponent = (groups.abs().amax(-1).clamp_min(1e-6) / 6).log2().ceil()
    codes = nearest_e2m1(groups / exponent.exp2().unsqueeze(-1))
    values = torch.from_numpy(table(e2m1, codes.numpy())) * exponent.exp2().unsqueeze(-1)
    decoded = values.reshape(turned.shape).transpose(1, 2).contiguous()
    return pairs(codes), (exponent + 127).to(torch.uint8), decoded
