"""FastDecode: decode large batches on few GPUs.

GPU S-workers run every layer that has weights; CPU R-workers keep the KV cache
in their DRAM and compute attention.

    from fastdecode import LLM, SamplingParams

    with LLM("path/to/model", r_workers=2) as llm:
        params = SamplingParams(max_tokens=32)
        for output in llm.generate(["Once upon a time"], params):
            print(output.text)

Importing the package is cheap: ``LLM``, and with it torch, is loaded when it is
first asked for (PEP 562), so that an R-worker host or a planner's laptop needs
no torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from fastdecode.core.host.cpus import note_cpus
from fastdecode.core.host.openmp import bound_spinning
from fastdecode.core.version import VERSION

if TYPE_CHECKING:
    from fastdecode.core.config.engine import EngineConfig as EngineConfig
    from fastdecode.core.errors import FastDecodeError as FastDecodeError
    from fastdecode.core.sequence import CacheUse as CacheUse
    from fastdecode.core.sequence import Completion as Completion
    from fastdecode.core.sequence import PromptRequest as PromptRequest
    from fastdecode.core.sequence import RequestOutput as RequestOutput
    from fastdecode.core.sequence import SamplingParams as SamplingParams
    from fastdecode.core.vllm_names import StructuredOutputsParams as StructuredOutputsParams
    from fastdecode.core.vllm_names import TextPrompt as TextPrompt
    from fastdecode.core.vllm_names import TokensPrompt as TokensPrompt
    from fastdecode.engine.llm import LLM as LLM

__version__ = VERSION

note_cpus()
bound_spinning(os.environ, sys.modules)  # here, as every way to torch leads through this package

_HOME = {
    "LLM": "fastdecode.engine.llm",
    "SamplingParams": "fastdecode.core.sequence",
    "PromptRequest": "fastdecode.core.sequence",
    "RequestOutput": "fastdecode.core.sequence",
    "Completion": "fastdecode.core.sequence",
    "CacheUse": "fastdecode.core.sequence",
    "StructuredOutputsParams": "fastdecode.core.vllm_names",
    "TextPrompt": "fastdecode.core.vllm_names",
    "TokensPrompt": "fastdecode.core.vllm_names",
    "EngineConfig": "fastdecode.core.config.engine",
    "FastDecodeError": "fastdecode.core.errors",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'fastdecode' has no attribute {name!r}")
    from fastdecode.core.errors import imports_for

    with imports_for(f"fastdecode.{name} (an S-worker)"):
        return getattr(importlib.import_module(_HOME[name]), name)
