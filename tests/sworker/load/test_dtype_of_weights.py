"""Models whose config names no dtype have their weights' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_files import Make

from fastdecode.core.dtype import DType
from fastdecode.core.model.checkpoint import open_checkpoint


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
    dtypes: list[torch.dtype],
    said: dict[str, object] | None,
    expected: DType | None,
    tiny_checkpoint: Make,
    tmp_path: Path,
) -> None:
    """Of several dtypes, the one of most bytes: here norms are in the second."""
    source = tiny_checkpoint("llama")
    config = json.loads((source / "config.json").read_text())
    plain = {name: value for name, value in config.items() if "dtype" not in name}
    changes = dict(said or {})
    if isinstance(text := changes.get("text_config"), dict):
        changes["text_config"] = {**plain, **text}
    (tmp_path / "config.json").write_text(json.dumps({**plain, **changes}))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: tensor.to(dtypes[-1 if "norm" in name else 0]) for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    for extra in source.glob("tokenizer*"):
        shutil.copy(extra, tmp_path)
    assert open_checkpoint(tmp_path).spec().dtype is expected
