"""Texts in batch jobs: a model that can't read them says so before it is
loaded, and one that attacks stops no job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_jobs import Job, openai
from fake_llm import FakeLLM, model_dir
from small_tokenizers import byte_level
from tokenizers import Regex, pre_tokenizers

from fastdecode.core.errors import ConfigError
from fastdecode.jobs.manifest import Manifest
from fastdecode.jobs.opening import open_ordered_job
from fastdecode.jobs.options import JobOptions
from fastdecode.text.child import ChildDiedError
from fastdecode.text.codec import TextCodec

ATTACKS = (
    "{% if messages[0].content == 'attack' %}{{ '%10000000000d' % 1 }}{% endif %}{{ "
    "messages[0].content }}"
)


def chat(custom_id: str, content: str) -> str:
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 3,
        "return_token_ids": True,
    }
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line)


def test_one_line_that_attacks_is_answered_with_an_error_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    model = model_dir(tmp_path)
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(q+)+$"), "isolated"),
            pre_tokenizers.ByteLevel(use_regex=False),
        ]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(ATTACKS)
    job = Job(tmp_path, model)
    contents = {
        "a": "hello",
        "template": "attack",
        "b": "hello",
        "tokenizer": "q" * 99 + "!",
        "c": "hello",
    }
    job.write([chat(custom_id, content) for custom_id, content in contents.items()])
    llm = FakeLLM()
    llm.codec = TextCodec.load(model)
    result = job.run(llm)
    assert (result.num_done, result.num_failed) == (5, 2)
    said = job.said
    assert said["template"] == "chat_template_failed"
    assert said["tokenizer"] == "invalid_prompt"
    assert all(isinstance(said[custom_id], list) for custom_id in "abc")
    llm.codec.close()


@pytest.mark.parametrize(("content_format", "expected"), [("openai", "qq!"), ("string", "qq")])
def test_content_format_is_the_one_that_was_chosen(
    tmp_path: Path, content_format: str, expected: str
) -> None:
    model = model_dir(tmp_path)
    byte_level().save(str(model / "tokenizer.json"))
    source = (
        "{% set said = messages[0].content %}{% if said is string %}{{ said }}"
        "{% else %}{{ said[0].text }}!{% endif %}"
    )
    (model / "chat_template.jinja").write_text(source)
    job = Job(tmp_path, model)
    job.write([chat("a", "qq")])
    with job.open(chat_template_content_format=content_format, on_error="skip") as opened:
        template = opened._rules.template
        assert template is not None
        (asked,) = opened._lines.parse(job.input.read_bytes(), 1).prompts
        text = template.render(asked.messages, opened._rules.date, asked.how)  # type: ignore[union-attr]
    assert text == expected
    kept = json.loads(Manifest.path_for(job.output).read_text())["model"]
    assert kept["--chat-template-content-format"] == content_format


def test_line_whose_child_died_is_run_again(tmp_path: Path) -> None:
    job = Job(tmp_path, model_dir(tmp_path))
    job.write([openai("dies", prompt="text"), openai("bad", prompt=[5], temperature=-1)])
    byte_level().save(str(job.model / "tokenizer.json"))
    llm = FakeLLM(fail=lambda request: ChildDiedError("it broke off").as_request_error())
    result = job.run(llm, on_error="skip")
    assert (result.num_failed, result.num_bad) == (2, 1)
    (answer,) = [x for x in job.answers if x["custom_id"] == "dies"]
    assert answer["response"]["status_code"] == 500
    assert answer["response"]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("on_error", ["refuse", "skip"])
@pytest.mark.parametrize("bad", [[], ["{"]])
def test_a_batch_of_texts_without_a_tokenizer_is_refused_once(
    make_job: Callable[..., Job], on_error: str, bad: list[str]
) -> None:
    job = make_job(lines=[*(openai(str(i), prompt="text") for i in range(30)), *bad])
    with pytest.raises(ConfigError, match="30 are text") as caught:
        job.open(on_error=on_error)
    assert caught.value.code == "no_tokenizer"
    assert "\n" not in str(caught.value)
    assert not job.output.exists()


def test_texts_among_token_ids_are_bad_lines(make_job: Callable[..., Job]) -> None:
    job = make_job(lines=[openai("text", prompt="text"), openai("ids", prompt=[5])])
    with pytest.raises(ConfigError, match=r"1 of the 2 lines .*\n.*'text'.*no_tokenizer"):
        job.open()
    result = job.run(on_error="skip")
    assert (result.num_done, result.num_failed) == (2, 1)
    assert job.said["text"] == "no_tokenizer"


def test_generate_refuses_texts_that_no_tokenizer_reads(tmp_path: Path) -> None:
    model, path = model_dir(tmp_path), tmp_path / "in.jsonl"
    options = JobOptions(input=path, output=tmp_path / "out.jsonl", on_error="skip")

    def check(model: Path) -> None:
        open_ordered_job(options, model, lambda text: None)

    path.write_text('{"id": 1, "prompt": "a"}\nbad\n{"id": 2, "prompt": "b"}\n')
    with pytest.raises(ConfigError, match="2 are text") as caught:
        check(model)
    assert caught.value.code == "no_tokenizer"
    check(tmp_path / "no model")  # whose error is another
    path.write_text('{"id": 1, "prompt": "a"}\n{"id": 2, "prompt_token_ids": [1]}\n')
    check(model)
    path.write_text("bad\n")
    check(model)
    path.write_text('{"id": 1, "prompt": "a"}\n')
    byte_level().save(str(model / "tokenizer.json"))
    check(model)
