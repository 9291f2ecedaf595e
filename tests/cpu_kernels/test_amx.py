"""AMX kernels: on tiles in memory against the NumPy twins, as machine code for
a CPU that has AMX, and on trial."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kernel_twins import compare

from cpu_kernels import BlockLayout, dispatch, isa
from cpu_kernels.codegen import amx
from cpu_kernels.codegen.amx import TILE_UNITS, SoftTiles, soft_multiply
from cpu_kernels.dispatch import choose_variant, plan_attend, tiles_work
from cpu_kernels.isa import LEVELS, SOFT_AMX, Isa
from cpu_kernels.kernels import compare_levels
from examples import TRIES_ALL

AMX = LEVELS[-1]
LAYOUT = BlockLayout(2, 80, "bfloat16")


SHAPES = [(17, 80), (8, 33)]
MORE_SHAPES = [(1, 256), (8, 64), (1, 112), (4, 256), (16, 128), (3, 96), (16, 256)]
SOFT = {"source": "bfloat16", "level": SOFT_AMX.name, "stale": 0xFF}
"""Tiles in memory, where blocks hold NaN if nothing was written."""


@pytest.mark.parametrize(("group_size", "head_dim"), SHAPES + MORE_SHAPES * TRIES_ALL)
def test_one_query_a_sequence(group_size, head_dim):
    """Groups that fill a tile, don't, and need two; dims that leave a rest;
    contexts of two chunks and of odd ends."""
    layout, ones = BlockLayout(2, head_dim, "bfloat16"), [1, 1, 1, 1]
    compare(layout, 2 * group_size, [1, 95, 1217, 64], ones, atol=4e-3, **SOFT)


def test_several_queries():
    slopes = np.full(4, 0.1, np.float32)
    options = {"sliding_window": 40, "logit_softcap": 3.0, "alibi_slopes": slopes}
    compare(LAYOUT, 4, [3, 97, 300], [3, 1, 70], atol=8e-3, **SOFT, **options)


@pytest.mark.parametrize(
    ("layout", "group_size", "source", "ragged", "dot"),
    [
        (BlockLayout(1, 64, "bfloat16"), 8, "bfloat16", False, "amx"),
        (BlockLayout(1, 64, "bfloat16"), 1, "bfloat16", False, "amx"),
        (BlockLayout(1, 64, "bfloat16"), 1, "bfloat16", True, "amx"),
        (BlockLayout(1, 64, "bfloat16"), 8, "float32", False, "bf16"),
        (BlockLayout(1, 64, "bfloat16", 16), 8, "bfloat16", False, "bf16"),
        (BlockLayout(1, 64, "float16"), 8, "float16", False, "fma"),
        (BlockLayout(1, 64, "int8"), 8, "bfloat16", False, "int8"),
    ],
)
def test_where_tiles_are_used(layout, group_size, source, ragged, dot):
    assert choose_variant(layout, group_size, AMX, source, ragged=ragged).dot == dot
    assert choose_variant(layout, group_size, LEVELS[-2], source, ragged=ragged).dot != "amx"


# --- machine code
# ------------------------------------------------------------------------------

COMPILE = """
from numba import int64
from cpu_kernels import BlockLayout
from cpu_kernels.attention.kernel import attend_unit
from cpu_kernels.dispatch import choose_variant
from cpu_kernels.isa import LEVELS
from cpu_kernels.variant import VariantType

variant = choose_variant(BlockLayout(8, 80, "bfloat16"), 16, LEVELS[-1], "bfloat16", ragged=False)
signature = (VariantType(variant), int64, int64, int64)
attend_unit.compile(signature)
print(attend_unit.inspect_asm(signature))
"""


@pytest.mark.skipif("x86_64" not in os.uname().machine, reason="compiles for an x86 CPU")
def test_machine_code_for_a_cpu_with_amx(tmp_path: Path):
    """The real kernel, compiled for Sapphire Rapids and not run: tiles are configured and
    released once."""
    target = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": "+amx-tile,+amx-bf16,+amx-int8",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **target},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = Counter(re.findall(r"\t(tile\w+|tdp\w+|ldtilecfg)\b", compiled.stdout))
    assert found.keys() == {
        "ldtilecfg", "tileloadd", "tilestored", "tilezero", "tdpbf16ps", "tilerelease"
    }  # fmt: skip
    assert found["ldtilecfg"] == found["tilerelease"] == 1


def test_permission_is_only_given_where_the_cpu_has_tiles():
    """Linux is asked, not the CPU's flags; it may refuse where it is old or
    where a container forbids the question."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    assert not amx.ask_permission() or "amx_tile" in flags


# --- on trial
# ------------------------------------------------------------------------------


class BrokenTiles(SoftTiles):
    """A CPU that takes a product's first matrix for its second."""

    def multiply(self, builder, file, total, a, b):
        self._call(builder, soft_multiply, file, total, a, a)


@pytest.fixture
def best_level(monkeypatch):
    """Makes a level this host's best, for a test."""

    def choose(level: Isa):
        usable = (*isa.host_levels(), level)
        monkeypatch.setattr(isa, "host_levels", lambda: usable)
        monkeypatch.setattr(dispatch, "host_levels", lambda: usable)
        monkeypatch.setattr(dispatch, "default_level", lambda: level)

    plan_attend.cache_clear()
    tiles_work.cache_clear()
    yield choose
    plan_attend.cache_clear()
    tiles_work.cache_clear()


def chosen_entry(level: str | None = None) -> int:
    return plan_attend(LAYOUT, 16, "bfloat16", False, level, compare_levels).entry


def test_tiles_that_agree_are_used(best_level, caplog):
    best_level(SOFT_AMX)
    assert chosen_entry() == chosen_entry(SOFT_AMX.name)
    assert not caplog.records


def test_tiles_that_are_wrong_are_not_used(best_level, caplog, monkeypatch):
    trusted = next(level for level in reversed(isa.host_levels()) if not level.tiles).name
    monkeypatch.setitem(TILE_UNITS, "broken", BrokenTiles())
    best_level(Isa("amx-broken", lanes=16, registers=32, has_fma=False, tiles="broken"))
    entry = chosen_entry()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        "amx-broken" in record.getMessage() and f"FASTDECODE_ISA={trusted}" in record.getMessage()
    )
    assert entry != chosen_entry("amx-broken")
    assert compare_levels("amx-broken", trusted)
    assert chosen_entry() == entry and len(caplog.records) == 1
