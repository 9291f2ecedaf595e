"""Fused kernels, put on a model from outside: the modules that they replace
stay as they are for every other device."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from sworker.buffers import Room, host_memory
from sworker.model.linear import ACTIVATIONS, MLP, Gated
from sworker.model.moe import Experts, Products
from sworker.model.norms import RMSNorm
from sworker.model.rope import RotaryTable
from sworker.model.skeleton import QKV, AddNorm, Layer, LayerRoom, Model, RotateSplit, new_qkv

logger = logging.getLogger(__name__)

_GATES = {ACTIVATIONS["silu"]: True, ACTIVATIONS["gelu_tanh"]: False}
"""Activations that the kernel knows: whether it is SiLU."""
_ROWS = 3
_ROUNDING = 2**-5  # largest rounding of sums in bfloat16, relative to the largest sum
_MAX_NORM_SIZE = 1 << 15  # largest row that one program holds


class Kernels(Protocol):
    """``fused_triton`` on CUDA, ``fused_numba`` on a CPU. Inputs are dense in
    their last dim, results everywhere."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """x / rms(x) · (weight + offset) over the last dim. x [T, size] or [T,
        H, size], weight [size] → as x."""

    def add_norm(
        self,
        x: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + added, rounded, and its ``norm``. x, added [T, size] → [T, size]
        each. ``total``: where the sum goes, dense."""

    def rotate(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """x [T, H, D], positions int64 [T] within the table, float32 [P, 2 · N]: cos, then sin →
        [T, H, D]. The first N dims of a head are turned with the next N."""

    def rotate_split(
        self, qk: Tensor, v: Tensor, positions: Tensor, table: Tensor, out: QKV
    ) -> None:
        """``rotate`` q and k [T, Hq + Hkv, D], and write them and v [T, Hkv, D]
        to where they go, each dense."""

    def gate(self, h: Tensor, *, is_silu: bool) -> Tensor:
        """act(first half) · second half, act rounded. h [T, 2 · size] → [T,
        size]. SiLU, or GELU by tanh."""


class FusedRotary(nn.Module):
    """``RotaryTable`` in one kernel."""

    def __init__(self, table: RotaryTable, kernels: Kernels) -> None:
        super().__init__()
        self.unfused = table
        self.kernels = kernels

    def forward(
        self, x: Tensor, positions: Tensor
    ) -> Tensor:  # x [T, H, D], positions [T] → [T, H, D]
        return self.kernels.rotate(x, positions, self.unfused.table) if x.shape[0] else x


class FusedRMSNorm(nn.Module):
    """``RMSNorm`` in one kernel."""

    def __init__(self, norm: RMSNorm, kernels: Kernels) -> None:
        super().__init__()
        self.unfused = norm
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:  # [T, size] or [T, H, size] → same
        norm = self.unfused
        return self._kernels.norm(x, norm.weight, norm.eps, norm.offset) if x.shape[0] else x


class LayerCalls:
    """What ``Layer`` does on a CPU where all of its parts are products and fused kernels
    (``_has_kernels``), in few calls: norm and q, k, v; rotary; o, norm, gate and up; gate
    and down.

    A module looks up its parts in three tables, and asks for hooks before it runs.
    Where a step decodes a few rows, that takes as long as a small product. It holds no
    layer: a cycle would keep weights alive. One thread at a time calls it.

    Args:
        layer: its weights stay where they are.
        rooms: the same for all layers of a model; for what norms give, and gates.
    """

    def __init__(self, layer: Layer, rooms: tuple[Room, Room]) -> None:
        from sworker.kernels.fused_numba import AddNorm, Gate, RotateHeads

        rope, mlp = cast("FusedRotary", layer.rope), cast("MLP", layer.mlp)
        table, attn_norm = rope.unfused.table, _numbers(layer.attn_norm)
        dtype, mlp_norm = attn_norm[0].dtype, _numbers(layer.mlp_norm)
        self._sizes = layer.num_q_heads, layer.num_kv_heads, layer.head_dim
        self._rooms, self._num_rows = rooms, 0
        self._attn_norm, self._mlp_norm = AddNorm(*attn_norm), AddNorm(*mlp_norm)
        self._rotate = RotateHeads(table, *self._sizes, dtype)
        self._gate = Gate(mlp.up.splits[0], dtype, is_silu=_GATES[mlp.act])
        self._qkv, self._o = layer.qkv.forward, layer.o.forward
        self._up, self._down = mlp.up.forward, mlp.down.forward
        self._kept = table, attn_norm[0], mlp_norm[0]  # kernels have their addresses

    def pre_attention(
        self, x: Tensor, added: Tensor | None, positions: Tensor, room: LayerRoom | None = None
    ) -> tuple[Tensor, QKV]:
        """See ``Layer``; but x stays where it is where nothing is added."""
        if x.shape[0] != self._num_rows:
            self._lay_out(x.shape[0])
        x = self._attn_norm(x, added, torch.empty_like(x) if room is None else room.x)
        heads = self._qkv(self._h)  # [T, (Hq + 2 Hkv) · D]
        qkv = new_qkv(heads, *self._sizes) if room is None else room.qkv
        self._rotate(heads, positions, qkv)
        return x, qkv

    def post_attention(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[0] != self._num_rows:
            self._lay_out(x.shape[0])
        x = self._mlp_norm(x, self._o(o.flatten(1)), torch.empty_like(x))
        self._gate(self._up(self._h))
        return x, self._down(self._gated)

    def _lay_out(self, num_rows: int) -> None:
        """The steps from now on are of so many rows, more than none."""
        self._num_rows, dtype = num_rows, self._kept[1].dtype
        self._h, self._gated = (
            room.take(torch.Size((num_rows, job.size)), dtype)
            for room, job in zip(self._rooms, (self._mlp_norm, self._gate), strict=True)
        )
        self._attn_norm.lay_out(num_rows, self._h)
        self._mlp_norm.lay_out(num_rows, self._h)
        self._gate.lay_out(num_rows, self._gated)
        self._rotate.lay_out(num_rows)


def call_layers(model: Model) -> None:
    """From now on steps run each layer that has kernels for all of its parts in few
    calls. Weights are packed before, and kernels chosen."""
    rooms = Room(host_memory), Room(host_memory)
    model.step_layers = tuple(
        LayerCalls(layer, rooms) if _has_kernels(layer) else layer for layer in model.layers
    )


def _has_kernels(layer: Layer) -> bool:
    """Whether all of a layer is products and fused kernels."""
    is_plain = layer.placement == "pre" and not layer.parallel and layer.residual_scale == 1.0
    has_more = (layer.q_norm, layer.k_norm, layer.qkv_clip, layer.growth, layer.gate)
    kernels = (layer.add_norm_kernel, layer.attn_add_norm_kernel, layer.rotate_split_kernel)
    if not is_plain or any(part is not None for part in has_more) or None in kernels:
        return False
    return type(layer.mlp) is MLP and layer.mlp.gate_kernel is not None


def _numbers(norm: nn.Module) -> tuple[Tensor, float, float]:
    """What ``add_norm`` takes of a norm."""
    assert isinstance(norm, FusedRMSNorm)
    return norm.unfused.weight, norm.unfused.eps, norm.unfused.offset


def fuse(model: Model, device: torch.device) -> bool:
    """Exchange what there are kernels for. Returns whether it did: not if a
    device or a dtype has none (CUDA without Triton, float16 on a CPU), nor if a
    kernel fails, or differs from torch's result by more than rounding."""
    try:
        kernels = _kernels_of(device, model.dtype)
        if kernels is None:
            return False
        has_products = device.type == "cpu" and _multiply_experts(model)
        return fuse_checked(model, kernels) or has_products
    except Exception as error:  # compilers, a driver and the kernels raise whatever they like
        logger.warning(
            "fused kernels can't be used on %s, torch's are: %s",
            device,
            str(error).splitlines()[:1],
        )
        return False


def _kernels_of(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return None
        from sworker.kernels import fused_triton

        return fused_triton
    from sworker.kernels import fused_numba

    return fused_numba if fused_numba.is_possible(dtype) else None


@torch.inference_mode()
def _multiply_experts(model: Model) -> bool:
    """Exchange the products of all experts, if there are kernels for all and
    those of the first block of each kind equal torch's."""
    from sworker.kernels.expert_products import ExpertProducts, can_multiply

    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    if not blocks or not all(map(can_multiply, blocks)):
        return False
    kinds = {block.moe: block for block in reversed(blocks)}
    products = {moe: ExpertProducts(block) for moe, block in kinds.items()}
    if not all(_same_products(block, products[moe]) for moe, block in kinds.items()):
        logger.warning("compiled products of experts differ from torch's, which are used")
        return False
    for block in blocks:
        block.products = products[block.moe]
    return True


def _same_products(block: Experts, products: Products) -> bool:
    weight = block.router.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((_ROWS, weight.shape[1]), generator=generator).to(block.up.weight.dtype)
    chosen, weights = block.route(x)
    own = torch.arange(chosen.numel()).remainder_(block.num).view_as(chosen)
    expected = block.sum_experts(x, own, weights).float()
    found = products(block.up, block.down, x, own, weights).float()
    return bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())


@torch.inference_mode()
def fuse_checked(model: Model, kernels: Kernels) -> bool:
    """``fuse`` with these kernels; raises whatever they raise. All parts are exchanged, or none.

    Layers are alike but for their MLP, so only the parts of the first layer of each kind are
    checked."""
    fused: dict[nn.Module, nn.Module] = {}  # by what it replaces; layers share a rotary table
    for module in model.modules():
        # Kernels go by addresses.
        assert all(x.is_contiguous() for x in module.parameters(recurse=False))
        if isinstance(module, RotaryTable):
            assert module.table.is_contiguous()
            fused[module] = FusedRotary(module, kernels)
        elif isinstance(module, RMSNorm) and module.size[0] <= _MAX_NORM_SIZE:
            fused[module] = FusedRMSNorm(module, kernels)
    kinds = {type(layer.mlp): layer for layer in reversed(model.layers)}
    if not all(_same_parts(layer, model.dtype, fused, kernels) for layer in kinds.values()):
        logger.warning("fused kernels differ from torch's operators here: those are used")
        return False
    num_gates = 0
    for layer in model.layers:
        if _norms_a_sum(layer.mlp_norm, layer, fused):
            layer.add_norm_kernel = _add_norm_of(layer.mlp_norm, kernels)
        if _norms_a_sum(layer.attn_norm, layer, fused):
            layer.attn_add_norm_kernel = _add_norm_of(layer.attn_norm, kernels)
        if layer.rope in fused and not layer.norms_turned and layer.growth is None:
            layer.rotate_split_kernel = _rotate_split_of(layer.rope, kernels)
        for gated in _gated(layer):
            gated.gate_kernel = _gate_of(gated, kernels)
            num_gates += 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in fused and not isinstance(parent, (FusedRotary, FusedRMSNorm)):
                setattr(parent, name, fused[child])
    return bool(fused) or num_gates > 0


def _norms_a_sum(norm: nn.Module, layer: Layer, fused: dict[nn.Module, nn.Module]) -> bool:
    """Whether what the norm is of is a sum, and nobody else needs it sooner."""
    if layer.placement in ("post", "branch") or norm not in fused:
        return False
    return norm is layer.attn_norm or (layer.placement == "pre" and not layer.parallel)


def _add_norm_of(rms_norm: nn.Module, kernels: Kernels) -> AddNorm:
    assert isinstance(rms_norm, RMSNorm)

    def add_normed(x: Tensor, a: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return (
            kernels.add_norm(x, a, rms_norm.weight, rms_norm.eps, rms_norm.offset, total)
            if x.shape[0]
            else (x, x)
        )

    return add_normed


def _rotate_split_of(rope: nn.Module | None, kernels: Kernels) -> RotateSplit:
    assert isinstance(rope, RotaryTable)

    def rotated(qk: Tensor, v: Tensor, positions: Tensor, out: QKV) -> None:
        if v.shape[0]:
            kernels.rotate_split(qk, v, positions, rope.table, out)

    return rotated


def _gated(layer: Layer) -> list[Gated]:
    """The parts of a layer's MLP whose gate has a kernel: none with a limit has."""
    parts = [part for part in layer.mlp.modules() if isinstance(part, Gated)]
    return [part for part in parts if part.gated and not part.limit and part.act in _GATES]


def _gate_of(mlp: Gated, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    is_silu = _GATES[mlp.act]

    def gated(h: Tensor) -> Tensor:  # [T, 2 · intermediate] → [T, intermediate]
        return kernels.gate(h, is_silu=is_silu) if h.shape[0] else h[:, : h.shape[1] // 2]

    return gated


def _same_parts(
    layer: Layer, dtype: torch.dtype, fused: dict[nn.Module, nn.Module], kernels: Kernels
) -> bool:
    """Return True if the kernels compute what torch does for a layer's parts, in ``dtype``."""
    weight = layer.qkv.weight
    generator = torch.Generator(weight.device).manual_seed(0)  # torch's own is the caller's

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device, generator=generator).to(dtype)

    x, a = some(_ROWS, weight.shape[1]), some(_ROWS, weight.shape[1])
    heads = some(_ROWS, 5, layer.head_dim)[:, :4]  # of a fused projection
    pairs: list[tuple[Tensor, Tensor]] = []
    if isinstance(layer.rope, RotaryTable):
        pairs += _rotated_pairs(layer.rope, heads, kernels)
    for norm, rows in ((layer.attn_norm, x), (layer.q_norm, heads)):
        if norm in fused:
            pairs.append((fused[norm](rows), norm(rows)))
    for norm in (layer.attn_norm, layer.mlp_norm):
        if _norms_a_sum(norm, layer, fused):
            room = torch.empty_like(x)
            pairs += zip(
                (*_add_norm_of(norm, kernels)(x, a, room), room), (x + a, norm(x + a), x + a),
                strict=True,
            )  # fmt: skip
    for gated in _gated(layer):
        h = some(_ROWS, sum(gated.up.splits))
        pairs.append((_gate_of(gated, kernels)(h), gated.gate(h)))
    return all(_close(found, expected) for found, expected in pairs)


def _rotated_pairs(
    rope: RotaryTable, heads: Tensor, kernels: Kernels
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the kernels say of heads [T, 4, D], and what torch does: two of q,
    one of k, one of v."""
    positions = torch.arange(len(heads), device=heads.device)
    qk, v = heads[:, :3], heads[:, 3:]
    turned = rope(qk, positions)
    yield kernels.rotate(qk, positions, rope.table), turned
    q_out, k_out, v_out = (torch.empty_like(v).repeat(1, num, 1) for num in (2, 1, 1))
    kernels.rotate_split(qk, v, positions, rope.table, (q_out, k_out, v_out))
    yield q_out, turned[:, :2]
    yield k_out, turned[:, 2:]
    yield v_out, v


def _close(found: Tensor, expected: Tensor) -> bool:
    # A GPU's exponentials, roots and quotients are a few steps off, which 16-bit dtypes don't see.
    steps = (32 if expected.dtype == torch.float32 else 4) * torch.finfo(expected.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=steps, atol=steps)
