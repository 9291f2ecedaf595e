"""Answers are what they were asked to be, whatever runs them and whatever is lost."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
pytest.importorskip("jsonschema", reason="needs the extra 'test'")

import jsonschema
from checkpoints import save_checkpoint
from random_schemas import regex, schema
from small_tokenizers import byte_level
from trouble import crash_after

from examples import TRIES_ALL, examples
from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import Completion

MAX_TOKENS = 480
EOS = 1
OPTIONS: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.02}


def save_model(directory: Path) -> str:
    """A random model whose tokens are bytes and a few longer ones."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    save_checkpoint(directory, "llama", {"vocab_size": size + 5, "eos_token_id": EOS})
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


@dataclass(frozen=True)
class Asked:
    """One request."""

    structured: dict[str, Any]
    params: SamplingParams

    def check(self, completion: Completion) -> None:
        """The answer is whole, and what was asked."""
        assert completion.finish_reason == "stop", (self.structured, completion.text)
        (kind, wanted), text = next(iter(self.structured.items())), completion.text
        if kind == "json":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(wanted, format_checker=checker).validate(
                json.loads(text)
            )
        else:
            assert re.fullmatch(wanted, text), (wanted, text)


def random_asked(num_schemas: int, num_regexes: int, first: int = 0) -> list[Asked]:
    """Greedy and sampled; some with several completions, logprobs, penalties."""
    wanted: list[dict[str, Any]] = []
    wanted += [{"json": schema(random.Random(first + i))} for i in range(num_schemas)]
    wanted += [{"regex": regex(random.Random(first + i))} for i in range(num_regexes)]
    return [Asked(each, _params(each, random.Random(i))) for i, each in enumerate(wanted)]


def _params(structured: dict[str, Any], rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.7, 1.0]),
        seed=rng.randrange(1 << 30),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=rng.choice([None, None, 2]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.2]),
        max_tokens=MAX_TOKENS,
        structured_outputs=structured,  # type: ignore[arg-type]  # as a line gives it
    )


def prompts_of(asked: list[Asked]) -> list[list[int]]:
    """Random ones."""
    rng = random.Random(1)
    return [[rng.randrange(2, 300) for _ in range(rng.randint(1, 20))] for _ in asked]


def run(llm: LLM, asked: list[Asked]) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens; every answer is what it must be."""
    outputs = llm.generate(prompts_of(asked), [each.params for each in asked])
    for each, output in zip(asked, outputs, strict=True):
        assert output.ok, (each.structured, output.error)
        for completion in output.completions:
            each.check(completion)
    return [[each.token_ids for each in output.completions] for output in outputs]


NUM_SCHEMAS, NUM_REGEXES = examples(500, share=12), examples(100, share=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("structured"))


@pytest.fixture(scope="module")
def expected(model: str) -> Any:
    """What one R-worker says, none of which is lost."""
    with LLM(model, **OPTIONS) as llm:
        return run(llm, random_asked(NUM_SCHEMAS, NUM_REGEXES))


PLACEMENTS: list[dict[str, Any]] = [
    {"r_workers": 2, "lanes": 2, "prefill_chunk": 8},
    {"pp": 2, "lanes": 2},
    {"instances": ["prefill", "decode", "decode"]},
]
MORE_PLACEMENTS: list[dict[str, Any]] = [
    {"r_workers": 2, "pp": 3, "pp_layers": "1,1,1", "lanes": 4},
    {"kv_placement": "gpu"},
    {"kv_placement": "hybrid", "device_kv_gb": 0.004},
    {"instances": ["prefill", "prefill", "decode"], "r_workers": 2},
    {"max_num_sequences": 5},
    {"kv_memory_gb": 0.002},
]


@pytest.mark.parametrize("placement", PLACEMENTS + MORE_PLACEMENTS * TRIES_ALL, ids=str)
def test_answers_are_the_same_in_every_placement(
    placement: dict[str, Any], model: str, expected: Any
) -> None:
    with LLM(model, **{**OPTIONS, **placement}) as llm:
        assert run(llm, random_asked(NUM_SCHEMAS, NUM_REGEXES)) == expected


LOSSES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"r1": 40, "r2": 90}, {"r_workers": 3, "lanes": 2})
]
MORE_LOSSES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"s1-r1": 300}, {"pp": 2, "r_workers": 2, "lanes": 2}),
    ({"r1": 200, "r0": 900}, {"r_workers": 4, "lanes": 2}),
]


@pytest.mark.parametrize(("lost", "placement"), LOSSES + MORE_LOSSES * TRIES_ALL, ids=str)
def test_answers_are_the_same_after_losses(
    lost: dict[str, int],
    placement: dict[str, Any],
    model: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash_after(monkeypatch, lost)
    with LLM(model, **{**OPTIONS, **placement}) as llm:
        assert run(llm, random_asked(NUM_SCHEMAS, NUM_REGEXES)) == expected
        assert llm.stats.num_recomputed


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as llm:
        yield llm


def asked(structured: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 1, "structured_outputs": structured, **more})


def test_a_bad_schema_is_refused_and_the_others_are_answered(llm: LLM) -> None:
    params = [asked({"choice": ["yes", "no"]}), asked({"json": {"type": "objct"}})]
    good, bad = llm.generate([[5, 6], [7]], params[:2])
    assert good.text in ("yes", "no") and good.completions[0].finish_reason == "stop"
    assert bad.error is not None and bad.error.code == "invalid_structured_outputs"


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}"
    "<tool_call>{% endif %}{% if thinking %}<think>{% else %}</think>{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Wien", "Graz"]}},
    "required": ["city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}


def test_a_chat_gives_calls(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    params = SamplingParams(max_tokens=300, seed=2, n=2)
    (output,) = llm.chat(
        [{"role": "user", "content": "x"}],
        params,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        chat_template=TEMPLATE,
    )
    ids = []
    for one in output.completions:
        assert one.finish_reason == "stop" and one.content is None and len(one.tool_calls) == 1
        for call in one.tool_calls:
            ids.append(call.id)
            assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Wien", "Graz")
            assert call.arguments.replace(" ", "") in one.text
    assert len(set(ids)) == len(ids)


def test_a_chat_has_ids_of_calls_as_its_template_takes_them(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.id }}{% endfor %}{% endfor %}"
    )
    call = {"id": "a-long-id-123456789", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a-long-id-123456789", "content": "4"},
    ]
    for more in ({}, {"conversation_id": "ids"}):
        (output,) = llm.chat(chat, SamplingParams(max_tokens=1), chat_template=template, **more)
        assert llm.codec.decode(output.prompt_token_ids) == "[TOOL_CALLS]1234567894123456789"


def test_structured_output_follows_the_reasoning(llm: LLM) -> None:
    thought = llm.codec.encode("ba</think>\n", add_special_tokens=False)

    def think(token_ids: Sequence[int], logits: Any) -> Any:
        if len(token_ids) < len(thought):
            logits[thought[len(token_ids)]] = 1e4
        return logits

    params = asked({"regex": "[ab]c"}, logits_processors=[think])
    (output,) = llm.chat(
        [{"role": "user", "content": "x"}], params, chat_template=TEMPLATE,
        variables={"thinking": True},
    )  # fmt: skip
    (one,) = output.completions
    assert one.reasoning_content == "ba" and one.content in ("ac", "bc")
    assert one.finish_reason == "stop"


def test_masked_tokens_have_no_logprobs(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6]], asked({"regex": "[ab]c"}, logprobs=100))
    steps = output.completions[0].logprobs
    assert steps is not None and len(output.text) == 2
    for step in steps:
        assert step.token_id in [token for token, _ in step.top] and len(step.top) < 30


def test_other_masks_hold_beside_the_grammar(llm: LLM) -> None:
    encode = llm.codec.encode
    (digit,) = encode("7", add_special_tokens=False)
    (output,) = llm.generate([[5]], asked({"regex": "[0-9]{3}"}, allowed_token_ids=[digit]))
    assert output.text == "777"
    (output,) = llm.generate([[5]], asked({"regex": "[0-9]"}, allowed_token_ids=encode("x")))
    assert output.error is not None and output.error.code == "no_token_left"
