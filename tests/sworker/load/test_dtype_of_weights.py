"""Models whose config names no dtype have their weights' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from weight_files import Make, copy_with

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
    dtypes: list[torch.dtype], said: dict[str, object] | None, expected: DType | None,
    tiny_checkpoint: Make, tmp_path: Path,
) -> None:  # fmt: skip
    """Of several dtypes, the one of most bytes: here norms are in the second."""
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
