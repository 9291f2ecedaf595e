"""Triton kernels on a CPU: in Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are imported from now on are interpreted, as they must be on a CPU. Skips
    the test where Triton isn't there, or has compiled kernels in this process already."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")
    if torch.cuda.is_available():
        return
    kernels: Any = importlib.import_module("sworker.kernels.paged_triton")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    for function in (kernels._attend, language.sum):
        if not isinstance(function, interpreter.InterpretedFunction):
            pytest.skip("Triton compiles in this process")
    _take_arrays_of_one(interpreter, monkeypatch)


def _take_arrays_of_one(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes a whole number of an array of one element, which newer
    versions of NumPy refuse to do."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
