"""One tensor of a checkpoint: what it is called, where its bytes are, and how quantised ones
are stored.

One formula decodes every format::

    weight[r, c] = (value(code[r, c]) - zero[block]) · scale[block]

A row of ``FORMATS`` names the tensors that a weight is stored in, how its codes are
packed, and what a code's value is. Block sizes follow from shapes.

Sources: OCP Microscaling Formats 1.0 (e2m1, e4m3, e8m0); the layouts of
transformers, modelopt and compressed-tensors; AutoAWQ's ``WQLinear_GEMM`` and
AutoGPTQ's ``QuantLinear``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of an item of each dtype that safetensors names."""

Values: TypeAlias = Literal["e4m3", "e2m1", "integer"]
"""A code is an 8-bit float of 4 exponent bits, a 4-bit float of 2, or a whole number."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in its word of the i-th of 8 values."""


@dataclass(frozen=True)
class Format:
    """One way of storing a quantised matrix."""

    name: str
    codes: str  # suffix of the tensor with the codes
    weight: str  # suffix of the decoded tensor
    scales: tuple[str, ...]  # suffixes that the tensor with the scales may have
    dtype: str  # dtype of the codes
    values: Values
    factor: str | None = None  # suffix of one number that scales are multiplied with
    divisor: str | None = None  # suffix of one number that scales are divided by
    zeros: str | None = None  # suffix of the zero points
    needs_zeros: bool = False
    group_index: str | None = None
    """Suffix of the tensor that names each input's scale; it may be missing."""
    inputs_first: bool = False  # codes and scales are [inputs, outputs]
    packed_rows: bool = False  # a word holds codes of one column, not of one row
    flat_groups: bool = True
    """If False, codes are [outputs, groups, bytes of a group], and are decoded to [inputs,
    outputs]."""


FORMATS = (
    Format("NVFP4", ".weight", ".weight", (".weight_scale",), "U8", "e2m1",
           factor=".weight_scale_2"),
    Format("FP8", "", "", ("_scale_inv", "_scale"), "F8_E4M3", "e4m3"),
    Format("INT8", ".weight", ".weight", (".weight_scale",), "I8", "integer",
           zeros=".weight_zero_point"),
    Format("MXFP4", "_blocks", "", ("_scales",), "U8", "e2m1", flat_groups=False),
    Format("FP4", ".weight_packed", ".weight", (".weight_scale",), "U8", "e2m1",
           divisor=".weight_global_scale"),
    Format("INT4", ".weight_packed", ".weight", (".weight_scale",), "I32", "integer",
           zeros=".weight_zero_point", group_index=".weight_g_idx"),
    Format("AWQ", ".qweight", ".weight", (".scales",), "I32", "integer",
           zeros=".qzeros", needs_zeros=True, inputs_first=True),
    Format("GPTQ", ".qweight", ".weight", (".scales",), "I32", "integer",
           zeros=".qzeros", needs_zeros=True, group_index=".g_idx", inputs_first=True,
           packed_rows=True),
)  # fmt: skip

UNUSED = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "activation_scale",
    "activation_scale_ub", "input_scale_ub", "k_scale", "v_scale", "q_scale", "kv_scale",
    "kv_cache_scale", "k_zero_point", "v_zero_point", "q_zero_point", "output_zero_point",
    "k_global_scale", "v_global_scale", "q_global_scale", "input_amax", "output_amax",
    "weight_amax", "k_amax", "v_amax", "prob_scale", "prob_output_scale", "prob_zero_point",
    "weight_shape",
)  # fmt: skip
"""Last parts of names of tensors that concern quantised activations or a
quantised KV cache, which a decoded model hasn't."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk, or one that is decoded from several."""

    name: str
    file: Path  # where the tensor is, or its codes
    dtype: str
    """As safetensors names it, e.g. ``BF16``; the format's name if it is encoded."""
    shape: tuple[int, ...]  # shape once decoded
    offset: int  # bytes from the file's start
    num_bytes: int  # bytes on disk, scales and zero points included
    encoding: Encoding | None = None
    """How it is encoded. None if it lies on disk as it is."""

    @property
    def files(self) -> set[Path]:
        if self.encoding is None:
            return {self.file}
        return {part.file for part in self.encoding.parts}


@dataclass(frozen=True)
class Encoding:
    """The tensors on disk that a weight is decoded from, and how."""

    format: Format
    codes: TensorEntry
    scale: TensorEntry
    matrix: tuple[int, int, int]
    """How many matrices, and rows and columns of each as stored, once unpacked."""
    block: tuple[int, int]  # rows and columns of such a matrix that share a scale
    bits: int  # bits of a code
    order: tuple[int, ...]  # position of the i-th code in its word
    global_scale: TensorEntry | None = None
    zeros: TensorEntry | None = None
    zero_offset: int | None = 0
    """Added to a stored zero point, modulo the range of a code. None if zero is its middle."""
    group_index: TensorEntry | None = None
    """[inputs]: the scale's row or column that each input has."""

    @property
    def parts(self) -> list[TensorEntry]:
        """All tensors on disk that it is decoded from."""
        parts = (self.codes, self.scale, self.global_scale, self.zeros, self.group_index)
        return [part for part in parts if part is not None]
