"""A stage's part of a model: its own weights and no others; steps that begin
and end with hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import ReferenceAttention
from checkpoints import FAMILIES, prompts
from safetensors.torch import load_file, save_file

from fastdecode.core.model.stages import split_layers, stage_spec
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.model.skeleton import Model, forward
from sworker.worker import Pass, SWorker

Make = Callable[..., Path]
CPU = torch.device("cpu")


def load_stages(path: Path, num_stages: int) -> list[tuple[range, Model]]:
    spec, _ = load_model(path, device="cpu", dtype=torch.float32)
    stages = split_layers([1.0] * spec.num_layers, num_stages)
    return [
        (layers, load_model(path, device="cpu", dtype=torch.float32, layers=layers,
                            with_embedding=i == 0, with_head=i == 0)[1])
        for i, layers in enumerate(stages)
    ]  # fmt: skip


def run(worker: SWorker, begun: Pass, attention: ReferenceAttention) -> Pass:
    """Up to its last layer's output."""
    while begun.advance(attention(begun.layer, begun.q, begun.k, begun.v)):
        pass
    return begun


@pytest.mark.parametrize(
    ("family", "padded"), list(zip(FAMILIES, itertools.cycle((False, True)), strict=False))
)
@torch.inference_mode()
def test_a_step_through_stages_is_the_whole_step(
    family: str, padded: bool, tiny_checkpoint: Make
) -> None:
    """Stages have the model's weights, each of them once."""
    path, num_parameters = tiny_checkpoint(family), 0
    spec, whole = load_model(path, device="cpu", dtype=torch.float32)
    (text,) = prompts((9,))
    rows = torch.stack((torch.tensor(text), torch.arange(9)))
    attention = ReferenceAttention(spec.attention)
    x = forward(whole, torch.tensor(text), attention.begin_step((0,), (9,)), attention)
    expected = whole.logits(x[[3, 8]])

    begun: list[Pass] = []
    for layers, model in load_stages(path, 3):
        num_parameters += sum(x.numel() for x in model.parameters())
        graphs = StepGraphs(model, CPU, capture=False) if padded else None
        worker = SWorker(spec, model, CPU, graphs)
        attention = ReferenceAttention(stage_spec(spec, layers).attention)
        attention.begin_step((0,), (9,))
        x = begun[-1].output.clone() if begun else None
        step = worker.begin(rows, x=x)
        begun.append(run(worker, step, attention))
    assert num_parameters == spec.num_parameters
    home = begun[0]
    home.come_home(begun[-1].output[[3, 8]])
    logits = home.logits(np.arange(2))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_other_stages_tensors_are_neither_missed_nor_unexpected(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    gone = [name for name in tensors if ".layers.2." in name or name == "lm_head.weight"]
    assert len(gone) > 5
    kept = {name: tensor for name, tensor in tensors.items() if name not in gone}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    _, model = load_model(
        tmp_path, device="cpu", layers=range(1, 2), with_embedding=False, with_head=False
    )
    assert len(model.layers) == 1
    assert model.embed_tokens is None
    own = sum(tensor.numel() for name, tensor in tensors.items() if ".layers.1." in name)
    assert sum(x.numel() for x in model.parameters()) == own
    with pytest.raises(Exception, match="lacks"):
        load_model(tmp_path, device="cpu", layers=range(2, 3), with_head=False)
