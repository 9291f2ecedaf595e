"""Which compiled kernel serves a call, and where it is."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from numba import int64
from numpy.typing import NDArray

from cpu_kernels.attention.amx_products import MAX_TOTALS
from cpu_kernels.attention.driver import MAX_PARTIALS
from cpu_kernels.attention.kernel import attend_unit
from cpu_kernels.codegen.amx import TILE_ROWS
from cpu_kernels.codegen.compiled import address_of
from cpu_kernels.isa import ISA_VARIABLE, Isa, default_level, find_level, host_levels
from cpu_kernels.layout import DTYPES, BlockLayout, aligned_bytes
from cpu_kernels.shape import SHAPE_FIELDS
from cpu_kernels.team import SCRATCH_BYTES, Team
from cpu_kernels.variant import Variant, VariantType, plain_variant

logger = logging.getLogger(__name__)

Comparison: TypeAlias = Callable[[str, str], str]
"""What attention at one level shows against another, which is trusted; nothing if they agree."""

_MOST_ROWS = 8
_MOST_SPREAD = 4
_MOST_WORDS = 2


def _fits_amx(layout: BlockLayout, source: str) -> bool:
    """Whether products of bfloat16 are made in AMX tiles, from one query row on. Other
    sources need queries and weights in two planes; other blocks, a step that ends beyond them."""
    return layout.dtype == source == "bfloat16" and layout.block_size % 32 == 0


def _amx_variant(layout: BlockLayout, group_size: int, isa: Isa, ragged: bool) -> Variant:
    num_products = 1 if ragged else -(-group_size // TILE_ROWS)
    product_rows = TILE_ROWS if ragged else -(-group_size // num_products)
    product_tiles = -(-product_rows // _MOST_ROWS)
    return Variant(
        dtype=layout.dtype,
        dot="amx",
        lanes=isa.lanes,
        has_fma=isa.has_fma,
        has_f16c=isa.has_fma,
        rows=-(-product_rows // product_tiles),
        score_vectors=_largest_divisor(layout.padded_tokens // isa.lanes, MAX_TOTALS),
        value_vectors=_largest_divisor(layout.tile_dims // isa.lanes, MAX_TOTALS),
        q_planes=1,
        p_planes=1,
        spread=min(_MOST_SPREAD, num_products),
        product_tiles=product_tiles,
        tiles=isa.tiles,
    )


def _choose_dot(dtype: str, isa: Isa) -> str:
    if dtype == "bfloat16" and isa.has_bf16_dot:
        return "bf16"
    if dtype in ("int8", "int4") and (isa.has_int8_dot or isa.name == "avx2"):
        return "int8" if isa.has_int8_dot or dtype == "int4" else "int16"
    return "fma"


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, max(1, min(number, most)) + 1) if number % d == 0)


def choose_variant(
    layout: BlockLayout, group_size: int, isa: Isa, source: str, *, ragged: bool
) -> Variant:
    """The register tile that keeps the products of this shape busiest without spilling. Rows by
    the dozen share what unpacking a vector of cells takes: as many as a vector has lanes, or as
    half of the registers if these are fewer, by one vector or few, since whatever is multiplied
    once can come out of memory with the product. Packed words are multiplied as they are, twice
    as quickly, and loads bound that: 8 rows by 2 vectors take 10 of them for what 16 by 1 take
    17. Where vectors don't come in pairs, 16 by 1 are quicker.

    Args:
        group_size: query heads a KV head.
        ragged: some sequence has more than one query; rows then come by the dozen.
    """
    if isa.tiles and _fits_amx(layout, source):
        return _amx_variant(layout, group_size, isa, ragged)
    dot = _choose_dot(layout.dtype, isa)
    score_vectors, value_vectors = layout.padded_tokens // isa.lanes, layout.tile_dims // isa.lanes
    accumulators = isa.registers * 3 // 4 if isa.registers > 16 else 8
    most_rows = (
        min(_MOST_ROWS, accumulators // value_vectors) if isa.registers > 16 else isa.registers // 4
    )
    num_tiles = -(-group_size // most_rows)
    rows, spread = -(-group_size // num_tiles), min(_MOST_SPREAD, num_tiles)
    most_vectors = isa.registers
    if ragged:
        rows, spread = min(isa.lanes, isa.registers // 2), 1
        if dot != "fma" and score_vectors % 2 == value_vectors % 2 == 0:
            rows, spread, most_vectors = _MOST_ROWS, 2, 2  # shares of whole lines
    exact = source != "bfloat16"
    q_planes = p_planes = 1
    if dot == "bf16":
        q_planes, p_planes = (2 if exact else 1), (2 if exact or rows <= 2 else 1)
    elif layout.dtype == "int8" and dot == "int8":
        q_planes = p_planes = 2  # int4's own rounding is far coarser than what one plane loses
        spread = spread if ragged else min(_MOST_SPREAD, 2 * num_tiles)
    unpacked = layout.pack if dot == "fma" else 1
    fitting = max(1, (isa.registers - 2) // (rows + unpacked))
    most_vectors = min(most_vectors, accumulators // rows, fitting)
    vectors = [_largest_divisor(count, most_vectors) for count in (score_vectors, value_vectors)]
    words = 1
    if isa.name == "avx2" and layout.pack > 1:
        words = math.gcd(layout.dim_words, layout.token_words, _MOST_WORDS)
        spread = min(spread, max(1, words * min(vectors) * isa.lanes * layout.cell_bytes // 64))
    return Variant(
        dtype=layout.dtype,
        dot=dot,
        lanes=isa.lanes,
        has_fma=isa.has_fma,
        has_f16c=isa.has_fma,
        rows=rows,
        score_vectors=vectors[0],
        value_vectors=vectors[1],
        q_planes=q_planes,
        p_planes=p_planes,
        spread=spread,
        words=words,
    )


@cache
def unit_entry(unit: Any, variant: Variant | None = None) -> int:
    """Address of a function that runs units, compiled for this variant, by default a plain one."""
    kind = VariantType(variant or plain_variant(default_level().lanes, False))
    return address_of(unit, kind, int64, int64, int64)


@dataclass(frozen=True)
class AttendPlan:
    """What all calls of one shape share."""

    entry: int
    tile_rows: int
    shape: NDArray[np.int64]


@cache
def shape_record(layout: BlockLayout, source: str) -> NDArray[np.int64]:
    """The layout as compiled code sees it: one int64 for each of SHAPE_FIELDS."""
    values = {
        name: getattr(layout, name) for name in SHAPE_FIELDS if name not in ("source", "dtype")
    }
    values |= {"source": DTYPES.index(source), "dtype": DTYPES.index(layout.dtype)}
    return np.array([values[name] for name in SHAPE_FIELDS], np.int64)


@cache
def plan_attend(
    layout: BlockLayout,
    group_size: int,
    source: str,
    ragged: bool,
    level: str | None,
    compare: Comparison,
) -> AttendPlan:
    """The kernel for calls of this shape, compiled. Tiles must have proved
    themselves in a comparison, unless ``level`` names them."""
    isa = find_level(level) if level else default_level()
    choose = partial(choose_variant, source=source, ragged=ragged)
    variant = choose(layout, group_size, isa)
    if variant.tiles and not level and not tiles_work(isa, compare):
        variant = choose(layout, group_size, replace(isa, tiles=""))
    return AttendPlan(
        unit_entry(attend_unit, variant), variant.product_rows, shape_record(layout, source)
    )


@cache
def tiles_work(isa: Isa, compare: Comparison) -> bool:
    """Whether a small random problem gives with a level's tiles what it gives without; if not, a
    warning is logged.

    AMX kernels were written without access to a CPU with AMX, so each process tests them before
    it uses them."""
    trusted = next(known for known in reversed(host_levels()) if not known.tiles)
    problem = compare(isa.name, trusted.name)
    if problem:
        logger.warning(
            "attention kernels don't use %s in this process: %s. Please report this; %s=%s avoids "
            "the check",
            isa.name, problem, ISA_VARIABLE, trusted.name,
        )  # fmt: skip
    return not problem


_thread = threading.local()


def thread_scratch() -> int:
    """The address of the calling thread's scratch memory."""
    try:
        return int(_thread.address)
    except AttributeError:
        _thread.memory = aligned_bytes(SCRATCH_BYTES)
        _thread.address = _thread.memory.ctypes.data
        return int(_thread.address)


def thread_partials(length: int) -> NDArray[np.float32]:
    """The calling thread's memory for partial results: float32 [>= length], kept for its next
    call.

    What a single sequence needs beyond ``MAX_PARTIALS`` is not kept."""
    memory: NDArray[np.float32] | None = getattr(_thread, "partials", None)
    if memory is None or memory.size < length:
        memory = np.empty(length, np.float32)
        if length <= MAX_PARTIALS:
            _thread.partials = memory
    return memory


_teams: dict[int, Team] = {}
_teams_lock = threading.Lock()


def team_of(num_threads: int) -> Team:
    """The process's team of that size, made on first use."""
    team = _teams.get(num_threads)
    if team is None:
        with _teams_lock:
            team = _teams.get(num_threads)
            if team is None:
                team = _teams[num_threads] = Team(num_threads)
    return team
