"""A conversation_id that saves nothing is answered with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.conversations.turns import no_reuse_warning, why_no_reuse
from fastdecode.core.cache_use import CacheUse
from fastdecode.core.config.engine import EngineConfig

ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, ""),
        ({"prefix_cache": "on"}, ""),
        ({"prefix_cache": "off"}, "prefix_cache is off. To reuse KV, remove prefix_cache=off"),
        ({"replicas": 1, "r_workers": 3}, ""),
        ({"prompt_pp": 1}, ""),
    ],
)
def test_when_nothing_is_reused(options: dict[str, Any], says: str) -> None:
    why = why_no_reuse(EngineConfig.of("a model", **options))
    assert says in why and bool(why) is bool(says)
    assert "cache is off" in no_reuse_warning(why, CacheUse(is_off=True)) or says


def test_in_python(tiny_checkpoint: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"kv_memory_gb": 0.01, "r_threads": 1, "dtype": "float32"}
    with LLM(str(tiny_checkpoint("llama")), prefix_cache="off", **options) as llm:
        with pytest.warns(UserWarning, match="conversation_id.*prefix_cache is off") as found:
            llm.generate([1, 2], ONE, conversation_id="c")
        assert found[0].filename == __file__, "it points at the user's line"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.generate([1, 2], ONE)
    with LLM(str(tiny_checkpoint("llama")), **options) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([1, 2], ONE, conversation_id="c")
        with pytest.raises(UserWarning, match="this request's cache is off"):
            llm.generate([1], ONE, conversation_id="c", cache=CacheUse(is_off=True))
