"""Which tensors of a checkpoint are the codes, scales and zero points of which
weight: from names, dtypes and shapes, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.quantisation import Quantisation
from fastdecode.core.model.tensor_entry import (
    AWQ_ORDER,
    FORMATS,
    ITEM_BITS,
    UNUSED,
    Encoding,
    Format,
    TensorEntry,
)

_EXPONENTS = ("U8", "F8_E8M0")
_SCALES = ("F32", "F16", "BF16", "F8_E4M3", *_EXPONENTS)
_WHOLE_NUMBERS = ("I32", "I64")
_UNDECODED = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4")

_Tensors = Mapping[str, TensorEntry]


def find_weights(tensors: _Tensors, quantisation: Quantisation | None) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, with one entry in place of the codes, scales and zero
    points of each quantised weight. Tensors for quantised activations are left out.

    Raises:
        CheckpointError: scales are missing, or shapes don't fit each other.
    """
    used: set[str] = set()
    found: dict[str, TensorEntry] = {}
    for entry in tensors.values():
        encoding = _find_encoding(entry, tensors, quantisation)
        if encoding is not None:
            weight = _decoded(encoding)
            found[weight.name] = weight
            used.update(part.name for part in encoding.parts)
    for name, entry in tensors.items():
        if name not in used and name.rsplit(".", 1)[-1] not in UNUSED:
            if entry.name in found:
                raise _broken(entry, "stands beside codes and scales of the same weight")
            found[name] = entry
    for entry in found.values():
        if entry.encoding is None and entry.dtype in ("F8_E4M3", *_UNDECODED):
            why = "has no scale" if entry.dtype == "F8_E4M3" else "isn't decoded"
            raise CheckpointError(
                f"{entry.file}: {entry.name!r} has the dtype {entry.dtype}, which {why}. The "
                "download is incomplete, or the format isn't known: use the checkpoint in "
                "bfloat16 that it was made from."
            )
    return found


def _find_encoding(
    codes: TensorEntry, tensors: _Tensors, quantisation: Quantisation | None
) -> Encoding | None:
    for form in FORMATS:
        if codes.dtype != form.dtype or not codes.name.endswith(form.codes):
            continue
        if form.name in ("AWQ", "GPTQ") and form.name != _packing(codes, quantisation):
            continue
        stem = codes.name.removesuffix(form.codes)
        names = [stem + suffix for suffix in form.scales if stem + suffix in tensors]
        if not names or (form.factor is not None and stem + form.factor not in tensors):
            continue
        return _encode(form, stem, codes, tensors[names[0]], tensors, quantisation)
    if codes.name.endswith((".qweight", ".weight_packed", "_blocks")):
        raise _broken(codes, "has no scales")
    return None


def _packing(codes: TensorEntry, quantisation: Quantisation | None) -> str:
    if quantisation is None or quantisation.packing is None:
        raise CheckpointError(
            f"{codes.file}: {codes.name!r} holds packed weights, but no quantization_config says "
            "whether as AWQ or as GPTQ does. Fetch the config.json that belongs to them."
        )
    return quantisation.packing


def _encode(
    form: Format,
    stem: str,
    codes: TensorEntry,
    scale: TensorEntry,
    tensors: _Tensors,
    quantisation: Quantisation | None,
) -> Encoding:
    def find(suffix: str | None, dtypes: tuple[str, ...]) -> TensorEntry | None:
        part = tensors.get(stem + suffix) if suffix is not None else None
        return None if part is None else _check_dtype(part, dtypes)

    bits = _bits(form, quantisation)
    matrix = _unpacked(form, codes, bits)
    zeros = find(form.zeros, ("I8", "I32"))
    offset = quantisation.zero_offset if quantisation and form.name == "GPTQ" else 0
    if zeros is None and form.needs_zeros and offset is not None:
        raise _broken(codes, f"has no {stem}{form.zeros}")
    if form.divisor is not None and scale.dtype == "F8_E4M3" and stem + form.divisor not in tensors:
        raise _broken(codes, f"has no {stem}{form.divisor}")
    encoding = Encoding(
        form,
        codes,
        _check_dtype(scale, _SCALES),
        matrix,
        _block(form, codes, scale, matrix, quantisation),
        bits,
        AWQ_ORDER if form.name == "AWQ" else tuple(range(max(1, ITEM_BITS[form.dtype] // bits))),
        find(form.factor or form.divisor, ("F32",)),
        zeros,
        offset,
        find(form.group_index, _WHOLE_NUMBERS),
    )
    _check_parts(encoding)
    return encoding


def _bits(form: Format, quantisation: Quantisation | None) -> int:
    if form.values != "integer":
        return 8 if form.values == "e4m3" else 4
    if form.dtype == "I8":
        return 8
    return 4 if quantisation is None or form.name == "AWQ" else quantisation.bits or 4


def _unpacked(form: Format, codes: TensorEntry, bits: int) -> tuple[int, int, int]:
    """Count, rows and columns of the matrices of codes."""
    shape = codes.shape if form.flat_groups else (*codes.shape[:-2], math.prod(codes.shape[-2:]))
    if len(shape) < 2 or 0 in shape:
        raise _broken(codes, f"has the shape {list(codes.shape)}, which isn't a matrix's")
    *stack, rows, columns = shape
    in_word = ITEM_BITS[form.dtype] // bits
    if form.packed_rows:
        return math.prod(stack), rows * in_word, columns
    return math.prod(stack), rows, columns * in_word


def _block(
    form: Format,
    codes: TensorEntry,
    scale: TensorEntry,
    matrix: tuple[int, int, int],
    quantisation: Quantisation | None,
) -> tuple[int, int]:
    rows, columns = _scale_shape(scale, matrix)
    hint = quantisation.block if quantisation is not None else None
    hint = hint or ((128, 128) if form.values == "e4m3" else (1, 128))
    if form.inputs_first:
        hint = (hint[1], hint[0])
    found = _side(matrix[1], rows, hint[0]), _side(matrix[2], columns, hint[1])
    if found[0] is None or found[1] is None:
        raise _broken(
            scale,
            f"has the shape {list(scale.shape)}, which doesn't divide the {matrix[1]}x{matrix[2]} "
            f"codes of {codes.name!r} into blocks",
        )
    return found[0], found[1]


def _scale_shape(scale: TensorEntry, matrix: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of the scales of one matrix."""
    count, rows, _ = matrix
    shape = scale.shape
    if math.prod(shape) == count:  # one a matrix
        return 1, 1
    if len(shape) == 1 and shape[0] == rows:  # one a row
        return rows, 1
    if len(shape) < 2 or math.prod(shape[:-2]) != count:
        return 0, 0
    return shape[-2], shape[-1]


def _side(length: int, num_scales: int, hint: int) -> int | None:
    """How many of ``length`` dims share one of so many scales."""
    if num_scales == 1:
        return length
    if num_scales and math.ceil(length / hint) == num_scales:
        return hint
    return length // num_scales if num_scales and length % num_scales == 0 else None


def _check_parts(encoding: Encoding) -> None:
    """Shapes of zero points, the global scale and the group index."""
    form, (count, rows, columns) = encoding.format, encoding.matrix
    groups = math.ceil(rows / encoding.block[0]), math.ceil(columns / encoding.block[1])
    if encoding.global_scale is not None and math.prod(encoding.global_scale.shape) != 1:
        raise _broken(encoding.global_scale, "isn't one number")
    index = encoding.group_index
    inputs = rows if form.inputs_first else columns
    if index is not None and index.shape != (inputs,):
        raise _broken(index, f"has the shape {list(index.shape)}, not [{inputs}]")
    zeros = encoding.zeros
    if zeros is None:
        return
    in_word = len(encoding.order) if zeros.dtype == "I32" else 1
    expected = (
        (groups[0], math.ceil(groups[1] / in_word))
        if form.inputs_first
        else (math.ceil(groups[0] / in_word), groups[1])
    )
    if math.prod(zeros.shape) != count * math.prod(expected):
        raise _broken(zeros, f"has the shape {list(zeros.shape)}, not {list(expected)}")


def _decoded(encoding: Encoding) -> TensorEntry:
    """The weight's entry: [outputs, inputs], unless the format keeps the inputs first."""
    form, codes = encoding.format, encoding.codes
    _, rows, columns = encoding.matrix
    stack = codes.shape[: -2 if form.flat_groups else -3]
    turned = form.inputs_first or not form.flat_groups
    return TensorEntry(
        codes.name.removesuffix(form.codes) + form.weight,
        codes.file,
        form.name,
        (*stack, columns, rows) if turned else (*stack, rows, columns),
        codes.offset,
        sum(part.num_bytes for part in encoding.parts),
        encoding,
    )


def _check_dtype(part: TensorEntry, dtypes: tuple[str, ...]) -> TensorEntry:
    if part.dtype not in dtypes:
        raise _broken(part, f"has the dtype {part.dtype}, not one of {', '.join(dtypes)}")
    return part


def _broken(entry: TensorEntry, why: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: {entry.name!r} {why}. The weights are incomplete or of another format "
        "than config.json says: fetch them again."
    )
