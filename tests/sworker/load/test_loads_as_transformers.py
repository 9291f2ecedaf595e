"""Directories whose files disagree, or say less than they should, mean to us
what they mean to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attention_cases import ReferenceAttention
from checkpoints import FAMILIES, oracle, prompts
from weight_files import Make, Tensors, copy_with, edit_config

from fastdecode.core.errors import CheckpointError, UnsupportedModelError
from fastdecode.core.model.checkpoint import open_checkpoint
from sworker.load.weights import load_model
from sworker.model.skeleton import forward

HEADS = {
    family: "embed_out.weight" if family == "gpt_neox" else "lm_head.weight" for family in FAMILIES
}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@torch.inference_mode()
def assert_same_logits(path: Path, **options: Any) -> None:
    """Ours of one text are those of transformers."""
    spec, model = load_model(path, device="cpu", dtype=torch.float32, **options)
    (text,) = prompts((41,))
    attend = ReferenceAttention(spec.attention)
    positions = attend.begin_step([0], [len(text)])
    logits = model.logits(forward(model, torch.tensor(text), positions, attend))
    torch.testing.assert_close(logits, oracle(path).logits(text), atol=1e-4, rtol=0)


def with_head(
    source: Path, target: Path, family: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Path:
    """A copy that has an output projection beside its tied embedding, made of it by ``change``."""

    def add(tensors: Tensors) -> Tensors:
        embedding = next(tensor for name, tensor in tensors.items() if name.endswith(EMBEDDINGS))
        return {**tensors, HEADS[family]: change(embedding)}

    return copy_with(source, target, add)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_from_its_tied_embedding_counts(
    family: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, tie_word_embeddings=True)
    path = with_head(source, tmp_path / "x", family, lambda x: x.flip(0).contiguous())
    assert open_checkpoint(source).spec().tied_embeddings
    assert not open_checkpoint(path).spec().tied_embeddings
    assert_same_logits(path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_copy_of_the_tied_embedding_takes_no_memory(
    family: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, tie_word_embeddings=True)
    path = with_head(source, tmp_path / "x", family, torch.clone)
    assert (
        open_checkpoint(path).spec().num_parameters == open_checkpoint(source).spec().num_parameters
    )
    assert_same_logits(path)


def test_heads_are_compared_to_their_last_byte(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """Beyond the part that is compared at a time, too."""
    source = tiny_checkpoint("llama", tie_word_embeddings=True, vocab_size=22_001)

    def nudge(embedding: torch.Tensor) -> torch.Tensor:
        changed = embedding.clone()
        changed[-1, -1] += 1
        return changed

    for name, change, is_tied in (("same", torch.clone, True), ("other", nudge, False)):
        path = with_head(source, tmp_path / name, "llama", change)
        assert open_checkpoint(path).spec().tied_embeddings == is_tied


LINEAR = {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": LINEAR, "rope_theta": 70.0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_scaling": {**LINEAR, "rope_theta": 90.0}, "rope_parameters": {"rope_theta": 500.0}},
        {"rope_scaling": {}, "rope_parameters": {**LINEAR, "rope_theta": 500.0}},
        {"rope_scaling": None, "rope_parameters": {**LINEAR, "rope_theta": 500.0}},
    ],
)  # fmt: skip
def test_rope_scaling_counts_beside_rope_parameters(
    fields: dict[str, Any], tiny_checkpoint: Make, tmp_path: Path
) -> None:
    path = copy_with(tiny_checkpoint("llama"), tmp_path / "x")
    edit_config(path, **fields)
    assert_same_logits(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_base_models_are_language_models_by_their_tied_embedding(
    family: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    """As AutoModel saves them: by the class without a head, whose tensors lack its prefix."""
    whole = oracle(tiny_checkpoint(family, tie_word_embeddings=True)).model
    whole.base_model.save_pretrained(tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert (
        architecture.endswith("Model")
        and open_checkpoint(tmp_path).spec().architecture == architecture
    )
    assert_same_logits(tmp_path)


def test_a_base_model_without_an_output_projection_is_refused(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    """transformers would draw one at random."""
    oracle(tiny_checkpoint("llama")).model.base_model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'lm_head\.weight'"):
        load_model(tmp_path, device="cpu", dtype=torch.float32)


def test_a_float64_checkpoint_runs_in_the_dtype_asked_for(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float64"
    assert_same_logits(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"config\.json: the dtype 'float64'.*dtype float32, bfloat16"
    ):
        load_model(tmp_path, device="cpu")
