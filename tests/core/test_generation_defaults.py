"""What generation_config.json recommends, and for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdecode.core.errors import ConfigError
from fastdecode.core.model.generation_defaults import generation_defaults, with_defaults
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs.opening import JobOptions, simple_lines
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL, RequestReader

QWEN = {
    "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    "eos_token_id": [2, 3], "max_new_tokens": 99, "transformers_version": "4",
}  # fmt: skip


def write(model: Path, **said: Any) -> Path:
    (model / "generation_config.json").write_text(json.dumps(said))
    return model


def test_the_files_sampling_parameters_by_our_names(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    write(tmp_path, **QWEN)
    assert generation_defaults(tmp_path, "ignore") == {}
    assert generation_defaults(tmp_path) == {
        "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 99,
    }  # fmt: skip
    write(tmp_path, do_sample=False, temperature=0.7, repetition_penalty=1.2)
    assert generation_defaults(tmp_path) == {"repetition_penalty": 1.2}
    write(tmp_path, temperature=1.0, top_p=1.0, repetition_penalty=1.0)
    assert generation_defaults(tmp_path) == {}, "neutral values need no line"


def test_a_value_that_makes_no_sense_names_file_and_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json.*top_p.*ignore"):
        generation_defaults(write(tmp_path, top_p=7))


def test_greedy_requests_take_none_of_them() -> None:
    defaults = {"temperature": 0.7, "repetition_penalty": 1.05, "max_tokens": 99}
    assert with_defaults(defaults, {}, {"temperature": 0}) == {"temperature": 0, "max_tokens": 99}
    assert with_defaults(defaults, {"temperature": 0}, {}) == {"temperature": 0, "max_tokens": 99}
    assert with_defaults(defaults, {}, {"top_k": 3}) == {**defaults, "top_k": 3}
    assert with_defaults(defaults, {"temperature": 2}, {"max_tokens": 1}) == {
        "temperature": 2, "repetition_penalty": 1.05, "max_tokens": 1,
    }  # fmt: skip


def test_bodies_and_lines_take_them() -> None:
    defaults = {"temperature": 0.7, "repetition_penalty": 1.05}
    reader = RequestReader({"top_k": 9}, ("m",), True, model_defaults=defaults)
    body = {"prompt": "x"}
    assert reader.read(COMPLETIONS_URL, body).params == SamplingParams(top_k=9, **defaults)
    greedy = reader.read(COMPLETIONS_URL, {**body, "temperature": 0}).params
    assert greedy == SamplingParams(top_k=9, temperature=0)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    params = reader.read(CHAT_URL, chat).params
    assert params == SamplingParams(top_k=9, max_tokens=None, **defaults)

    options = JobOptions(Path("in"), Path("out"), {"top_k": 9}, defaults)
    lines = simple_lines(options)
    assert lines.parse(b'{"id": 1, "prompt": "x"}', 1).params == SamplingParams(top_k=9, **defaults)
    line = b'{"id": 1, "prompt": "x", "temperature": 0}'
    assert lines.parse(line, 1).params == SamplingParams(top_k=9, temperature=0)


def test_vllms_sampling_fields_in_bodies_and_lines() -> None:
    fields: dict[str, Any] = {
        "bad_words": ["no"], "allowed_token_ids": [1, 2], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "truncate_prompt_tokens": 7,
    }  # fmt: skip
    reader = RequestReader({}, ("m",), True)
    asked = reader.read(COMPLETIONS_URL, {"prompt": "x", **fields}).params
    assert asked == SamplingParams(**fields)
    line = json.dumps({"id": 1, "prompt": "x", **fields}).encode()
    assert simple_lines(JobOptions(Path("i"), Path("o"))).parse(line, 1).params == asked
