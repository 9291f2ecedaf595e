"""Copies of checkpoints, changed, and loading them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sworker.load.weights import load_model

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(
        load_model(path, device="cpu", **{"dtype": torch.float32, **options})[1].named_parameters()
    )


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def copy_with(
    source: Path, target: Path, change: Callable[[Tensors], Tensors | None] | None = None
) -> Path:
    """A copy of a single-file checkpoint with changed tensors."""
    shutil.copytree(source, target)
    if change is not None:
        tensors = load_file(target / "model.safetensors")
        save_file(change(tensors) or tensors, target / "model.safetensors")
    return target


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
