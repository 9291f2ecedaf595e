"""What goes in and what comes out: order, refusals that touch nobody else,
stops, limits, capacity."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models

from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main
from fastdecode.conversations.turns import Turn, TurnPrompter
from fastdecode.core.errors import CapacityError, ConfigError, ModelError, RequestError
from fastdecode.core.sequence import CacheUse, PromptRequest
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Chat
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import Vocabulary
from sworker.worker import SWorker

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama: str) -> Iterator[LLM]:
    with LLM(llama, dtype="float32", r_workers=2, r_threads=1, kv_memory_gb=0.01) as llm:
        yield llm


def test_eos_of_the_tokenizer_ends_a_text_beside_the_models_own(
    llm: LLM, llama: str, tmp_path: Path
) -> None:
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    tokens = output.completions[0].token_ids
    assert tokens[1] != tokens[0]
    model = shutil.copytree(llama, tmp_path / "model")
    (model / "generation_config.json").unlink()
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(211)}))
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"t{tokens[1]}"}))
    config = json.loads((model / "config.json").read_text())
    for eos in (None, 2):
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
        with LLM(str(model), dtype="float32", kv_memory_gb=0.01) as other:
            (output,) = other.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))
        assert output.completions[0].finish_reason == "stop"
        assert output.completions[0].token_ids[:2] == tokens[:2]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ("", "empty_prompt"),
        ([1, -1], "invalid_token_id"),
        ([1, 10**6], "invalid_token_id"),
        ([1, True], "invalid_token_id"),
        ([1, 2.5], "invalid_token_id"),
        ([5] * 100_000, "prompt_too_long"),
        (7, "invalid_prompt"),
        (b"bytes", "invalid_prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_its_neighbours_are_not(
    llm: LLM, prompt: object, code: str
) -> None:
    good = [5, 6, 7]
    first, bad, last = llm.generate([good, prompt, good], GREEDY)  # type: ignore[list-item]
    assert isinstance(bad.error, RequestError)
    assert bad.error.code == code
    assert bad.completions == ()
    assert first.completions == last.completions
    assert len(first.completions[0].token_ids) == 8
    with pytest.raises(RequestError):
        _ = bad.text


def test_text_needs_a_tokenizer(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.error is not None
    assert "tokenizer" in str(output.error)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": math.nan}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0},
        {"top_p": 1.5}, {"min_p": -0.1}, {"n": 0}, {"n": 10**9}, {"max_tokens": 0},
        {"max_tokens": -5}, {"max_tokens": 10**12}, {"max_tokens": 2.5}, {"min_tokens": 20},
        {"stop": [""]}, {"stop": [1]}, {"logit_bias": {"x": 1}}, {"logit_bias": {1: math.inf}},
        {"stop_token_ids": [-1]}, {"seed": 1.5}, {"logprobs": 10**6}, {"top_k": -2},
        {"temperature": 10**400}, {"logit_bias": {1: 10**400}}, {"logit_bias": {1.5: 1}},
        {"logit_bias": {math.inf: 1}}, {"seed": 10**5000}, {"repetition_penalty": 0},
        {"presence_penalty": math.nan}, {"ignore_eos": 1},
    ],
)  # fmt: skip
def test_bad_sampling_params_name_the_field(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_sampling_params"


def test_ids_beyond_the_vocabulary_are_refused(llm: LLM) -> None:
    outputs = llm.generate([[5], [5]], [SamplingParams(logit_bias={10**6: 1.0}), GREEDY])
    assert isinstance(outputs[0].error, RequestError)
    assert outputs[1].ok


def test_one_params_each_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts but 2"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1


def test_stop_token_ids_and_limits(llm: LLM) -> None:
    (free,) = llm.generate([[5, 6, 7]], GREEDY)
    tokens = free.completions[0].token_ids
    assert free.completions[0].finish_reason == "length"
    stop_at = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(tokens[stop_at],)
    )
    (stopped,) = llm.generate([[5, 6, 7]], params)
    assert stopped.completions[0].token_ids == tokens[: stop_at + 1]
    assert stopped.completions[0].finish_reason == "stop"


def test_generation_ends_at_the_models_limit(llama: str) -> None:
    with LLM(llama, dtype="float32", max_model_len=20, kv_memory_gb=0.01) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        outputs = llm.generate([[5] * 15, [5] * 19, [5] * 20], params)
    assert [len(o.completions[0].token_ids) for o in outputs[:2]] == [5, 1]
    assert outputs[0].completions[0].finish_reason == "length"
    assert outputs[2].error is not None
    assert outputs[2].error.code == "prompt_too_long"


def test_too_little_memory_is_a_refusal_and_a_queue(llama: str) -> None:
    """Few blocks: a request that can never fit is refused; those that fit one
    by one wait for each other."""
    with LLM(llama, dtype="float32", kv_memory_gb=0.01) as roomy:
        block_bytes = 0.01e9 / roomy.facts.num_kv_blocks
        expected = roomy.generate([[5, 6]] * 6, GREEDY)
    with LLM(llama, dtype="float32", kv_memory_gb=2.5 * block_bytes / 1e9) as tight:
        assert tight.facts.num_kv_blocks == 2
        outputs = tight.generate([[5, 6]] * 6, GREEDY)
        (big,) = tight.generate([[5, 6]], SamplingParams(max_tokens=140))
    assert [o.completions for o in outputs] == [o.completions for o in expected]
    assert isinstance(big.error, CapacityError)
    assert "kv_memory_gb" in str(big.error)


def test_stream_yields_as_requests_finish_and_survives_being_dropped(llm: LLM) -> None:
    def arrivals() -> Iterator[PromptRequest]:
        yield PromptRequest(
            "long", [5, 6, 7], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        )
        yield PromptRequest(
            "short", [5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )

    stream = llm.stream(arrivals())
    assert next(stream).request_id == "short"
    stream.close()  # "long" is forgotten, and its blocks are free again
    assert [o.request_id for o in llm.stream(arrivals())] == ["short", "long"]


def test_a_request_of_another_kind_is_refused(llm: LLM) -> None:
    requests: Any = [{"prompt": "a"}]
    with pytest.raises(ConfigError, match="PromptRequest objects, not dict"):
        list(llm.stream(requests))


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="r_workers"):
        LLM("model", r_workers=0)
    with pytest.raises(ConfigError, match="kv_dtype"):
        LLM("model", kv_dtype="int3")
    with pytest.raises(ConfigError, match="temperatur"):
        LLM("model", temperatur=1)
    with pytest.raises(ConfigError, match="max_step_tokens"):
        LLM("model", max_num_sequences=64, max_step_tokens=64)


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_an_absent_device_is_named(llama: str) -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        LLM(llama, device="cuda:99")
    with pytest.raises(ConfigError, match="abacus"):
        LLM(llama, device="abacus")


def test_one_stream_at_a_time(llm: LLM) -> None:
    stream = llm.stream([PromptRequest("a", [5, 6], GREEDY), PromptRequest("b", [7], GREEDY)])
    next(stream)
    with pytest.raises(ConfigError, match="still being read"):
        llm.generate([[5]], GREEDY)
    assert len(list(stream)) == 1
    assert llm.generate([[5]], GREEDY)[0].ok


def test_a_closed_llm_says_so(llama: str) -> None:
    llm = LLM(llama, dtype="float32", kv_memory_gb=0.01)
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params"), [(None, GREEDY), ([[3]], [None]), ([[3]], {"temperature": 0})]
)
def test_arguments_of_other_types_are_refused(llm: LLM, prompts: object, params: object) -> None:
    with pytest.raises(RequestError, match="must be"):
        llm.generate(prompts, params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("out of memory"),
        RuntimeError("DefaultCPUAllocator: out of memory"),
    ],
    ids=repr,
)
def test_an_s_worker_that_fails_answers_every_request(error: RuntimeError, llama: str) -> None:
    with LLM(llama, dtype="float32", kv_memory_gb=0.01) as llm:
        with mock.patch.object(SWorker, "drawn", side_effect=error):
            outputs = llm.generate([[5], [6, 7]], GREEDY)
        (later,) = llm.generate([[5]], GREEDY)
    assert [str(output.error) for output in (*outputs, later)] == [
        f"the S-worker failed: {error}"
    ] * 3
    assert {output.error.code for output in outputs if output.error} == {"s_worker_failed"}


def test_a_request_id_that_stands_twice_is_refused(llm: LLM) -> None:
    twice = [
        PromptRequest("a", [5, 6], GREEDY),
        PromptRequest("a", [7], GREEDY),
        PromptRequest("b", [8], GREEDY),
    ]
    refused, *others = llm.stream(twice)
    assert isinstance(refused.error, RequestError)
    assert refused.error.code == "duplicate_id"
    assert "'a'" in str(refused.error)
    assert refused.prompt_token_ids == (7,)
    assert sorted((output.request_id, output.ok) for output in others) == [("a", True), ("b", True)]
    (again,) = llm.stream([PromptRequest("a", [7], GREEDY)])  # the first one is over
    assert again.ok


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
    codec = TextCodec(None)
    with closing(ChatTemplate("{{ messages }}", "here", {})) as template:
        chat = TurnPrompter(Chat(()), codec, template)
        with pytest.raises(RequestError, match="next turn needs the text") as refused:
            Turn("0", "a", chat, SamplingParams(detokenize=False))
        assert Turn("0", "a", chat, SamplingParams())
    assert refused.value.code == "invalid_conversation"
    assert Turn("0", "a", TurnPrompter("Hello", codec), SamplingParams(detokenize=False))


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


ONE = SamplingParams(temperature=0, max_tokens=1)


def test_in_python(llama: str) -> None:
    options: dict[str, Any] = {"kv_memory_gb": 0.01, "r_threads": 1, "dtype": "float32"}
    with LLM(llama, prefix_cache="off", **options) as llm:
        with pytest.warns(UserWarning, match="conversation_id.*prefix_cache is off") as found:
            llm.generate([1, 2], ONE, conversation_id="c")
        assert found[0].filename == __file__, "it points at the user's line"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.generate([1, 2], ONE)
    with LLM(llama, **options) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([1, 2], ONE, conversation_id="c")
        with pytest.raises(UserWarning, match="this request's cache is off"):
            llm.generate([1], ONE, conversation_id="c", cache=CacheUse(is_off=True))
