# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Scalar conversions between float32 and the bits in which elements travel and
rest. Round to nearest even."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.memory import bits_of, float_of, load_f32, load_u16, store_f32, store_u16

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # the order of layout.SOURCES


@part
def half_to_float(half):
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
        return float_of(np.uint32(sign | magnitude | np.uint32(0x7F800000)))
    scaled = np.float32(float_of(magnitude) * np.float32(2.0**112))
    return float_of(np.uint32(sign | bits_of(scaled)))


@part
def float_to_half(value):
    bits = bits_of(np.float32(value))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint32(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):
        return np.uint32(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below the smallest normal: the addition rounds
        rounded = bits_of(np.float32(float_of(magnitude) + np.float32(0.5)))
        return np.uint32(sign | np.uint32(rounded - np.uint32(0x3F000000)))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(magnitude + np.uint32(0xFFF) + odd - np.uint32(0x38000000))
    return np.uint32(sign | (rounded >> np.uint32(13)))


@part
def brain_to_float(bits):
    """``bits``: uint32"""
    return float_of(np.uint32(bits << np.uint32(16)))


@part
def float_to_brain(value):
    bits = bits_of(np.float32(value))
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return np.uint32(0x7FC0) if value != value else rounded


@part
def read_row(source, address, count, row):
    """``count`` elements at ``address`` to float32 at ``row``."""
    for d in range(count):
        if source == FLOAT32:
            value = load_f32(address + 4 * d)
        elif source == FLOAT16:
            value = half_to_float(np.uint32(load_u16(address + 2 * d)))
        else:
            value = brain_to_float(np.uint32(load_u16(address + 2 * d)))
        store_f32(row + 4 * d, value)


@part
def write_row(source, row, count, address, factor):
    """``count`` float32 at ``row``, times ``factor``, to elements at ``address``."""
    for d in range(count):
        value = np.float32(load_f32(row + 4 * d) * factor)
        if source == FLOAT32:
            store_f32(address + 4 * d, value)
        elif source == FLOAT16:
            store_u16(address + 2 * d, np.uint16(float_to_half(value)))
        else:
            store_u16(address + 2 * d, np.uint16(float_to_brain(value)))
