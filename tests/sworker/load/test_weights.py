"""Loading: every way in which a checkpoint can be laid out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import save_tiny
from weight_files import Make, Tensors, assert_same, copy_with, edit_config, load

from fastdecode.core.dtype import DType
from fastdecode.core.model.checkpoint import open_checkpoint
from sworker.load.reader import TensorReader
from sworker.load.weights import load_model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shards(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), load(source))
    assert open_checkpoint(tmp_path).spec().num_layers == 3


@pytest.mark.parametrize(
    ("family", "extras"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
        ("gpt2", {"transformer.h.1.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
                  "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("gpt_neox", {"gpt_neox.layers.2.attention.bias": torch.ones(1, 1, 8, 8).byte(),
                      "gpt_neox.layers.2.attention.masked_bias": torch.tensor(-1e9)}),
    ],
)  # fmt: skip
def test_harmless_extras(
    family: str, extras: Tensors, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family)
    extended = copy_with(source, tmp_path / "extended", lambda tensors: {**tensors, **extras})
    assert_same(load(extended), load(source))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(saved: torch.dtype, wanted: torch.dtype, llama: Path, tmp_path: Path) -> None:
    converted = copy_with(
        llama, tmp_path / "x", lambda tensors: {n: t.to(saved) for n, t in tensors.items()}
    )
    expected = {name: tensor.to(saved).to(wanted) for name, tensor in load(llama).items()}
    assert_same(load(converted, dtype=wanted), expected)


def test_progress_ends_at_the_total(llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(llama, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    total = 4 * open_checkpoint(llama).spec().num_parameters
    assert done == sorted(done)
    assert calls[-1] == (total, total)


def test_model_hash(llama: Path, tiny_checkpoint: Make, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    assert len(open_checkpoint(llama).model_hash) == 64
    assert open_checkpoint(copy).model_hash == open_checkpoint(llama).model_hash, (
        "it isn't a matter of the place"
    )
    edit_config(copy, rope_theta=1e6)
    assert open_checkpoint(copy).model_hash != open_checkpoint(llama).model_hash
    half = copy_with(
        llama, tmp_path / "b", lambda tensors: {n: t.half() for n, t in tensors.items()}
    )
    assert open_checkpoint(half).model_hash != open_checkpoint(llama).model_hash
    assert open_checkpoint(tiny_checkpoint("qwen2")).model_hash != open_checkpoint(llama).model_hash


def test_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from fastdecode.core.errors import MissingExtraError
from fastdecode.core.errors import pip_command
try:
    import sworker.load.weights
except MissingExtraError as error:
    assert pip_command("sworker") in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_is_opened_once_for_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "qwen3_moe", seed=1)  # 17 experts in each of 3 layers, with 3 tensors each
    num_tensors = len(open_checkpoint(tmp_path).tensors)
    opened: list[Path] = []
    open_file = TensorReader._open

    def counted(self: TensorReader, path: Path) -> Any:
        if path not in self._files:
            opened.append(path)
        return open_file(self, path)

    monkeypatch.setattr(TensorReader, "_open", counted)
    load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert num_tensors > 100
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("dtypes", "said", "expected"),
    [
        ([torch.bfloat16], None, DType.BFLOAT16),
        ([torch.float16], None, DType.FLOAT16),
        ([torch.float32], None, DType.FLOAT32),
        ([torch.float64], None, None),
        ([torch.bfloat16, torch.float32], None, DType.BFLOAT16),
        ([torch.bfloat16], {"torch_dtype": "float32"}, DType.FLOAT32),
        ([torch.float32], {"dtype": "bfloat16"}, DType.BFLOAT16),
        ([torch.bfloat16], {"dtype": None, "torch_dtype": None}, DType.BFLOAT16),
        ([torch.float16], {"text_config": {}}, DType.FLOAT16),
        ([torch.float16], {"text_config": {"dtype": "float32"}}, DType.FLOAT32),
    ],
)
def test_dtype_without_one_in_the_config(
    dtypes: list[torch.dtype], said: dict[str, object] | None, expected: DType | None,
    tiny_checkpoint: Make, tmp_path: Path,
) -> None:  # fmt: skip
    """Several dtypes come to the one of most bytes: here norms are in the second."""
    dtype_of = {True: dtypes[-1], False: dtypes[0]}
    path = copy_with(
        tiny_checkpoint("llama"),
        tmp_path / "x",
        lambda t: {name: x.to(dtype_of["norm" in name]) for name, x in t.items()},
    )
    config = json.loads((path / "config.json").read_text())
    plain = {name: value for name, value in config.items() if "dtype" not in name}
    changes = dict(said or {})
    if isinstance(text := changes.get("text_config"), dict):
        changes["text_config"] = {**plain, **text}
    (path / "config.json").write_text(json.dumps({**plain, **changes}))
    assert open_checkpoint(path).spec().dtype is expected
