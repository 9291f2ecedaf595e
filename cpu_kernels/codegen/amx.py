# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""AMX: a CPU's eight tile registers of 16 rows x 64 bytes, and what multiplies them.

``AmxTiles`` emits the instructions. ``SoftTiles`` emits their twins, which do the same to a **tile
file** in memory: 64 bytes of configuration, then 1 KB for each register. A kernel is written once,
and its variant says which of the two it is compiled with; the twins let a host without AMX test
everything but the instructions themselves."""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
from llvmlite import ir
from numba import types

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.elements import brain_to_float
from cpu_kernels.codegen.memory import (
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from cpu_kernels.codegen.simd import I8, I64, call, pointer
from cpu_kernels.codegen.translate import Value

TILE_ROWS = 16
TILE_BYTES = 1024
NUM_TILES = 8
CONFIG_BYTES = 64
FILE_BYTES = CONFIG_BYTES + NUM_TILES * TILE_BYTES
# Where a configuration holds each tile's bytes a row (uint16) and rows (uint8).
_COLUMN_BYTES, _ROWS = (16, 48)


# --- permission
# ------------------------------------------------------------------------------

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def ask_permission() -> bool:
    """Ask Linux to let this process, with all its present and future threads, use tile registers.

    Threads' register state grows by 8 KB, which is why Linux wants to be asked
    (Documentation/arch/x86/xstate.rst)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.argtypes = [ctypes.c_long] * 3
    system_call.restype = ctypes.c_long
    return system_call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


# --- configuration
# ------------------------------------------------------------------------------


@part
def clear_config(file):
    """Palette 1, no tile in use."""
    for offset in range(0, CONFIG_BYTES, 8):
        store_i64(file + offset, 0)
    store_u8(file, np.uint8(1))


@part
def set_tile(file, tile, rows, column_bytes):
    """A tile's shape, in force once the configuration is loaded."""
    store_u16(file + _COLUMN_BYTES + 2 * tile, np.uint16(column_bytes))
    store_u8(file + _ROWS + tile, np.uint8(rows))


# --- the instructions
# ------------------------------------------------------------------------------


class AmxTiles:
    """Emits AMX instructions. Tiles are numbers; ``file`` is the address of the
    thread's tile file."""

    def configure(self, builder, file):
        """ldtilecfg: tiles get their shapes, and zeros."""
        call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [pointer(builder, file, I8)])

    def release(self, builder, file):
        """tilerelease: threads that don't use tiles are cheaper to switch."""
        call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])

    def zero(self, builder, file, tile):
        call(builder, "llvm.x86.tilezero", ir.VoidType(), [I8(tile)])

    def load(self, builder, file, tile, address, stride):
        """Rows of a tile, ``stride`` bytes apart."""
        call(
            builder,
            "llvm.x86.tileloadd64",
            ir.VoidType(),
            [I8(tile), pointer(builder, address, I8), stride],
        )

    def store(self, builder, file, tile, address, stride):
        call(
            builder,
            "llvm.x86.tilestored64",
            ir.VoidType(),
            [I8(tile), pointer(builder, address, I8), stride],
        )

    def multiply(self, builder, file, total, a, b):
        """total [m, n] += a [m, k] · b [k, n], pairs of bfloat16."""
        call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [I8(total), I8(a), I8(b)])


# --- their twins
# ------------------------------------------------------------------------------


@part
def _shape(file, tile):
    """(rows, bytes a row)"""
    return np.int64(load_u8(file + _ROWS + tile)), np.int64(
        load_u16(file + _COLUMN_BYTES + 2 * tile)
    )


@part
def _row(file, tile, row):
    return file + CONFIG_BYTES + TILE_BYTES * tile + 64 * row


@part
def soft_configure(file):
    for tile in range(NUM_TILES):
        soft_zero(file, tile)


@part
def soft_zero(file, tile):
    for offset in range(0, TILE_BYTES, 8):
        store_i64(_row(file, tile, 0) + offset, 0)


@part
def soft_load(file, tile, address, stride):
    rows, column_bytes = _shape(file, tile)
    soft_zero(file, tile)  # what lies beyond a tile's shape is zero
    for row in range(rows):
        for byte in range(0, column_bytes, 4):
            store_u32(_row(file, tile, row) + byte, load_u32(address + row * stride + byte))


@part
def soft_store(file, tile, address, stride):
    rows, column_bytes = _shape(file, tile)
    for row in range(rows):
        for byte in range(0, column_bytes, 4):
            store_u32(address + row * stride + byte, load_u32(_row(file, tile, row) + byte))


@part
def soft_multiply(file, total, a, b):
    """Sums of even and of odd elements, then both to the total: the order in Intel's manual."""
    rows, column_bytes = _shape(file, total)
    depth = _shape(file, a)[1] // 4
    for m in range(rows):
        for n in range(column_bytes // 4):
            even, odd = np.float32(0), np.float32(0)
            for k in range(depth):
                x, y = load_u32(_row(file, a, m) + 4 * k), load_u32(_row(file, b, k) + 4 * n)
                even += brain_to_float(x & np.uint32(0xFFFF)) * brain_to_float(
                    y & np.uint32(0xFFFF)
                )
                odd += brain_to_float(x >> np.uint32(16)) * brain_to_float(y >> np.uint32(16))
            target = _row(file, total, m) + 4 * n
            store_f32(target, load_f32(target) + np.float32(even + odd))


class SoftTiles:
    """Emits calls of the twins."""

    def _call(self, builder, function, *args):
        numbers = [I64(arg) if isinstance(arg, int) else arg for arg in args]
        values = [Value(types.int64, number) for number in numbers]
        builder.module.translation.call(builder, function, values)

    def configure(self, builder, file):
        self._call(builder, soft_configure, file)

    def release(self, builder, file):
        pass

    def zero(self, builder, file, tile):
        self._call(builder, soft_zero, file, tile)

    def load(self, builder, file, tile, address, stride):
        self._call(builder, soft_load, file, tile, address, stride)

    def store(self, builder, file, tile, address, stride):
        self._call(builder, soft_store, file, tile, address, stride)

    def multiply(self, builder, file, total, a, b):
        self._call(builder, soft_multiply, file, total, a, b)


TILE_UNITS = {"amx": AmxTiles(), "soft": SoftTiles()}
"""What the tiles of a variant can be."""
