"""Which vector instructions the kernels use: chosen once from the host's
features, or forced for a test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Final

ISA_VARIABLE: Final = "FASTDECODE_ISA"
"""Environment variable that forces a level for the whole process; it is read once."""


@dataclass(frozen=True)
class Isa:
    """One level of vector instructions. A host that has one has all those
    before it in ``LEVELS``."""

    name: str
    lanes: int  # float32 elements in a vector
    registers: int
    has_fma: bool = True  # fused multiply-add, and conversions from and to float16
    has_bf16_dot: bool = False  # ``vdpbf16ps``: two bf16 products a lane
    has_int8_dot: bool = False  # ``vpdpbusd``: four u8 · s8 products a lane
    tiles: str = ""  # what makes products in tiles: a key of ``amx.TILE_UNITS``, or nothing


LEVELS: Final = (
    Isa("generic", lanes=4, registers=16, has_fma=False),
    Isa("avx2", lanes=8, registers=16),
    Isa("avx512", lanes=16, registers=32),
    Isa("avx512dot", lanes=16, registers=32, has_bf16_dot=True, has_int8_dot=True),
    Isa("amx", lanes=16, registers=32, has_bf16_dot=True, has_int8_dot=True, tiles="amx"),
)

SOFT_AMX: Final = Isa("amx-soft", lanes=16, registers=32, has_fma=False, tiles="soft")
"""AMX kernels with their tiles in memory: slow, runs everywhere, never chosen
unless it is asked for. For tests."""

_NEEDS: Final = {
    "generic": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512dot": ("avx512bf16", "avx512vnni"),
    "amx": ("amx-tile", "amx-bf16", "amx-int8"),
}


@cache
def host_levels() -> tuple[Isa, ...]:
    """The levels that this host can run, the best last. Asks Linux for tile
    registers where there are any."""
    import llvmlite.binding as llvm

    from cpu_kernels.codegen.amx import ask_permission

    features = llvm.get_host_cpu_features()
    usable = []
    for isa in LEVELS:
        if not all(features.get(feature, False) for feature in _NEEDS[isa.name]):
            break
        if isa.tiles and not ask_permission():
            break
        usable.append(isa)
    return tuple(usable)


def find_level(name: str) -> Isa:
    """The level of that name.

    Raises:
        ValueError: no such level, or this host can't run it.
    """
    for isa in (*host_levels(), SOFT_AMX):
        if isa.name == name:
            return isa
    usable = ", ".join(isa.name for isa in host_levels())
    raise ValueError(
        f"instruction set {name!r} can't run here; {ISA_VARIABLE} may be one of: {usable}"
    )


@cache
def default_level() -> Isa:
    """The level forced by the environment, else the host's best.

    Raises:
        ValueError: the environment forces a level that this host can't run.
    """
    forced = os.environ.get(ISA_VARIABLE)
    return find_level(forced) if forced else host_levels()[-1]
