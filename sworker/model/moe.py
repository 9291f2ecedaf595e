"""A mixture of experts, in place of a layer's MLP.

Rows are sorted by expert, multiplied group by group, put back in order and summed over each row's
experts in the order in which the router chose them. On a CPU, and where a device has no grouped
product for the dtype, the groups are a loop, for which the host must know their sizes; on CUDA in
bfloat16 nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.moe import Moe, Router
from fastdecode.core.model.spec import ModelSpec
from sworker.model.linear import MLP, Gated, Linear, limited_gate, make_activation

AddUp = Callable[[Tensor], None]
Products = Callable[["ExpertLinear", "ExpertLinear", Tensor, Tensor, Tensor], Tensor]
"""(up, down, x [T, hidden], experts int64 [T, k], weights [T, k]) → each row's
weighted sum, [T, hidden]. Experts elsewhere have the number after the last one's."""

_ALIGNMENT = 16  # bytes; grouped products need every stride to be a multiple of it
_MANY_ROWS = 32
"""Of an expert. Measured on a Zen 5 with 2 threads: at 64 rows 597 GFLOP/s with
the weights first and 464 with them last in bfloat16, 172 and 159 in float32;
below 32 rows it is the other way round."""


def route(
    router: Router,
    top_k: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each row's experts, equal bit for bit to transformers' routers.

    Args:
        x: [T, hidden].
        weight: [E, hidden].
        bias: of the logits, [E].
        correction: [E], float32.

    Returns:
        experts int64 [T, top_k], and their weights [T, top_k], float32 or, where
        the router rounds them, of x's dtype.
    """
    if router.wide:
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    else:
        logits = F.linear(x, weight, bias)
    if router.softcap is not None:
        logits = torch.tanh(logits.float() / router.softcap) * router.softcap
    scores = logits if router.chosen_first else _score(router, logits)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _within_groups(router, choice)
    experts = torch.topk(choice, top_k, dim=-1, sorted=router.sorted).indices
    weights = scores.gather(-1, experts)
    if router.chosen_first:
        weights = _score(router, weights)
    if router.narrow:
        weights = weights.to(x.dtype)
    if router.renorm:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total.clamp(min=router.floor) if router.floor else total + router.eps)
    if router.scale != 1.0:
        weights = weights * router.scale
    return experts, weights.to(x.dtype) if router.rounded else weights


def _score(router: Router, logits: Tensor) -> Tensor:
    """In float32."""
    wide: Tensor = logits.float()
    match router.score:
        case "softmax":
            return torch.softmax(wide, dim=-1)
        case "sigmoid":
            return torch.sigmoid(wide)
        case "sqrtsoftplus":
            soft: Tensor = F.softplus(wide)
            return soft.sqrt()


def _within_groups(router: Router, choice: Tensor) -> Tensor:
    """choice [T, E], with -inf for all experts but those of the best groups."""
    grouped = choice.unflatten(-1, (router.groups, -1))  # [T, groups, E / groups]
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.topk(best_two, router.kept, dim=-1, sorted=False).indices
    left_out = torch.ones_like(best_two, dtype=torch.bool).scatter_(-1, kept, False)
    masked: Tensor = grouped.masked_fill(left_out[..., None], float("-inf"))
    return masked.flatten(-2)


class RouterWeights(nn.Module):
    """What a router's logits are made with; in float32 where they are wide."""

    bias: nn.Parameter | None

    def __init__(self, moe: Moe, hidden_size: int) -> None:
        super().__init__()
        self.kept_dtype = torch.float32 if moe.router.wide else None
        """Of its parameters, whatever the model's; None: the model's."""
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        bias = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)
        self.bias = bias if moe.router.bias else None


class Correction(nn.Module):
    """What is added to each expert's score to choose by."""

    kept_dtype = torch.float32

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts), requires_grad=False)


class ExpertLinear(nn.Module):
    """One linear layer an expert.

    Args:
        experts: numbers of the experts on this rank.
        splits: output sizes of the projections that are fused into each.
    """

    bias: nn.Parameter | None
    is_packed = False  # True if ``forward`` is the only product, for any number of rows

    def __init__(self, experts: range, in_size: int, splits: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        num = len(experts)
        self.first, self.splits = experts.start, splits
        self.weight = nn.Parameter(torch.empty(num, sum(splits), in_size), requires_grad=False)
        biases = nn.Parameter(torch.empty(num, sum(splits)), requires_grad=False)
        self.bias = biases if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Multiply one expert's rows: x [n, in_size] → [n, sum(splits)]."""
        return F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


class Experts(Gated):
    """The routed experts, and the one that sees every token if there is one."""

    add_up: AddUp | None = None
    """Where ranks hold parts of the block: sums all ranks' tensors in place."""
    products: Products | None = None
    """What a CPU may have in place of ``sum_experts``. It holds no weights."""

    def __init__(self, spec: ModelSpec, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.first, self.num = moe.here.start, len(moe.here)
        self.act = make_activation(spec.activation)
        self.gated = moe.gate == "plain"
        hidden = spec.hidden_size
        self.router = RouterWeights(moe, hidden)
        self.correction = Correction(moe.num_experts) if moe.router.correction else None
        self.up = ExpertLinear(moe.here, hidden, (moe.inner,) * 2, moe.biases)
        self.down = ExpertLinear(moe.here, moe.inner, (hidden,), moe.biases)
        shared = MLP(spec, moe.shared_inner, moe.shared_limit) if moe.shared_inner else None
        self.shared = shared
        self.shared_gate = Linear(hidden, (1,), bias=False) if moe.shared_gate else None

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device to learn how many rows each
        expert has: then the block can't be part of a CUDA graph."""
        return not self._is_grouped

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden] → [T, hidden]
        experts, weights = self.route(x)
        own = self._own(experts)
        if self.products is None:
            y = self.sum_experts(x, own, weights)
        else:
            y = self.products(self.up, self.down, x, own, weights)
        if self.moe.scale_after != 1.0:
            y = y * self.moe.scale_after
        if self.shared is not None:
            shared: Tensor = self.shared(x)
            gate = self.shared_gate
            y = y + (shared if gate is None else torch.sigmoid(gate(x)) * shared)
            y = y / 2 if self.moe.shared_average else y
        if self.add_up is not None:
            self.add_up(y)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] → experts int64 [T, k], weights [T, k]."""
        bias = self.router.bias
        correction = None if self.correction is None else self.correction.weight
        return route(self.moe.router, self.moe.top_k, x, self.router.weight, bias, correction)

    def apply_gate(self, h: Tensor, dim: int = -1) -> Tensor:
        """h [S, 2 · inner] → [S, inner]; or with dim 0 [2 · inner, S] → [inner, S]."""
        if self.gated and dim == -1:
            return self.gate(h)
        gate, up = h.chunk(2, dim=dim)
        limit = self.moe.limit
        match self.moe.gate:
            case "plain":
                return self.act(gate).mul_(up)
            case "clamped_after":
                return limited_gate(self.act(gate), up, limit)
            case "clamped":
                gate = gate.clamp(max=limit)
                gate = gate * torch.sigmoid(gate * self.moe.alpha)
                return gate.mul_(up.clamp(-limit, limit).add_(1))

    def sum_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], numbers of experts here, or ``num`` [T, k], and their
        weights [T, k] → each row's weighted sum, [T, hidden]."""
        top_k = experts.shape[1]
        slots = experts.flatten()  # S = T · k
        by_expert = torch.sort(slots, stable=True)
        order = by_expert.indices
        rows = order.div(top_k, rounding_mode="floor")
        x_sorted = x.index_select(0, rows)  # [S, hidden]
        if self.moe.weighs_input:
            x_sorted = x_sorted * weights.flatten().index_select(0, order).unsqueeze(1).to(x.dtype)
        return self.combine(self.multiply(x_sorted, by_expert.values), order, weights)

    def multiply(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [S, hidden], sorted by expert, and whose it is [S] → [S, hidden].
        Rows of experts elsewhere come out as 0."""
        grouped = self._multiply_grouped if self._is_grouped else self._multiply_in_turn
        return grouped(x, experts)

    def combine(self, y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """y [S, hidden], the slots that its rows are of [S], weights [T, k] → the
        weighted sum of each row's k, [T, hidden]."""
        places = torch.empty_like(order)
        places.scatter_(0, order, torch.arange(len(order), device=order.device))
        return _weighted_sum(y, places.view_as(weights), self.moe.weighs_input, weights)

    def _own(self, experts: Tensor) -> Tensor:
        """Numbers of the experts here, from 0; of those elsewhere, ``num``."""
        if self.num == self.moe.num_experts:
            return experts
        own = experts - self.first
        return own.masked_fill((own < 0) | (own >= self.num), self.num)

    def _multiply_in_turn(self, x: Tensor, experts: Tensor) -> Tensor:
        """``multiply``, one expert after the other."""
        counts = torch.bincount(experts, minlength=self.num + 1).tolist()
        y = torch.empty_like(x)
        first = 0
        for expert, count in enumerate(counts[: self.num]):
            if not count:
                continue
            end = first + count
            y[first:end] = self._multiply_one(x[first:end], expert)
            first = end
        y[first:].zero_()
        return y

    def _multiply_one(self, x: Tensor, expert: int) -> Tensor:
        """One expert's rows [n, hidden] → same. Where there are many, a CPU is
        faster with the weights as the first factor, which it needn't pack."""
        if x.shape[0] < _MANY_ROWS or x.device.type != "cpu" or self.up.is_packed:
            y: Tensor = self.down(self.apply_gate(self.up(x, expert)), expert)
            return y
        h = _product(self.up, expert, x.T)
        return _product(self.down, expert, self.apply_gate(h, dim=0)).T

    def _multiply_grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """``multiply`` without waiting for the device."""
        counts = torch.histc(experts.int(), bins=self.num, min=0, max=self.num - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        within = experts.clamp(max=self.num - 1)
        h = _grouped(x, self.up, ends, within)
        y = _grouped(self.apply_gate(h), self.down, ends, within)
        if self.num == self.moe.num_experts:
            return y
        return y.masked_fill((experts >= self.num).unsqueeze(1), 0)  # never written

    @property
    def _is_grouped(self) -> bool:
        if self.up.is_packed:
            return False
        return can_group(self.up.weight) and can_group(self.down.weight)


def can_group(weight: Tensor) -> bool:
    """Whether the device has a product of groups of rows with weights [E, out, in]."""
    return (
        weight.device.type == "cuda"
        and weight.dtype == torch.bfloat16
        and not any(size * weight.itemsize % _ALIGNMENT for size in weight.shape[1:])
        and grouped_product() is not None
    )


def grouped_product() -> Callable[..., Any] | None:
    """torch's, by the name that this version has for it; None: it has none."""
    public: Callable[..., Any] | None = getattr(F, "grouped_mm", None)
    return public or getattr(torch, "_grouped_mm", None)


def _grouped(x: Tensor, linear: ExpertLinear, ends: Tensor, experts: Tensor) -> Tensor:
    """x [S, in], sorted by expert, where each one's rows end, int32 [E], and
    whose they are [S] → [S, out]. Rows beyond the last end aren't written."""
    product = grouped_product()
    assert product is not None
    y: Tensor = product(x, linear.weight.transpose(1, 2), offs=ends)
    return y if linear.bias is None else y + linear.bias.index_select(0, experts)


def _product(linear: ExpertLinear, expert: int, x: Tensor) -> Tensor:
    """x [in, n] → [out, n]."""
    weight = linear.weight[expert]
    if linear.bias is None:
        return torch.mm(weight, x)
    return torch.addmm(linear.bias[expert][:, None], weight, x)


def _weighted_sum(y: Tensor, places: Tensor, is_weighed: bool, weights: Tensor) -> Tensor:
    """y [S, hidden], where each row's k results are in it [T, k], and their weights [T, k] unless
    the results are weighed → [T, hidden], added in float32 in the order of the k."""
    total = torch.zeros((len(places), y.shape[1]), dtype=torch.float32, device=y.device)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        part = y.index_select(0, place)
        if is_weighed:
            total.add_(part)
        else:
            total.addcmul_(part, weight.unsqueeze(1))
    return total.to(y.dtype)
