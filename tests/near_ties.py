"""The rule for near-ties of routers: two sums in another order may choose
another expert where scores are nearly equal, so a text is compared up to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

GAP = 1e-5
"""Of the score: nearer ones are tied."""
MOST_SKIPPED = 0.01
"""Of all tokens that may be left out."""


@dataclass
class RouterOracle:
    """transformers' own model in float32, one sequence at a time, and how near
    its routers came to another choice."""

    model: Any
    gaps: list[Tensor] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> RouterOracle:
        (name,) = transformers.AutoConfig.from_pretrained(directory).architectures
        model = getattr(transformers, name).from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        found = cls(model.eval())
        for parent in model.modules():
            for router in parent.children():
                if type(router).__name__.endswith(("Router", "Gate")):
                    correction = _correction(router, parent)
                    router.register_forward_hook(
                        lambda module, args, out, c=correction: found.gaps.append(_gap(out, c))
                    )
        return found

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """Tokens after the prompt, EOS ignored, and how many of them precede the first near-tie."""
        tokens = list(prompt)
        logits: Tensor = torch.empty(0)
        for _ in range(num_tokens):
            self.gaps.clear()
            logits = self.model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
        tied = torch.stack(self.gaps).amin(dim=0) < GAP  # [positions], of the last pass
        best = logits[len(prompt) - 1 :].topk(2, dim=-1).values
        leads = (best[:, 0] - best[:, 1]) / best.abs().amax(dim=-1)
        unclear = torch.cat((tied[: len(prompt)].any()[None], tied[len(prompt) :])) | (leads < GAP)
        num_clear = int(unclear.nonzero()[0]) if unclear.any() else num_tokens
        return tokens[len(prompt) :], num_clear


def _correction(router: nn.Module, parent: nn.Module) -> Tensor | None:
    held = (*router.named_buffers(), *router.named_parameters(), *parent.named_buffers())
    return next((tensor for name, tensor in held if "correction" in name), None)


def _gap(out: Any, correction: Tensor | None) -> Tensor:
    """Between the worst chosen score and the best other, of the larger, [T]."""
    logits, weights, _ = out
    scores = logits.float()
    if correction is not None:
        scores = scores.sigmoid() + correction.flatten()
    top_k, num = weights.shape[-1], scores.shape[-1]
    if top_k == num:
        return torch.ones(len(scores))
    best = scores.topk(top_k + 1, dim=-1).values
    return (best[:, -2] - best[:, -1]) / best[:, -2].abs().clamp(min=1e-9)


def assert_same_up_to_ties(
    found: Sequence[Sequence[int]], expected: Sequence[tuple[list[int], int]]
) -> None:
    """Tokens equal the oracle's up to its first near-tie, and few come later."""
    for tokens, (oracle, num_clear) in zip(found, expected, strict=True):
        assert list(tokens)[:num_clear] == oracle[:num_clear]
    skipped = sum(len(oracle) - num_clear for oracle, num_clear in expected)
    assert skipped <= MOST_SKIPPED * sum(len(oracle) for oracle, _ in expected)
