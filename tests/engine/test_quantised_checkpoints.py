"""Quantised checkpoints through the engine: tokens are those of the checkpoint
that holds the decoded weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import prompts
from quantised import as_mxfp4, edit_checkpoint, quantise_checkpoint

from fastdecode import LLM, SamplingParams

SHAPES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 211}  # fmt: skip


def say(path: Path, **where: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **where}) as llm:
        outputs = llm.generate(prompts((5, 19, 1), seed=3), greedy)
        return [list(output.completions[0].token_ids) for output in outputs]


@pytest.mark.parametrize("way", ["fp8-blocks", "gptq"])
def test_tokens_are_those_of_the_decoded_weights(
    way: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """``test_quantised_weights`` compares the weights of every format."""
    source = tiny_checkpoint("llama", seed=5, **SHAPES)
    quantised, plain = quantise_checkpoint(source, tmp_path, way)
    expected = say(plain, r_workers=1)
    assert say(quantised, r_workers=2) == expected
    assert say(quantised, kv_placement="gpu") == expected
    assert say(source, r_workers=1) != expected  # quantising changed them


def save_random(path: Path, config: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_router = "mlp.gate." in name or "router" in name
                spread = 1.0 if is_router else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, spread, generator=generator)
    model.save_pretrained(path)
    return path


def test_what_decoding_takes_is_said_at_the_start(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", seed=5, **SHAPES)
    told: list[str] = []
    for path in (source, quantise_checkpoint(source, tmp_path, "fp8-blocks")[0]):
        say(path, progress=told.append, r_workers=1)
    lines = [line for line in told if "decoded" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"weights are FP8 in blocks of 48x48, 0\.00 GB on disk; they are decoded to float32 while "
        r"they are loaded, and take 0\.00 GB in memory", lines[0]
    )  # fmt: skip


def test_a_model_by_its_name_in_the_cache(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("llama", seed=5, **SHAPES)
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    for file in path.iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert say(Path("org/tiny"), r_workers=1) == say(path, r_workers=1)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Stacked experts, as gpt-oss has them: transposed, gate and up rows alternating."""
    config = transformers.GptOssConfig(
        **{**SHAPES, "num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2,
           "intermediate_size": 32, "sliding_window": 8, "max_position_embeddings": 128,
           "layer_types": ["sliding_attention", "full_attention"]}
    )  # fmt: skip
    source = save_random(tmp_path / "plain", config)
    decoded: dict[str, torch.Tensor] = {}

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        blocks, scales, decoded[name] = as_mxfp4(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path = edit_checkpoint(source, tmp_path / "mxfp4", quantise, quantization_config=mxfp4)
    plain = edit_checkpoint(
        source,
        tmp_path / "decoded",
        lambda name, _: {name: decoded[name]} if name in decoded else None,
    )
    expected = say(plain, r_workers=1)
    assert len(decoded) == 4
    assert say(path, r_workers=1) == expected
    assert say(source, r_workers=1) != expected
