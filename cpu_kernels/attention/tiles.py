# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Register tiles: rows of queries (or weights) times vectors of cached cells.

Both matrix products of attention have the same inner step: a few vectors of
**cells** from the cache (K: one dim word of many tokens; V: one token word of
many dims), each multiplied with one broadcast operand word per query row::

    tile[r][c] += operand[r] · cells[c]            r < rows, c < vectors: all in registers

AMX's tile registers (``amx_products``) are another place for such a tile, and
take 16 steps at once.
"""

from __future__ import annotations

from llvmlite import ir
from numba.types import boolean, int64

from cpu_kernels.attention.amx_products import (
    AmxTileType,
    accumulate_totals,
    load_state,
    store_totals,
    zero_totals,
)
from cpu_kernels.attention.operands import BF16, BIAS, FACTOR_BYTES, PLANE_BYTES, ROW_BYTES, UNIT
from cpu_kernels.codegen.memory import emit_prefetches
from cpu_kernels.codegen.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    TileType,
    broadcast,
    call,
    constant,
    load_at,
    make_tile,
    map_tile,
    multiply_add,
    store_at,
    vec,
)
from cpu_kernels.codegen.translate import Emitter, Value


def _tile_type(shape, vectors: int) -> TileType | AmxTileType:
    if shape.tiles:
        return AmxTileType(shape.product_rows, vectors)
    return TileType(shape.rows, vectors, shape.lanes, shape.is_integer)


@Emitter
def zero_scores(builder, shape, vectors, file: int64):
    """The tile that queries · K is added to, of that number of vectors of tokens. ``file``: the
    thread's AMX tiles, where these are used."""
    kind = _tile_type(shape, vectors)
    if isinstance(kind, AmxTileType):
        return Value(kind, zero_totals(builder, shape, kind, file))
    return Value(kind, ir.Constant(kind.value, None))


# --- cells → operands of a product


def _half_to_float(builder, half, lanes: int):
    """float16 bits in int32 lanes → float32, for hosts without F16C; exact,
    subnormals, infinities and NaN included."""
    kind, ints = vec(F32, lanes), vec(I32, lanes)
    magnitude = builder.shl(
        builder.and_(half, constant(I32, lanes, 0x7FFF)), constant(I32, lanes, 13)
    )
    scaled = builder.fmul(builder.bitcast(magnitude, kind), constant(F32, lanes, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(I32, lanes, 0x0F800000))
    raised = builder.or_(magnitude, constant(I32, lanes, 0x7F800000))
    bits = builder.select(special, raised, builder.bitcast(scaled, ints))
    sign = builder.shl(builder.and_(half, constant(I32, lanes, 0x8000)), constant(I32, lanes, 16))
    return builder.bitcast(builder.or_(bits, sign), kind)


def _unpack(builder, shape, address, offset: int, biased: bool):
    """The float32 vectors, one for each packed element, that a vector of cells holds."""
    lanes = shape.lanes
    if shape.dtype == "float32":
        return [load_at(builder, address, vec(F32, lanes), offset)]
    if shape.dtype == "float16":
        if shape.has_f16c:
            half = load_at(builder, address, vec(ir.HalfType(), lanes), offset, align=2)
            return [builder.fpext(half, vec(F32, lanes))]
        bits = builder.zext(
            load_at(builder, address, vec(I16, lanes), offset, align=2), vec(I32, lanes)
        )
        return [_half_to_float(builder, bits, lanes)]
    cells = load_at(builder, address, vec(I32, lanes), offset)
    if shape.dtype == "bfloat16":
        low = builder.shl(cells, constant(I32, lanes, 16))
        high = builder.and_(cells, constant(I32, lanes, 0xFFFF0000))
        return [builder.bitcast(half, vec(F32, lanes)) for half in (low, high)]
    bits = 32 // shape.pack
    signs = 0x88888888 if bits == 4 else 0x80808080
    flipped = builder.xor(cells, constant(I32, lanes, signs)) if biased or bits == 4 else cells
    parts = []
    for element in range(shape.pack):
        top = 32 - bits - (8 * (element % 4) + 4 * (element // 4))
        raised = builder.shl(flipped, constant(I32, lanes, top)) if top else flipped
        signed = builder.ashr(raised, constant(I32, lanes, 32 - bits))
        parts.append(builder.sitofp(signed, vec(F32, lanes)))
    return parts


def _operand(builder, address, row: int, offset: int, lanes: int, element):
    return broadcast(builder, load_at(builder, address, element, row * ROW_BYTES + offset), lanes)


def _multiply(builder, tile_type, tile, scalars, vectors, emit):
    """tile[r][c] = emit(tile[r][c], scalars[r], vectors[c])"""
    for row in range(tile_type.rows):
        for vector in range(tile_type.vectors):
            index = row * tile_type.vectors + vector
            value = emit(builder.extract_value(tile, index), scalars[row], vectors[vector])
            tile = builder.insert_value(tile, value, index)
    return tile


def _accumulate_fma(builder, shape, tile_type, tile, operands, cells, of_keys: bool):
    lanes = shape.lanes
    vectors = [
        _unpack(builder, shape, cells, vector * lanes * shape.cell_bytes, of_keys)
        for vector in range(tile_type.vectors)
    ]
    for part in range(shape.pack):
        scalars = [
            _operand(builder, operands, row, 4 * part, lanes, F32) for row in range(tile_type.rows)
        ]
        parts = [vector[part] for vector in vectors]
        tile = _multiply(
            builder, tile_type, tile, scalars, parts,
            lambda value, scalar, vector: multiply_add(builder, scalar, vector, value,
                shape.has_fma),
        )  # fmt: skip
    return tile


def _accumulate_bf16(builder, shape, tile_type, tile, operands, cells, of_keys: bool):
    kind = vec(BF16, 32)
    vectors = [load_at(builder, cells, kind, 64 * vector) for vector in range(tile_type.vectors)]
    for plane in range(shape.q_planes if of_keys else shape.p_planes):
        scalars = [
            builder.bitcast(_operand(builder, operands, row, plane * PLANE_BYTES, 16, I32), kind)
            for row in range(tile_type.rows)
        ]
        tile = _multiply(
            builder, tile_type, tile, scalars, vectors,
            lambda value, scalar, vector: call(
                builder, "llvm.x86.avx512bf16.dpbf16ps.512", value.type, [value, scalar, vector]
            ),
        )  # fmt: skip
    return tile


def _integer_cells(builder, shape, cells, vector: int, of_keys: bool):
    """The vectors of integers that a vector of cells holds, biased for K and signed for V:
    bytes, or the even and the odd ones as int16."""
    lanes = shape.lanes
    kind = vec(I32, lanes)
    loaded = load_at(builder, cells, kind, 4 * lanes * vector)
    if shape.dot == "int16":
        pairs, eight = builder.bitcast(loaded, vec(I16, 2 * lanes)), constant(I16, 2 * lanes, 8)
        if of_keys:
            low = constant(I16, 2 * lanes, 255)
            return [builder.and_(pairs, low), builder.lshr(pairs, eight)]
        return [builder.ashr(x, eight) for x in (builder.shl(pairs, eight), pairs)]
    if shape.dtype == "int8":
        return [loaded]
    nibbles = constant(I32, lanes, 0x0F0F0F0F)
    halves = [loaded, builder.lshr(loaded, constant(I32, lanes, 4))]
    halves = [builder.and_(half, nibbles) for half in halves]
    if of_keys:
        return halves
    bias = constant(I8, 4 * lanes, 8)
    return [
        builder.bitcast(builder.sub(builder.bitcast(half, vec(I8, 4 * lanes)), bias), kind)
        for half in halves
    ]


def _accumulate_pairs(builder, shape, tile_type, tile, operands, cells, of_keys: bool):
    """Products of AVX2, which has none that sum up four bytes: bytes of 8 bits take one of
    int16 for each half; of 4, two that are summed up in int16, which holds 4 · 255 · 8."""
    lanes = shape.lanes
    pairs, words, bytes_ = (
        vec(kind, count * lanes) for kind, count in ((I16, 2), (I32, 1), (I8, 4))
    )
    vectors = [
        _integer_cells(builder, shape, cells, vector, of_keys)
        for vector in range(tile_type.vectors)
    ]

    def multiply(name, result, kind, a, b):
        a, b = builder.bitcast(a, kind), builder.bitcast(b, kind)
        return call(builder, f"llvm.x86.avx2.pmadd.{name}", result, [a, b])

    def emit(value, scalars, parts):
        if shape.dot == "int16":
            sums = [
                multiply("wd", words, pairs, *pair) for pair in zip(scalars, parts, strict=True)
            ]
            return builder.add(value, builder.add(*sums))
        sums = [
            multiply("ub.sw", pairs, bytes_, *((cells, scalar) if of_keys else (scalar, cells)))
            for scalar, cells in zip(scalars, parts, strict=True)
        ]
        ones = constant(I16, 2 * lanes, 1)
        return builder.add(value, multiply("wd", words, pairs, builder.add(*sums), ones))

    scalars = [
        [_operand(builder, operands, row, offset, lanes, I32) for offset in (0, 4)]
        for row in range(tile_type.rows)
    ]
    return _multiply(builder, tile_type, tile, scalars, vectors, emit)


def _accumulate_int8(builder, shape, tile_type, tile, operands, cells, of_keys: bool):
    vectors = [
        _integer_cells(builder, shape, cells, vector, of_keys)
        for vector in range(tile_type.vectors)
    ]

    def emit(value, scalar, vector):
        pair = [vector, scalar] if of_keys else [scalar, vector]  # unsigned, signed
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", value.type, [value, *pair])

    for part in range(len(vectors[0])):
        scalars = [
            _operand(builder, operands, row, 4 * part, 16, I32) for row in range(tile_type.rows)
        ]
        tile = _multiply(
            builder, tile_type, tile, scalars, [vector[part] for vector in vectors], emit
        )
    return tile


@Emitter
def accumulate(
    builder, shape, of_keys, tile, operands: int64, cells: int64, row_bytes: int64,
    words_left: int64,
):  # fmt: skip
    """tile += (operands of one word) · (cells of one word): query operands and K cells of a dim
    word, if ``of_keys``, else weight operands and V cells of a token word. In AMX tiles
    ``variant.step_words`` words at once, whose cells are ``row_bytes`` apart, or of keys the
    ``words_left``."""
    kind, value = tile.type, tile.llvm
    if isinstance(kind, AmxTileType):
        accumulate_totals(
            builder, shape, kind, value, operands, cells, row_bytes, words_left, of_keys
        )
        return tile
    emit = {
        "fma": _accumulate_fma,
        "bf16": _accumulate_bf16,
        "int8": _accumulate_int8 if shape.lanes == 16 else _accumulate_pairs,
        "int16": _accumulate_pairs,
    }[shape.dot]
    for word in range(shape.words):
        if word:
            operands = builder.add(operands, I64(shape.word_bytes))
            cells = builder.add(cells, row_bytes)
        value = emit(builder, shape, kind, value, operands, cells, of_keys)
    return Value(kind, value)


@Emitter
def begin_low_plane(builder, tile, bits):
    """What the high plane of integers summed up is worth 2^bits times the low plane's."""
    if not tile.type.integer:
        return tile
    shift = constant(I32, tile.type.lanes, bits)
    return map_tile(builder, lambda value: builder.shl(value, shift), tile)


@Emitter
def prefetch_share(builder, shape, tile, address: int64):
    """Prefetch as many lines as the cells of a step cover, shared out over
    ``variant.spread`` tiles of rows."""
    cells = tile.type.vectors * tile.type.lanes
    num_bytes = cells * shape.cell_bytes * shape.step_words // shape.spread
    emit_prefetches(builder, address, num_bytes)


# --- tiles and memory


@Emitter
def store_scores(builder, shape, tile, operands: int64, address: int64):
    """Scores of each row to float32 [rows][ROW_BYTES]."""
    kind = tile.type
    if isinstance(kind, AmxTileType):
        store_totals(builder, shape, kind, tile.llvm, address, I64(ROW_BYTES))
        return
    for row in range(kind.rows):
        for vector in range(kind.vectors):
            result = builder.extract_value(tile.llvm, row * kind.vectors + vector)
            if kind.integer:
                bias = _operand(builder, operands, row, BIAS, kind.lanes, I32)
                unit = _operand(builder, operands, row, UNIT, kind.lanes, F32)
                exact = builder.sitofp(builder.sub(result, bias), vec(F32, kind.lanes))
                result = builder.fmul(exact, unit)
            store_at(builder, result, address, row * ROW_BYTES + vector * kind.lanes * 4)


def _row_addresses(builder, tile, address, stride):
    return [builder.add(address, builder.mul(stride, stride.type(row))) for row in range(tile.rows)]


@Emitter
def begin_values(
    builder, shape, file: int64, factors: int64, state: int64, row_bytes: int64, due: boolean
):
    """The tile that a block's weights · V is added to: the state (times its rescale factor, if
    that's still due), or zeros where products are summed in integers."""
    kind = _tile_type(shape, shape.value_vectors)
    if isinstance(kind, AmxTileType):
        return Value(kind, load_state(builder, shape, kind, file, factors, state, row_bytes, due))
    if kind.integer:
        return Value(kind, ir.Constant(kind.value, None))
    targets = _row_addresses(builder, kind, state, row_bytes)
    rescale = _due_factors(builder, kind, factors, due)

    def emit(row, vector):
        old = load_at(builder, targets[row], kind.vector, vector * kind.lanes * 4)
        return builder.fmul(old, broadcast(builder, rescale[row], kind.lanes))

    return make_tile(builder, kind, emit)


def _due_factors(builder, tile, address, due):
    return [
        builder.select(due, load_at(builder, address, F32, 4 * row), F32(1.0))
        for row in range(tile.rows)
    ]


@Emitter
def end_values(builder, shape, tile, factors: int64, state: int64, row_bytes: int64, due: boolean):
    """The tile back to the state, in float32 [rows][row_bytes]."""
    kind, lanes = tile.type, tile.type.lanes
    if isinstance(kind, AmxTileType):
        store_totals(builder, shape, kind, tile.llvm, state, row_bytes)
        return
    targets = _row_addresses(builder, kind, state, row_bytes)
    if kind.integer:
        rescale = _due_factors(builder, kind, factors, due)
    for row in range(kind.rows):
        if kind.integer:
            factor = broadcast(builder, rescale[row], lanes)
            unit = load_at(builder, factors, F32, FACTOR_BYTES + 4 * row)
            unit = broadcast(builder, unit, lanes)
        for vector in range(kind.vectors):
            result = builder.extract_value(tile.llvm, row * kind.vectors + vector)
            if kind.integer:
                old = load_at(builder, targets[row], vec(F32, lanes), vector * lanes * 4)
                exact = builder.sitofp(result, vec(F32, lanes))
                scaled = builder.fmul(old, factor)
                result = multiply_add(builder, exact, unit, scaled, shape.has_fma)
            store_at(builder, result, targets[row], vector * lanes * 4)
