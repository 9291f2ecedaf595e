"""Answers are what they were asked to be, whatever runs them and whatever is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
pytest.importorskip("jsonschema", reason="needs the extra 'test'")

from mpi_launch import mpirun, needs_mpi
from mpi_launch import run as mpi_run
from structured_runs import OPTIONS, check_lines, random_asked, run, save_model, write_lines
from trouble import crash_after

from examples import TRIES_ALL, examples
from fastdecode import LLM, SamplingParams

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


@needs_mpi
@pytest.mark.skipif(not TRIES_ALL, reason="is run by make campaign")
def test_answers_of_two_s_workers_that_act_as_one(model: str, tmp_path: Path) -> None:
    asked = random_asked(NUM_SCHEMAS, NUM_REGEXES)
    write_lines(tmp_path / "in.jsonl", asked)
    generate = ["generate", "--model", model, "--dtype", "float32", "--tp", "2"]
    generate += ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    fastdecode = [sys.executable, "-m", "fastdecode.cli.main"]
    ranks = [*mpirun(2), *fastdecode, *generate, ":"]
    outcome = mpi_run(
        [*ranks, "-n", "2", *fastdecode, "r-worker", "--kv-memory-gb", "0.02"], timeout_s=300
    )
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    check_lines(tmp_path / "out.jsonl", asked)


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
