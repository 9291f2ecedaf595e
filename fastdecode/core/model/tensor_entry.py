"""One tensor of a checkpoint: what it is called, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastdecode.core.model.weight_formats import Format

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of an item of each dtype that safetensors names."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk, or one that is decoded from several."""

    name: str
    file: Path
    """Where the tensor is, or its codes."""
    dtype: str
    """As safetensors names it, e.g. ``BF16``; the format's name if it is encoded."""
    shape: tuple[int, ...]
    """Once decoded."""
    offset: int
    """Bytes from the file's start."""
    num_bytes: int
    """On disk, scales and zero points included."""
    encoding: Encoding | None = None
    """How it is encoded; None: it lies on disk as it is."""

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
    block: tuple[int, int]
    """Rows and columns of such a matrix that share a scale."""
    bits: int
    """Of a code."""
    order: tuple[int, ...]
    """Position of the i-th code in its word."""
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
