"""Random tiny models of every family: logits of ragged batches, in chunks,
equal those of transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attention_cases import ReferenceAttention
from checkpoints import prompts
from families import FAMILIES, draw_config, save_tiny

from examples import examples
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from sworker.kernels.fused import fuse
from sworker.load.weights import load_model
from sworker.model.linear import MLP
from sworker.model.skeleton import Model, forward
from sworker.ranks.sharding import Shard, parallelize

SEEDS = range(examples(5, share=2))
CHUNKS = ((7, 1, 3), (1, 20, 0), (24, 9, 1))
"""Tokens that each sequence appends in a pass."""


def _oracle(directory: Path) -> Any:
    (name,) = transformers.AutoConfig.from_pretrained(directory).architectures
    model = getattr(transformers, name).from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_of_ragged_chunks(family: str, seed: int, tmp_path: Path) -> None:
    """The last seed's models run with fused kernels, too."""
    save_tiny(tmp_path, family, seed)
    spec, model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert spec.family == family
    oracle = _oracle(tmp_path)
    texts = prompts([sum(counts) for counts in zip(*CHUNKS, strict=True)], seed=seed)
    expected = [oracle(torch.tensor([text])).logits[0] for text in texts]
    _assert_near(_run_chunks(spec, model, texts), expected)
    if seed == SEEDS[-1] and fuse(model, torch.device("cpu")):
        _assert_near(_run_chunks(spec, model, texts), expected)
    if FAMILIES[family].is_part:
        for name in ("visual", "vision_model", "multi_modal_projector"):
            if hasattr(oracle.model, name):
                setattr(oracle.model, name, None)
    corrections = [buffer for name, buffer in oracle.named_buffers() if "correction" in name]
    parameters = (*oracle.parameters(), *corrections)
    assert spec.num_parameters == sum(tensor.numel() for tensor in parameters)


def _run_chunks(spec: ModelSpec, model: Model, texts: list[list[int]]) -> list[torch.Tensor]:
    attend, done = ReferenceAttention(spec.attention, model.sinks), [0] * len(texts)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in CHUNKS:
        fed = [
            text[start : start + count]
            for text, start, count in zip(texts, done, counts, strict=True)
        ]
        positions = attend.begin_step(range(len(texts)), counts)
        logits = model.logits(forward(model, torch.tensor([*chain(*fed)]), positions, attend))
        for part, rows in zip(parts, logits.split(list(counts)), strict=True):
            part.append(rows)
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return [torch.cat(part) for part in parts]


def _assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        bound = 1e-4 * max(1.0, theirs.abs().max().item() / 10)
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


def test_gates_with_limits_are_left_to_torch(tmp_path: Path) -> None:
    """Their kernels know no limit; gates without one take the kernels beside them."""
    save_tiny(tmp_path, "step3p5", seed=2)
    _, model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert fuse(model, torch.device("cpu"))
    mlps = [part for part in model.modules() if isinstance(part, MLP)]
    assert {bool(mlp.limit) for mlp in mlps} == {False, True}
    assert all((mlp.gate_kernel is None) == bool(mlp.limit) for mlp in mlps)


class Sum:
    """Adds up the tensors of two threads that are ranks."""

    def __init__(self) -> None:
        self.both: list[torch.Tensor] = []
        self.met = threading.Barrier(2, timeout=60)

    def __call__(self, tensor: torch.Tensor) -> None:
        if self.met.wait() == 0:
            self.both.clear()
        self.met.wait()
        self.both.append(tensor.clone())
        self.met.wait()
        tensor.copy_(self.both[0] + self.both[1])


OF_TWO_RANKS = (
    *((family, 1) for family in ("olmo2", "cohere", "glm", "apertus", "exaone4", "gemma3_text")),
    *((family, ep)
      for family in ("qwen2_moe", "glm4_moe", "granitemoeshared", "minimax_m2", "step3p5")
      for ep in (1, 2)),
)  # fmt: skip


@pytest.mark.parametrize(("family", "ep"), OF_TWO_RANKS)
def test_two_ranks_are_one_model(family: str, ep: int, tmp_path: Path) -> None:
    """Norms of all heads, of each with its own weights; heads whose pairs lie
    side by side; an activation with weights; experts cut, or whole ones each."""
    seed = next(seed for seed in range(99) if _divides(draw_config(family, seed), ep))
    save_tiny(tmp_path, family, seed)
    (text,) = prompts((17,), seed=3)
    add_up = Sum()

    @torch.inference_mode()
    def run(rank: int) -> torch.Tensor:
        shard = Shard(rank, 2, ep)
        spec, model = load_model(tmp_path, device="cpu", dtype=torch.float32, shard=shard)
        parallelize(model, shard, add_up)
        attention = tuple(
            replace(one, num_q_heads=one.num_q_heads // 2, num_kv_heads=one.num_kv_heads // 2)
            for one in spec.attention
        )
        attend = ReferenceAttention(attention)
        positions = attend.begin_step([0], [len(text)])
        return model.logits(forward(model, torch.tensor(text), positions, attend))

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(run, range(2)))
    with torch.inference_mode():
        expected = _oracle(tmp_path)(torch.tensor([text])).logits[0]
    ours = torch.cat(parts, dim=-1)[:, : expected.shape[1]]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


def _divides(options: dict[str, Any], ep: int) -> bool:
    """Whether two ranks can have such a model."""
    inner = options.get("moe_intermediate_size", options["intermediate_size"])
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((options[name] for name in names if name in options), 0)
    shared = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    sizes = [options["num_key_value_heads"], options["intermediate_size"],
             *(options.get(name, 0) for name in shared),
             options.get("n_shared_experts", 0) * inner]  # fmt: skip
    return not any(size % 2 for size in (*sizes, inner if ep == 1 else num_experts))


def test_first_layers_of_cohere_are_read_as_transformers_reads_them() -> None:
    """Where lists of layers are missing: dense ones first, which have a pattern of their own."""
    for first, pattern in ((0, 1), (2, 1), (3, 2)):
        config = {
            "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe",
            "hidden_size": 64, "num_hidden_layers": 9, "num_attention_heads": 4, "vocab_size": 32,
            "intermediate_size": 48, "first_k_dense_replace": first,
            "prefix_dense_sliding_window_pattern": pattern, "sliding_window_pattern": 3,
        }  # fmt: skip
        oracle = transformers.Cohere2MoeConfig(**config)
        spec = read_model_spec(config, name="random")
        assert spec.mlps == tuple(
            "experts" if kind == "sparse" else "dense" for kind in oracle.mlp_layer_types
        )
        slides = [each.sliding_window is not None for each in spec.attention]
        assert slides == [kind == "sliding_attention" for kind in oracle.layer_types]
        turned = [slide or (pattern == 1 and layer < first) for layer, slide in enumerate(slides)]
        assert [rope is not None for rope in spec.ropes] == turned
        assert spec.head_dim == oracle.head_dim
