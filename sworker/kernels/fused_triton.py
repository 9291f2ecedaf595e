"""Parts of a layer between its matrix products as one Triton kernel each: RMSNorm with the
residual sum before it, the rotary embedding, and a gated MLP's activation.

torch takes two to six launches for the first, ten for the second and two for the third, each of
which moves as many bytes as one kernel for all. Rounding is torch's: a residual sum is rounded
before it is normed, products of the rotary table are float32 and rounded once, an activation is
rounded before it is multiplied.

No sum is fused with a product, which costs nothing beside the memory's time: versions of Triton
differ in their default.

Runs on CUDA; with TRITON_INTERPRET=1, which tests set, on a CPU too."""

from __future__ import annotations

import contextlib

import torch
import triton  # type: ignore[import-not-found]  # not there on a CPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_HEADS = 16  # heads of a program
_ELEMENTS = 1024  # outputs of a program


@triton.jit(do_not_specialize=["num_heads"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, positions, table, out, x_row, x_head, num_heads,
    N: tl.constexpr, N_PAD: tl.constexpr, D: tl.constexpr, REST_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """x [T, H, D], positions [T], table float32 [P, 2 N] → out [T, H, D],
    dense. Grid (T, ceil(H / HEADS))."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, N_PAD)
    at_table = table + tl.load(positions + row).to(tl.int64) * (2 * N) + j
    cos = tl.load(at_table, mask=j < N, other=0.0)[None, :]
    sin = tl.load(at_table + N, mask=j < N, other=0.0)[None, :]
    source = x + row * x_row + heads[:, None] * x_head + j[None, :]
    target = out + (row * num_heads + heads[:, None]) * D + j[None, :]
    within = (heads < num_heads)[:, None] & (j < N)[None, :]
    a = tl.load(source, mask=within, other=0.0).to(tl.float32)
    b = tl.load(source + N, mask=within, other=0.0).to(tl.float32)
    tl.store(target, (a * cos - b * sin).to(out.dtype.element_ty), mask=within)
    tl.store(target + N, (b * cos + a * sin).to(out.dtype.element_ty), mask=within)
    if REST_PAD > 0:  # dims that aren't turned
        r = 2 * N + tl.arange(0, REST_PAD)
        is_rest = (heads < num_heads)[:, None] & (r < D)[None, :]
        rest = tl.load(x + row * x_row + heads[:, None] * x_head + r[None, :], mask=is_rest)
        tl.store(out + (row * num_heads + heads[:, None]) * D + r[None, :], rest, mask=is_rest)


@triton.jit(do_not_specialize=["num_q", "num_kv"])  # type: ignore[untyped-decorator]
def _rotate_split(  # type: ignore[no-untyped-def]
    x, v, positions, table, q_out, k_out, v_out, x_row, x_head, v_row, v_head, num_q, num_kv,
    N: tl.constexpr, N_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """x [T, num_q + num_kv, D], v [T, num_kv, D], positions [T], table float32 [P, 2 N] → q_out,
    k_out, v_out, dense. Grid (T, ceil((num_q + 2 num_kv) / HEADS))."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = (heads < num_q)[:, None]
    is_k = ((heads >= num_q) & (heads < num_q + num_kv))[:, None]
    source = x + row * x_row + heads[:, None] * x_head
    to_q = q_out + (row * num_q + heads[:, None]) * D
    to_k = k_out + (row * num_kv + heads[:, None] - num_q) * D
    j = tl.arange(0, N_PAD)
    in_n = (j < N)[None, :]
    at_table = table + tl.load(positions + row).to(tl.int64) * (2 * N) + j
    cos = tl.load(at_table, mask=j < N, other=0.0)[None, :]
    sin = tl.load(at_table + N, mask=j < N, other=0.0)[None, :]
    a = tl.load(source + j[None, :], mask=(is_q | is_k) & in_n, other=0.0).to(tl.float32)
    b = tl.load(source + N + j[None, :], mask=(is_q | is_k) & in_n, other=0.0).to(tl.float32)
    turned_a = (a * cos - b * sin).to(q_out.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(q_out.dtype.element_ty)
    tl.store(to_q + j[None, :], turned_a, mask=is_q & in_n)
    tl.store(to_q + N + j[None, :], turned_b, mask=is_q & in_n)
    tl.store(to_k + j[None, :], turned_a, mask=is_k & in_n)
    tl.store(to_k + N + j[None, :], turned_b, mask=is_k & in_n)
    if REST_PAD > 0:  # dims that aren't turned
        r = 2 * N + tl.arange(0, REST_PAD)
        in_rest = (r < D)[None, :]
        rest = tl.load(source + r[None, :], mask=(is_q | is_k) & in_rest, other=0.0)
        tl.store(to_q + r[None, :], rest, mask=is_q & in_rest)
        tl.store(to_k + r[None, :], rest, mask=is_k & in_rest)
    v_heads = heads - num_q - num_kv
    d = tl.arange(0, D_PAD)
    is_v = ((v_heads >= 0) & (v_heads < num_kv))[:, None] & (d < D)[None, :]
    of_v = tl.load(v + row * v_row + v_heads[:, None] * v_head + d[None, :], mask=is_v, other=0.0)
    tl.store(v_out + (row * num_kv + v_heads[:, None]) * D + d[None, :], of_v, mask=is_v)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(h, out, h_row, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """h [T, 2 · size], gate first → out [T, size] = act(gate) · up. Grid (T,
    ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = j < size
    gate = tl.load(h + row * h_row + j, mask=within, other=0.0).to(tl.float32)
    up = tl.load(h + row * h_row + size + j, mask=within, other=0.0).to(tl.float32)
    if IS_SILU:
        active = gate / (1.0 + tl.exp(-gate))
    else:  # GELU by tanh, which is 1 - 2 / (exp(2u) + 1)
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))
    rounded = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + j, (rounded * up).to(out.dtype.element_ty), mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, added, weight, total, out, x_row, x_head, added_row, eps, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """x [T, H, SIZE], added [T, SIZE] → total = x + added, out = total / rms(total) · (weight +
    offset), both dense. Grid (T, H); H is 1 if something is added."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, BLOCK)
    within = j < SIZE
    value = tl.load(x + row * x_row + head * x_head + j, mask=within, other=0.0).to(tl.float32)
    if HAS_ADDED:
        rounded = (
            value + tl.load(added + row * added_row + j, mask=within, other=0.0).to(tl.float32)
        ).to(total.dtype.element_ty)
        tl.store(total + row * SIZE + j, rounded, mask=within)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    factor = tl.load(weight + j, mask=within, other=0.0).to(tl.float32) + offset
    at = out + (row * tl.num_programs(1) + head) * SIZE + j
    tl.store(at, (value * scale * factor).to(out.dtype.element_ty), mask=within)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) · (weight + offset) over the last dim. x [T, size] or [T, H,
    size], its last dim dense; weight [size] → as x, dense."""
    return _normed(x, None, weight, eps, offset)[1]


def add_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + added, and its ``norm``. x, added [T, size] → [T, size] each.
    ``total``: where the sum goes, dense."""
    return _normed(x, added, weight, eps, offset, total)


def _normed(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    x_head = x.stride(1) if x.dim() == 3 else 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if total is None:
        total = x if added is None else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    with on_device(x):
        _norm[(x.shape[0], num_heads)](
            x, x if added is None else added, weight, total, out,
            x.stride(0), x_head, 0 if added is None else added.stride(0), eps, offset,
            SIZE=size, BLOCK=block, HAS_ADDED=added is not None, num_warps=min(16, max(1,
                block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return total, out


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Turn the first dims of every head.

    Args:
        x: [T, H, D], its last dim dense.
        positions: int64 [T], dense.
        table: float32 [P, 2 · N], cos then sin, dense; N dims are turned with the next N.

    Returns:
        [T, H, D] in x's dtype.
    """
    num_rows, num_heads, size = x.shape
    num = table.shape[1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rest = size - 2 * num
    with on_device(x):
        _rotate[(num_rows, triton.cdiv(num_heads, _HEADS))](
            x, positions, table, out, x.stride(0), x.stride(1), num_heads,
            N=num, N_PAD=triton.next_power_of_2(num), D=size,
            REST_PAD=triton.next_power_of_2(rest) if rest else 0, HEADS=_HEADS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotate_split(
    qk: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """``rotate`` q and k, and write them and v to where they go.

    Args:
        qk: [T, Hq + Hkv, D], its last dim dense.
        v: [T, Hkv, D], likewise.
        positions, table: as in ``rotate``.
        out: [T, Hq, D], twice [T, Hkv, D], dense.
    """
    num_rows, num_kv, size = v.shape
    num = table.shape[1] // 2
    rest = size - 2 * num
    with on_device(qk):
        _rotate_split[(num_rows, triton.cdiv(qk.shape[1] + num_kv, _HEADS))](
            qk, v, positions, table, *out, qk.stride(0), qk.stride(1), v.stride(0), v.stride(1),
            qk.shape[1] - num_kv, num_kv, N=num, N_PAD=triton.next_power_of_2(num), D=size,
            D_PAD=triton.next_power_of_2(size),
            REST_PAD=triton.next_power_of_2(rest) if rest else 0, HEADS=_HEADS,
            enable_fp_fusion=False,
        )  # fmt: skip


def gate(h: Tensor, *, is_silu: bool) -> Tensor:
    """act(gate) · up. h [T, 2 · size], gate first, its last dim dense → [T,
    size]. act is SiLU, or GELU by tanh."""
    num_rows, size = h.shape[0], h.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=h.dtype, device=h.device)
    with on_device(h):
        _gate[(num_rows, triton.cdiv(size, _ELEMENTS))](
            h, out, h.stride(0), size, IS_SILU=is_silu, BLOCK=_ELEMENTS, enable_fp_fusion=False
        )
    return out


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
