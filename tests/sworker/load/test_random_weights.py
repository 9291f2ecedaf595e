"""``load_format="random"``: a model directory with config.json alone, whose weights
are made on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FEW_FAMILIES
from families import save_tiny
from weight_files import Make, assert_same

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import CheckpointError, ConfigError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.jobs.manifest import identify_model
from sworker.load.weights import load_model, random_model
from sworker.ranks.sharding import Shard

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def config_only(tiny_checkpoint: Make, tmp_path: Path) -> Path:
    """A Llama's config.json, and nothing else."""
    return without_weights(tiny_checkpoint("llama"), tmp_path / "config_only")


def without_weights(source: Path, target: Path) -> Path:
    target.mkdir()
    shutil.copy(source / "config.json", target)
    return target


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path, "random")
    _, model = load_model(checkpoint, device="cpu", dtype=torch.float32, **options)
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_family_has_the_weights_of_a_random_model(
    family: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    path = without_weights(tiny_checkpoint(family), tmp_path / family)
    weights = load(path)
    spec = open_checkpoint(path, "random").spec()
    made = random_model(spec, device="cpu", dtype=torch.float32)
    assert_same(weights, dict(made.named_parameters()))
    assert all(weight.isfinite().all() for weight in weights.values())
    assert len({float(weight.flatten()[0]) for weight in weights.values() if weight.dim() > 1}) > 9


def test_another_seed_gives_another_model(config_only: Path) -> None:
    spec = open_checkpoint(config_only, "random").spec()
    one, other = (
        random_model(spec, device="cpu", dtype=torch.float32, seed=seed).layers[0].o.weight
        for seed in (0, 1)
    )
    assert not torch.equal(one, other)


def test_shards_have_parts_of_one_model(config_only: Path) -> None:
    whole = load(config_only)
    shards = [load(config_only, shard=Shard(rank, 2)) for rank in range(2)]
    for name in ("layers.0.mlp.up.weight", "layers.2.qkv.weight"):
        # Each rank has the first or second half of every fused projection.
        parts = [list(shard[name].split(shard[name].shape[0] // 2)) for shard in shards]
        if "up" in name:
            assert torch.equal(
                whole[name], torch.cat([parts[0][0], parts[1][0], parts[0][1], parts[1][1]])
            )
        rows = {tuple(row.tolist()) for row in whole[name]}
        assert rows == {tuple(row.tolist()) for shard in shards for row in shard[name]}
    down = "layers.1.mlp.down.weight"
    assert torch.equal(whole[down], torch.cat([shard[down] for shard in shards], dim=1))


@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_have_parts_of_the_same_experts(ep: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", seed=7)  # 8 experts of 22 inner dims
    checkpoint = open_checkpoint(tmp_path, "random")
    whole, *parts = (
        load_model(checkpoint, device="cpu", dtype=torch.float32, shard=shard)[1]
        for shard in (None, *(Shard(rank, 2, ep) for rank in range(2)))
    )
    down, *halves = (model.layers[0].mlp.down.weight for model in (whole, *parts))
    assert torch.equal(down, torch.cat(halves, dim=2 if ep == 1 else 0))
    up, *halves = (model.layers[0].mlp.up.weight for model in (whole, *parts))
    if ep == 2:
        assert torch.equal(up, torch.cat(halves))
    else:
        (gate, other), (gate_2, other_2) = (half.chunk(2, dim=1) for half in halves)
        assert torch.equal(up, torch.cat((gate, gate_2, other, other_2), dim=1))


def test_files_are_wanted_unless_weights_are_random(config_only: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        open_checkpoint(config_only)
    with pytest.raises(ConfigError, match="load_format='made up' is not one of"):
        LLM(str(config_only), load_format="made up")


def test_random_weights_are_another_model_than_a_directorys(tiny_checkpoint: Make) -> None:
    """To R-workers that are kept for a model, and to a run that is resumed."""
    path = tiny_checkpoint("llama")
    assert open_checkpoint(path, "random").model_hash != open_checkpoint(path).model_hash
    assert identify_model(path, load_format="random") != identify_model(path)


def test_a_quantised_config_makes_plain_weights(tiny_checkpoint: Make, tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, model = load_model(open_checkpoint(tmp_path, "random"), device="cpu")
    assert spec.quantisation is not None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
