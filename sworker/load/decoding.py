"""From codes and scales to weights: one formula for every format.

``weight[r, c] = (value(code[r, c]) - zero[block]) · scale[block]``, computed in float32 and
rounded to the dtype that is asked for. See ``fastdecode.core.model.tensor_entry`` for the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.tensor_entry import Encoding, TensorEntry

ReadBytes = Callable[[TensorEntry, int, int], Tensor]
"""Entry, first byte within it, and how many → uint8 [bytes]."""

_CHUNK_WEIGHTS = 1 << 18
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E8M0": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def decode(entry: TensorEntry, read: ReadBytes, out: Tensor) -> None:
    """Fill ``out`` with an encoded weight. Codes are read some rows at a time.

    Args:
        out: contiguous, of the entry's shape, in any float dtype.

    Raises:
        CheckpointError: If a scale isn't finite, or the group index names a missing scale.
    """
    encoding = entry.encoding
    assert encoding is not None
    count, rows, columns = encoding.matrix
    scales, zeros = _read_scales(encoding, read), _read_zeros(encoding, read)
    index, table = _read_index(encoding, read), _table(encoding)
    turned = encoding.format.inputs_first or not encoding.format.flat_groups
    matrices = out.view(count, columns, rows) if turned else out.view(count, rows, columns)
    num_rows = max(1, _CHUNK_WEIGHTS // columns)
    if encoding.format.packed_rows:
        num_rows = -(-num_rows // len(encoding.order)) * len(encoding.order)
    for matrix, target in enumerate(matrices):
        blocks = _Blocks(encoding, scales[matrix], None if zeros is None else zeros[matrix], index)
        for first in range(0, rows, num_rows):
            chunk = range(first, min(rows, first + num_rows))
            values = blocks.scale(_read_values(encoding, read, matrix, chunk, table), chunk)
            if turned:
                target[:, chunk.start : chunk.stop].copy_(values.T)
            else:
                target[chunk.start : chunk.stop].copy_(values)


@dataclass(frozen=True)
class _Blocks:
    """Scales and zero points of one matrix, float32 [row blocks, column blocks]."""

    encoding: Encoding
    scales: Tensor
    zeros: Tensor | None
    index: Tensor | None  # [inputs]: the block of each

    def scale(self, values: Tensor, rows: range) -> Tensor:
        """The weights of some rows, from their codes' values; in place.

        Args:
            values: float32 [rows, columns].
        """
        if self.zeros is not None:
            self._apply(values, self.zeros, rows, torch.Tensor.sub_)
        self._apply(values, self.scales, rows, torch.Tensor.mul_)
        return values

    def _apply(
        self,
        values: Tensor,
        blocks: Tensor,
        rows: range,
        change: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        height, width = self.encoding.block
        inputs_first = self.encoding.format.inputs_first
        row_blocks = torch.arange(rows.start, rows.stop) // height
        if self.index is not None and inputs_first:
            row_blocks = self.index[rows.start : rows.stop]
        own = blocks[row_blocks]
        columns = values.shape[1]
        if self.index is not None and not inputs_first:
            change(values, own[:, self.index])
        elif columns % width == 0:
            change(values.view(len(rows), -1, width), own.unsqueeze(-1))
        else:
            change(values, own.repeat_interleave(width, 1)[:, :columns])


def _read_values(
    encoding: Encoding, read: ReadBytes, matrix: int, rows: range, table: Tensor | None
) -> Tensor:
    """What the codes of some rows mean, float32 [rows, columns]."""
    codes, form = encoding.codes, encoding.format
    _, num_rows, columns = encoding.matrix
    num_bytes = codes.num_bytes // encoding.matrix[0]
    first, end = (row * num_bytes // num_rows for row in (rows.start, rows.stop))
    data = read(codes, matrix * num_bytes + first, end - first)
    if table is not None:
        return table.index_select(0, data.int()).view(torch.float32).view(len(rows), columns)
    words = data.view(_DTYPES[codes.dtype])
    if codes.dtype == "I8":
        return words.view(len(rows), columns).float()
    in_word = len(encoding.order)
    words = words.view(len(rows) // in_word if form.packed_rows else len(rows), -1)
    values = _unpack(words, encoding, rows_packed=form.packed_rows)
    # Without zero points, the middle of the range is zero.
    return values if encoding.zeros is not None else values.sub_(1 << (encoding.bits - 1))


def _table(encoding: Encoding) -> Tensor | None:
    """What each byte of codes means [256]: a float32, or two, the low four bits'
    first, in the eight bytes of a float64; None: codes are whole numbers."""
    codes = torch.arange(256)
    match encoding.format.values:
        case "e4m3":
            return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        case "e2m1":
            values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
            pairs = torch.stack((values[codes & 15], values[codes >> 4]), 1)
            return pairs.view(torch.float64)[:, 0]
        case "integer":
            return None


def _unpack(words: Tensor, encoding: Encoding, *, rows_packed: bool) -> Tensor:
    """The whole numbers in words of 32 bits, as float32.

    Args:
        words: int32 [rows, columns].
        rows_packed: a word holds numbers of one column: the result is [rows · n,
            columns]; else [rows, columns · n].
    """
    bits, in_word = encoding.bits, len(encoding.order)
    shifts = torch.tensor(encoding.order, dtype=torch.int32) * bits
    mask = (1 << bits) - 1
    rows, columns = words.shape
    if rows_packed:
        codes = (words.unsqueeze(1) >> shifts.view(in_word, 1)) & mask
        return codes.reshape(rows * in_word, columns).float()
    codes = (words.unsqueeze(-1) >> shifts) & mask
    return codes.reshape(rows, columns * in_word).float()


def _read_whole(part: TensorEntry, read: ReadBytes) -> Tensor:
    return read(part, 0, part.num_bytes).view(_DTYPES[part.dtype]).clone()


def _read_scales(encoding: Encoding, read: ReadBytes) -> Tensor:
    """float32 [matrices, row blocks, column blocks]"""
    part, (count, rows, columns) = encoding.scale, encoding.matrix
    scales = _read_whole(part, read)
    if scales.dtype == torch.uint8:
        if bool((scales == 255).any()):
            raise _broken(part, "holds a scale that isn't a number")
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    scales = scales.float()
    if encoding.global_scale is not None:
        factor = _read_whole(encoding.global_scale, read)
        scales = scales * factor if encoding.format.factor is not None else scales / factor
    if not bool(torch.isfinite(scales).all()):
        raise _broken(part, "holds a scale that isn't finite")
    height, width = encoding.block
    return scales.view(count, -(-rows // height), -(-columns // width))


def _read_zeros(encoding: Encoding, read: ReadBytes) -> Tensor | None:
    """float32 [matrices, row blocks, column blocks]"""
    part = encoding.zeros
    if part is None:
        return None
    (count, rows, columns), (height, width) = encoding.matrix, encoding.block
    num_rows, num_columns = -(-rows // height), -(-columns // width)
    zeros = _read_whole(part, read)
    if part.dtype == "I8":
        return zeros.view(count, num_rows, num_columns).float()
    along_rows = not encoding.format.inputs_first
    in_word = len(encoding.order)
    stored_rows = -(-num_rows // in_word) if along_rows else num_rows
    unpacked = _unpack(zeros.view(count * stored_rows, -1), encoding, rows_packed=along_rows)
    if encoding.zero_offset:
        unpacked = (unpacked + encoding.zero_offset) % (1 << encoding.bits)
    found = unpacked.view(count, -1, unpacked.shape[1])[:, :num_rows, :num_columns]
    if encoding.zero_offset is not None:
        return found
    middle = 1 << (encoding.bits - 1)
    if bool(((found != middle) & (found != middle - 1)).any()):
        raise _broken(part, "has zero points that differ, though config.json's 'sym' is true")
    return torch.full_like(found, middle)  # stored as it is, or one less: writers differ


def _read_index(encoding: Encoding, read: ReadBytes) -> Tensor | None:
    part = encoding.group_index
    if part is None:
        return None
    index = _read_whole(part, read).long()
    if bool((index == -1).all()):
        return None  # never filled: groups lie one after the other
    side = 0 if encoding.format.inputs_first else 1
    num_groups = -(-encoding.matrix[1 + side] // encoding.block[side])
    if bool(((index < 0) | (index >= num_groups)).any()):
        raise _broken(part, f"names a scale beyond the {num_groups} that there are")
    return index


def _broken(entry: TensorEntry, why: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: {entry.name!r} {why}. The file is damaged: fetch it again."
    )
