"""The public kernels: check the arguments, then run compiled code without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.amx_check import disagreement
from cpu_kernels.attention import driver
from cpu_kernels.attention.driver import run_attend
from cpu_kernels.checks import (
    check_append,
    check_attend,
    check_copy,
    check_gather,
    check_score_options,
    raise_bad_slots,
    raise_bad_value,
)
from cpu_kernels.dispatch import (
    plan_attend,
    shape_record,
    team_of,
    thread_partials,
    thread_scratch,
    unit_entry,
)
from cpu_kernels.layout import CARRIERS, BlockLayout
from cpu_kernels.team import OpenMPTeam, Team
from cpu_kernels.tokens.append import append_unit, run_append
from cpu_kernels.tokens.gather import gather_unit, run_gather

_NO_SLOPES = np.zeros(0, np.float32)
_NO_LSE = np.zeros((0, 0), np.float32)
_NO_SCALES = np.zeros((0, 0, 2), np.float32)
_NO_ROWS = {dtype: np.zeros((0, 0, 0), dtype) for dtype in set(CARRIERS.values())}


def append(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    k: NDArray[Any],
    v: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    source: str = "float32",
    scales: NDArray[np.float32] | None = None,
    heads: range | None = None,
    num_threads: int = 1,
    team: Team | OpenMPTeam | None = None,
) -> None:
    """Write tokens' K and V into one layer's blocks.

    Where ``source`` is the cache's own dtype, rows are stored as they are, bit by bit.

    Args:
        pool_layer: uint8 [num_blocks, block_bytes], one layer of ``allocate_pool``.
        k, v: [T, heads, D], float32 or the bits of a 16-bit float in uint16, as ``source`` says;
            or rows as ``gather`` gives them, of a cache of this dtype.
        slots: int64 [T], block id * block_size + offset; where two are equal, either may win.
        scales: float32 [T, heads, 2], with stored rows of int8 and int4 only.
        heads: the KV heads that k and v hold, or None for all.
        num_threads, team: as ``attend``.

    Raises:
        ValueError: an argument doesn't fit; nothing was written.
    """
    heads = check_append(layout, pool_layer, k, v, slots, source, scales, heads)
    if slots.shape[0] == 0:
        return
    fits = run_append(
        unit_entry(append_unit), _team_for(slots.shape[0] * len(heads), num_threads, team),
        thread_scratch(), shape_record(layout, source), pool_layer, k, v,
        _NO_SCALES if scales is None else scales, slots, heads.start,
    )  # fmt: skip
    if not fits:
        raise_bad_slots(layout, pool_layer, slots)


def gather(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    slots: NDArray[np.int64],
    k: NDArray[Any],
    v: NDArray[Any],
    scales: NDArray[np.float32] | None = None,
    *,
    heads: range | None = None,
    num_threads: int = 1,
    team: Team | OpenMPTeam | None = None,
) -> None:
    """Read tokens' K and V out of one layer's blocks, as they are stored: the inverse of
    ``append``.

    ``append`` of them, with ``source=layout.dtype``, puts the same bits back: into these blocks
    or those of any cache of this dtype and head_dim, whatever its block size and number of heads.

    Args:
        pool_layer: uint8 [num_blocks, block_bytes].
        slots: int64 [T], block id * block_size + offset. Quickest where neighbours follow each
            other.
        k, v: [T, heads, row_length] of ``CARRIERS[layout.dtype]``, overwritten;
            ``allocate_tokens`` makes them. Of float caches they are [T, heads, D] as activations
            are.
        scales: float32 [T, heads, 2], overwritten; int8 and int4 only.
        heads: consecutive KV heads, or None for all.
        num_threads, team: as ``attend``.

    Raises:
        ValueError: an argument doesn't fit; nothing was written.
    """
    heads = check_gather(layout, pool_layer, slots, k, v, scales, heads)
    if slots.shape[0] == 0:
        return
    fits = run_gather(
        unit_entry(gather_unit), _team_for(slots.shape[0] * len(heads), num_threads, team),
        thread_scratch(), shape_record(layout, layout.dtype), pool_layer, k, v,
        _NO_SCALES if scales is None else scales, slots, heads.start,
    )  # fmt: skip
    if not fits:
        raise_bad_slots(layout, pool_layer, slots)


def attend(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    q: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    query_positions: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    logit_softcap: float | None = None,
    out: NDArray[Any],
    lse: NDArray[np.float32] | None = None,
    last: tuple[NDArray[Any], NDArray[Any]] | None = None,
    source: str = "float32",
    num_threads: int = 1,
    team: Team | OpenMPTeam | None = None,
    level: str | None = None,
) -> None:
    """o = softmax(f(scale · q·kᵀ) + bias) · v of every query over its own sequence's cached
    tokens.

    Query i of sequence n stands at position p = ``query_positions[n] + i`` and sees the keys j
    with j <= p, j < ``context_lens[n]`` and j > p - ``sliding_window``. f(s) = c·tanh(s / c) with
    c = ``logit_softcap``; the bias is ``alibi_slopes[h]`` · (j - p). Sums are in float32. A
    sequence's rows depend on that sequence alone, bit by bit, whatever else is in the batch and
    however many threads run.

    Args:
        pool_layer: uint8 [num_blocks, block_bytes].
        q: [T, Hq, D], float32 or the bits of a 16-bit float in uint16, as ``source`` says; query
            head h reads KV head h // (Hq / Hkv).
        block_tables: int32 [N, max_blocks]; entries beyond a sequence's context are not read.
        query_starts: int32 [N + 1], rows of q where each sequence begins; the last is T.
        query_positions: int32 [N], the position of each sequence's first query.
        context_lens: int32 [N], cached tokens.
        alibi_slopes: float32 [Hq].
        out: [T, Hq, D] of q's kind, overwritten; zeros where nothing is visible.
        lse: float32 [T, Hq], overwritten with the natural log of the sum of exponentials; -inf
            where nothing is visible.
        last: K and V [N, Hkv, D] of q's kind of each sequence's last cached token, which are
            written first, as ``append`` does it, but while the token's block is read anyway. Then
            each sequence has one query, at that token, and no sequence sees what another one
            brings.
        num_threads: the calling thread and ``num_threads - 1`` helpers of this process. If
            another call has them at the moment, this one runs on its own thread.
        team: ``num_threads`` threads in place of the process's own helpers.
        level: One of ``isa.LEVELS``' names. None for the host's best, or the one that the
            environment forces.

    Bit by bit means: among calls that all have one query a sequence, or among those that don't.

    Raises:
        ValueError: an argument doesn't fit; nothing was written.
    """
    check_attend(
        layout, pool_layer, q, block_tables, query_starts, query_positions, context_lens, out,
        lse, last, source,
    )  # fmt: skip
    num_rows, num_q_heads, _ = q.shape
    check_score_options(num_q_heads, scale, sliding_window, alibi_slopes, logit_softcap)
    ragged = num_rows > context_lens.shape[0]
    plan = plan_attend(
        layout, num_q_heads // layout.num_kv_heads, source, ragged, level, compare_levels,
    )  # fmt: skip
    k, v = last or (_NO_ROWS[q.dtype], _NO_ROWS[q.dtype])
    room, code, index = 0, driver.MORE_ROOM, 0
    while code == driver.MORE_ROOM:
        code, index = run_attend(
            plan.entry, plan.tile_rows, _team_address(num_threads, team), num_threads,
            thread_scratch(), thread_partials(room), plan.shape, pool_layer, q, block_tables,
            query_starts, query_positions, context_lens,
            _NO_SLOPES if alibi_slopes is None else alibi_slopes,
            out, _NO_LSE if lse is None else lse, float(scale), float(logit_softcap or 0.0),
            min(sliding_window or 0, driver.MAX_POSITION),
            0 if last is None else unit_entry(append_unit), k, v,
        )  # fmt: skip
        room = index
    if code != driver.OK:
        raise_bad_value(
            code,
            index,
            layout,
            pool_layer,
            block_tables,
            query_starts,
            query_positions,
            context_lens,
        )


def compare_levels(tested: str, trusted: str) -> str:
    """Return how attention at the level ``tested`` deviates from ``trusted``; "" if it agrees."""
    return disagreement(tested, trusted, append, attend)


def copy_blocks(
    pool: NDArray[np.uint8], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]
) -> None:
    """Copy whole blocks in every layer, for copy-on-write.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        source_ids, target_ids: int64 [n] block ids.

    Raises:
        ValueError: an id is out of range; nothing was copied.
    """
    check_copy(pool, source_ids, target_ids)
    for source_id, target_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        pool[:, target_id] = pool[:, source_id]


def _team_for(num_rows: int, num_threads: int, team: Team | OpenMPTeam | None) -> int:
    """As ``_team_address``; few rows aren't worth waking anybody."""
    return _team_address(num_threads, team) if num_rows >= 256 else 0


def _team_address(num_threads: int, team: Team | OpenMPTeam | None) -> int:
    """0: no other thread helps."""
    if num_threads == 1:
        return 0
    return int((team or team_of(num_threads)).address)
