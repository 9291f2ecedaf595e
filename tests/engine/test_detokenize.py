"""Token ids alone: no text is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main
from fastdecode.core.errors import RequestError
from fastdecode.text.detokenizer import Vocabulary

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "model" / "checkpoint"
PROMPT = "Gusster was a pony, and Gusster belonged to Melor."


def test_no_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(CHECKPOINT), r_threads=1, kv_memory_gb=0.01) as llm:
        (with_text,) = llm.generate(PROMPT, SamplingParams(seed=3, max_tokens=12))
        asked: list[object] = []
        for name in ("text", "token", "byte_level_bytes", "fallback_byte"):
            monkeypatch.setattr(Vocabulary, name, lambda self, ids: asked.append(ids))
        (without,) = llm.generate(
            PROMPT, SamplingParams(seed=3, max_tokens=12, detokenize=False, logprobs=1)
        )
    assert with_text.text and without.text == ""
    assert without.completions[0].token_ids == with_text.completions[0].token_ids
    assert without.completions[0].logprobs is not None
    assert not asked


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match=r"detokenize.*stop strings.*stop_token_ids") as refused:
        SamplingParams(stop=("x",), detokenize=False)
    assert refused.value.code == "invalid_sampling_params"
    with pytest.raises(RequestError, match="must be true or false"):
        SamplingParams(detokenize=1)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=(3,), detokenize=False).stop_token_ids == (3,)


def test_a_chat_turn_needs_the_text_of_its_answer() -> None:
    with LLM(str(CHECKPOINT), r_threads=1, kv_memory_gb=0.01) as llm:
        with pytest.raises(RequestError, match="next turn needs the text") as refused:
            llm.chat(
                [{"role": "user", "content": "Hello"}],
                SamplingParams(detokenize=False),
                conversation_id="a",
            )
    assert refused.value.code == "invalid_conversation"


def test_lines_and_the_option_say_it(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt": PROMPT},
        {"id": "b", "prompt": PROMPT, "detokenize": True},
        {"id": "c", "prompt": PROMPT, "stop": ["."]},
    ]
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--no-detokenize", "--temperature", "0", "--max-tokens", "8", "--r-threads", "1"]
    files = ["--input", str(given), "--output", str(answers)]
    assert main(["generate", "--model", str(CHECKPOINT), *files, *options]) == 3
    a, b, c = map(json.loads, answers.read_text().splitlines())
    assert a["text"] == "" and b["text"] and a["token_ids"] == b["token_ids"]
    assert c["error"]["code"] == "invalid_sampling_params"
    assert "stop_token_ids" in c["error"]["message"]
