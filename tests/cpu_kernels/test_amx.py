"""AMX kernels: on tiles in memory against the NumPy twins, as machine code for
a CPU that has AMX, and on trial."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

import cpu_kernels
from cpu_kernels import BlockLayout, allocate_pool, dispatch, isa, reference
from cpu_kernels.codegen import amx
from cpu_kernels.codegen.amx import TILE_UNITS, SoftTiles, soft_multiply
from cpu_kernels.dispatch import choose_variant, plan_attend, tiles_work
from cpu_kernels.isa import LEVELS, SOFT_AMX, Isa
from cpu_kernels.kernels import compare_levels
from examples import TRIES_ALL

AMX = LEVELS[-1]
SEED = 20261121
LAYOUT = BlockLayout(2, 80, "bfloat16")


@njit
def _multiply_once(file, a, a_stride, b, b_stride, total, total_stride, rows, words, columns):
    amx.clear_config(file)
    amx.set_tile(file, 0, rows, 4 * columns)
    amx.set_tile(file, 1, rows, 4 * words)
    amx.set_tile(file, 2, words, 4 * columns)
    amx.soft_configure(file)
    amx.soft_load(file, 0, total, total_stride)
    amx.soft_load(file, 1, a, a_stride)
    amx.soft_load(file, 2, b, b_stride)
    amx.soft_multiply(file, 0, 1, 2)
    amx.soft_store(file, 0, total, total_stride)
    amx.soft_zero(file, 1)


@pytest.mark.parametrize(("rows", "words", "columns"), [(16, 16, 16), (5, 8, 3), (1, 1, 1)])
def test_tile_operations(rows, words, columns):
    """One product of tiles of some shape, in matrices that are wider; what lies
    around them stays as it was."""
    rng = np.random.default_rng(SEED)
    file = np.full(amx.FILE_BYTES, 0xFF, np.uint8)
    a, b = (
        reference.from_float32(rng.standard_normal((20, 40), np.float32), "bfloat16")
        for _ in range(2)
    )
    total = rng.standard_normal((20, 24), np.float32)
    x = reference.to_float32(a, "bfloat16")[:rows, : 2 * words].astype(np.float64)
    # [words, (columns, 2)]
    pairs = reference.to_float32(b, "bfloat16")[:words, : 2 * columns].astype(np.float64)
    y = pairs.reshape(words, columns, 2).swapaxes(1, 2).reshape(2 * words, columns)
    expected = total.copy()
    expected[:rows, :columns] = total[:rows, :columns] + x @ y
    _multiply_once(
        file.ctypes.data, a.ctypes.data, a.strides[0], b.ctypes.data, b.strides[0],
        total.ctypes.data, total.strides[0], rows, words, columns,
    )  # fmt: skip
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
    tiles = file[amx.CONFIG_BYTES :].reshape(amx.NUM_TILES, 16, 64)
    assert not tiles[1].any()
    assert tiles[2, :words, : 4 * columns].any()
    assert not tiles[2, words:].any() and not tiles[2, :, 4 * columns :].any()


def filled(layout, context_lens, source):
    """A cache of these sequences, whose blocks hold NaN where nothing was written. Returns
    the pool, the tables, and what goes on drawing numbers."""
    rng = np.random.default_rng(SEED)
    needed = [-(-length // layout.block_size) for length in context_lens]
    pool = allocate_pool(layout, 1, sum(needed))[0]
    pool[:] = 0xFF
    ids = rng.permutation(sum(needed)).astype(np.int32)
    tables = np.full((len(needed), max(needed)), -1, np.int32)
    for n, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
        tables[n, :count] = ids[end - count : end]
        tokens = np.arange(context_lens[n])
        slots = (
            tables[n, tokens // layout.block_size].astype(np.int64) * layout.block_size
            + tokens % layout.block_size
        )
        kv_shape = (len(tokens), layout.num_kv_heads, layout.head_dim)
        k, v = (
            reference.from_float32(rng.standard_normal(kv_shape, np.float32), source)
            for _ in range(2)
        )
        cpu_kernels.append(layout, pool, k, v, slots, source=source)
    return pool, tables, rng


def attend_both(layout, group_size, context_lens, num_queries, **options):
    """o and lse of the AMX kernels on tiles in memory, and of the twin."""
    pool, tables, rng = filled(layout, context_lens, "bfloat16")
    q_shape = (sum(num_queries), group_size * layout.num_kv_heads, layout.head_dim)
    q = reference.from_float32(rng.standard_normal(q_shape, np.float32), "bfloat16")
    starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
    lens = np.array(context_lens, np.int32)
    results = []
    for attend, level in ((cpu_kernels.attend, {"level": SOFT_AMX.name}), (reference.attend, {})):
        out, lse = np.full_like(q, 0x7FC0), np.full(q.shape[:2], np.nan, np.float32)
        attend(
            layout, pool, q, tables, starts, lens - np.array(num_queries, np.int32), lens,
            scale=layout.head_dim**-0.5, out=out, lse=lse, source="bfloat16", **options, **level,
        )  # fmt: skip
        results.append((reference.to_float32(out, "bfloat16"), lse))
    return results


SHAPES = [(17, 80), (1, 256), (8, 33)]
MORE_SHAPES = [(8, 64), (1, 112), (4, 256), (16, 128), (3, 96), (16, 256)]


@pytest.mark.parametrize(("group_size", "head_dim"), SHAPES + MORE_SHAPES * TRIES_ALL)
def test_one_query_a_sequence(group_size, head_dim):
    """Groups that fill a tile, don't, and need two; dims that leave a rest;
    contexts of two chunks and of odd ends."""
    layout = BlockLayout(2, head_dim, "bfloat16")
    (out, lse), (twin_out, twin_lse) = attend_both(
        layout, group_size, [1, 95, 1217, 64], [1, 1, 1, 1]
    )
    np.testing.assert_allclose(out, twin_out, rtol=1.6e-2, atol=4e-3)
    np.testing.assert_allclose(lse, twin_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 40, "logit_softcap": 3.0, "alibi_slopes": np.full(4, 0.1, np.float32)},
    ],
)
def test_several_queries(options):
    (out, lse), (twin_out, twin_lse) = attend_both(LAYOUT, 2, [3, 97, 300], [3, 1, 70], **options)
    np.testing.assert_allclose(out, twin_out, rtol=1.6e-2, atol=8e-3)
    np.testing.assert_allclose(lse, twin_lse, rtol=2e-3, atol=2e-3)


def test_amx_prefetches_small_heads_alone():
    for head_dim, has_prefetch in ((64, True), (80, True), (128, False)):
        layout = BlockLayout(2, head_dim, "bfloat16")
        variant = choose_variant(layout, 4, AMX, "bfloat16", ragged=False)
        assert variant.tiles and variant.has_prefetch == has_prefetch


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


TILES = ("til", "tdp", "ldt")


def _functions(assembly: str) -> dict[str, list[str]]:
    """Each function's lines."""
    functions, lines = {}, []
    for line in assembly.splitlines():
        if match := re.match(r"(_Z[^:]*):", line):
            lines = functions[match[1]] = []
        lines.append(line)
    return functions


def _blocks(functions: dict[str, list[str]], name: str) -> dict[str, tuple[list[str], list[str]]]:
    """A function's basic blocks: instructions, those of calls included, and the
    labels of what may follow."""
    blocks, label, addresses = {"entry": ([], [])}, "entry", {}
    for line in functions[name]:
        if line.startswith(".Lfunc_end"):
            break
        if match := re.match(r"(\.LBB\w+):", line):
            blocks[label][1].append(match[1])  # a block after a jump has nobody that leads to it
            label = match[1]
            blocks[label] = ([], [])
        elif match := re.match(r"\s+([a-z]\w*)\s*(.*)", line):
            instruction, operands = match[1], match[2]
            instructions, successors = blocks[label]
            instructions.append(instruction)
            if address := re.match(r"\$(_Z[^,]*), (%\w+)", operands):
                addresses[address[2]] = address[1]
            elif instruction == "callq" and addresses.get(operands[1:]) in functions:
                callee = _blocks(functions, addresses[operands[1:]])
                instructions += [
                    called
                    for names, _ in callee.values()
                    for called in names
                    if called[:3] in TILES
                ]
            elif instruction.startswith("j"):
                assert operands.startswith(".LBB"), f"an indirect jump: {line}"
                successors.append(operands.split()[0])
            if instruction in ("jmp", "retq"):
                label = f"after {len(blocks)}"
                blocks[label] = ([], [])
    return blocks


def _reached(blocks, start, stop):
    """Instructions that can run from the beginning of ``start`` on before any ``stop`` does."""
    seen, open_labels, instructions = set(), [start], set()
    while open_labels:
        label = open_labels.pop()
        if label in seen:
            continue
        seen.add(label)
        names, successors = blocks[label]
        if stop in names:
            instructions.update(names[: names.index(stop)])
        else:
            instructions.update(names)
            open_labels += successors
    return instructions


@pytest.mark.skipif("x86_64" not in os.uname().machine, reason="compiles for an x86 CPU")
def test_machine_code_for_a_cpu_with_amx(tmp_path: Path):
    """The real kernel, compiled for Sapphire Rapids and not run: every path
    configures its tiles first."""
    target = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": "+amx-tile,+amx-bf16,+amx-int8",
    }
    instructions = {"tileloadd", "tilestored", "tilezero", "tdpbf16ps"}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **target,
            "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    functions = _functions(compiled.stdout)
    blocks = _blocks(functions, next(name for name in functions if "attend_unit" in name))
    everything = {name for names, _ in blocks.values() for name in names}
    assert everything >= instructions | {"ldtilecfg", "tilerelease"}
    assert not _reached(blocks, "entry", "ldtilecfg") & instructions
    configured = next(label for label, (names, _) in blocks.items() if "ldtilecfg" in names)
    assert _reached(blocks, configured, "tilerelease") >= instructions
    (released,) = (followers for names, followers in blocks.values() if "tilerelease" in names)
    assert (
        not set().union(*(_reached(blocks, label, "ldtilecfg") for label in released))
        & instructions
    )


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

    def multiply(self, context, builder, file, total, a, b):
        self._call(context, builder, soft_multiply, file, total, a, a)


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
