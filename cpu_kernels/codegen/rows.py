# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Rows of elements, vector by vector: from what a model sends to float32, and back."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen import elements
from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.elements import BFLOAT16, FLOAT32
from cpu_kernels.codegen.lanes import (
    fill_lanes,
    load_brains,
    load_halves,
    load_lanes,
    store_brains,
    store_halves,
    store_lanes,
)
from cpu_kernels.codegen.memory import store_f32


@part
def read_row(variant, source, address, count, row):
    """``count`` elements at ``address`` to float32 at ``row``."""
    whole = count // variant.lanes * variant.lanes
    if source == FLOAT32:
        for d in range(0, whole, variant.lanes):
            store_lanes(load_lanes(variant, address + 4 * d), row + 4 * d)
        elements.read_row(source, address + 4 * whole, count - whole, row + 4 * whole)
        return
    if source == BFLOAT16:
        for d in range(0, whole, variant.lanes):
            store_lanes(load_brains(variant, address + 2 * d), row + 4 * d)
    elif variant.has_f16c:
        for d in range(0, whole, variant.lanes):
            store_lanes(load_halves(variant, address + 2 * d), row + 4 * d)
    else:
        whole = 0
    elements.read_row(source, address + 2 * whole, count - whole, row + 4 * whole)


@part
def write_row(variant, source, row, count, address, factor):
    """``count`` float32 at ``row``, times ``factor``, to elements at ``address``."""
    whole = count // variant.lanes * variant.lanes
    factors = fill_lanes(variant, factor)
    if source == FLOAT32:
        for d in range(0, whole, variant.lanes):
            store_lanes(load_lanes(variant, row + 4 * d) * factors, address + 4 * d)
        elements.write_row(source, row + 4 * whole, count - whole, address + 4 * whole, factor)
        return
    if source == BFLOAT16:
        for d in range(0, whole, variant.lanes):
            store_brains(load_lanes(variant, row + 4 * d) * factors, address + 2 * d)
    elif variant.has_f16c:
        for d in range(0, whole, variant.lanes):
            store_halves(load_lanes(variant, row + 4 * d) * factors, address + 2 * d)
    else:
        whole = 0
    elements.write_row(source, row + 4 * whole, count - whole, address + 2 * whole, factor)


@part
def fill_row(variant, row, count, value):
    """``value`` into ``count`` float32; ``count`` is a multiple of the lanes."""
    values = fill_lanes(variant, value)
    for d in range(0, count, variant.lanes):
        store_lanes(values, row + 4 * d)


@part
def copy_row(variant, source, count, target):
    """``count`` float32; ``count`` is a multiple of the lanes."""
    for d in range(0, count, variant.lanes):
        store_lanes(load_lanes(variant, source + 4 * d), target + 4 * d)


@part
def add_row(variant, source, count, weight, target):
    """target += weight · source; ``count`` is a multiple of the lanes."""
    weights = fill_lanes(variant, weight)
    for d in range(0, count, variant.lanes):
        store_lanes(
            load_lanes(variant, target + 4 * d) + load_lanes(variant, source + 4 * d) * weights,
            target + 4 * d,
        )


@part
def clear_tail(row, first, end):
    """Zeros from element ``first`` to ``end``."""
    for d in range(first, end):
        store_f32(row + 4 * d, np.float32(0))
