"""A mixture of experts as numbers and flags: how a router chooses, and what an expert is. Needs no
torch; ``sworker.model.moe`` computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GateKind: TypeAlias = Literal["plain", "clamped", "clamped_after"]
"""Of an expert, with its up projection's halves g and u:

* plain: act(g) · u
* clamped: min(g, limit) · sigmoid(alpha · min(g, limit)) · (clamp(u, ±limit) + 1)
* clamped_after: min(act(g), limit) · clamp(u, ±limit)
"""
MlpKind: TypeAlias = Literal["dense", "experts"]
"""Of a layer."""


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and their weights, in this order: logits
    (softcap), score, choose ``top_k`` by score + correction within the best
    groups, take the chosen ones' scores, divide by their sum, scale."""

    score: Score = "softmax"
    chosen_first: bool = False
    """Experts are chosen by their logits; only the chosen ones' are scored."""
    wide: bool = False  # logits are computed in float32 whatever the activations' dtype
    groups: int = 1  # groups of experts; a group's score is the sum of its two best experts'
    kept: int = 1  # best groups, from which experts are chosen
    renorm: bool = False  # weights are divided by sum + eps; with a floor, by max(sum, floor)
    eps: float = 0.0
    floor: float = 0.0
    scale: float = 1.0  # multiplies the weights
    softcap: float | None = None  # logits become softcap · tanh(logit / softcap)
    bias: bool = False  # the logits have a bias
    correction: bool = False
    """A learned number per expert is added to its score to choose by, not to weigh by."""
    rounded: bool = False  # weights are rounded to the activations' dtype
    narrow: bool = False  # weights are rounded to it right after scoring, too
    sorted: bool = True
    """Chosen experts come best first; otherwise in the order of an unsorted
    ``torch.topk``. The order is that of the sum over experts."""


@dataclass(frozen=True)
class Moe:
    """The experts of a layer. A layer's activation is the model's."""

    num_experts: int
    top_k: int  # experts per token
    inner: int  # dims inside an expert
    router: Router
    shared_inner: int = 0  # dims inside the expert that sees every token; 0 without one
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of a projection to one number."""
    shared_average: bool = False
    """The output is the mean of the routed experts' and the shared one's, not the sum."""
    gate: GateKind = "plain"
    limit: float = 0.0  # limit of a clamped gate
    alpha: float = 1.0  # alpha of a clamped gate
    shared_limit: float = 0.0
    """Of the shared expert's gate, which is then clamped_after; 0: it is plain."""
    biases: bool = False  # experts' projections have biases
    weighs_input: bool = False  # a weight multiplies an expert's input, not its output
    scale_after: float = 1.0  # multiplies the routed experts' sum
    held: tuple[int, int] | None = None
    """The first of the experts that a rank has, and how many; None: all."""

    @property
    def here(self) -> range:
        first, count = self.held or (0, self.num_experts)
        return range(first, first + count)

    def num_router_parameters(self, hidden_size: int) -> int:
        """Weights of the router, the correction's among them."""
        return self.num_experts * (hidden_size + self.router.bias + self.router.correction)

    def num_expert_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner + (2 * self.inner + hidden_size) * self.biases

    def num_shared_parameters(self, hidden_size: int, *, bias: bool = False) -> int:
        """Weights of the shared expert and its gate. ``bias``: its projections have one."""
        if not self.shared_inner:
            return 0
        biases = (2 * self.shared_inner + hidden_size) * bias
        return 3 * hidden_size * self.shared_inner + biases + hidden_size * self.shared_gate

    def experts_hit(self, num_rows: float) -> float:
        """Return how many experts get at least one token on average, if routing is even."""
        missed = math.pow(1.0 - self.top_k / self.num_experts, num_rows)
        return self.num_experts * (1.0 - missed)
