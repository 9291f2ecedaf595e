"""Model directories made to hang, to fill the memory or to crash: each is one
error that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
from small_tokenizers import byte_level
from tokenizers import Regex, Tokenizer, pre_tokenizers

from fastdecode.core.errors import CheckpointError, RequestError
from fastdecode.core.model.files import read_model_file
from fastdecode.jobs.manifest import identify_model
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.child import LimitedChild, Limits
from fastdecode.text.codec import TextCodec

LIMITS = Limits(memory_bytes=512 << 20, cpu_s=1, open_cpu_s=1, slowness=30)
NOW = datetime(2026, 2, 3)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (LOOP, "more than 1 s"),
        ("{{ '%10000000000d' % 1 }}", "memory"),
        ("{{ 'x' * 10000000000 }}", "memory"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not a Jinja template"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "not a Jinja template"),
    ],
)
def test_a_template_that_attacks_is_refused_at_once(source: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=r"dir/chat_template\.jinja") as caught:
        ChatTemplate(source, "dir/chat_template.jinja", {}, LIMITS)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("{{ '%10000000000d' % 1 }}", "memory"),
        ("{{ again() }}", "recursion"),
        (LOOP, "more than 1 s"),
    ],
)
def test_one_that_attacks_later_costs_that_conversation_only(
    attack: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    again = "{% macro again() %}{{ again() }}{% endmacro %}"
    source = f"{again}{{% if messages[0].content == 'now' %}}{attack}{{% endif %}}fine"
    template = ChatTemplate(source, "/its/path", {}, LIMITS)
    for content in ("a", "now", "b"):
        messages = [{"role": "user", "content": content}]
        if content != "now":
            assert template.render(messages, NOW) == "fine"
            continue
        with pytest.raises(RequestError, match=why) as caught:
            template.render(messages, NOW)
        assert caught.value.code == "chat_template_failed"
        assert ("/its/path" in caplog.text) is (why != "recursion")
        assert "/its/path" not in str(caught.value)
    template.close()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


MADE: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "huge": huge,
    "nested": lambda path: path.write_text("[" * 100_000),
    "directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
)
def test_files_that_never_end_are_refused(tmp_path: Path, name: str, make: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    MADE[make](tmp_path / name)
    readers: list[Callable[[Path], object]] = []
    if name != "tokenizer.json" and (name, make) != ("chat_template.jinja", "nested"):
        readers.append(ChatTemplate.load)
    if name in ("tokenizer.json", "tokenizer_config.json"):
        readers.append(TextCodec.load)
    if make != "nested" and name != "tokenizer.json":
        readers.append(identify_model)
    for read in readers:
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path)


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert read_model_file(tmp_path / "x", 4) == b"1234"
    with pytest.raises(CheckpointError, match="more than 3 bytes"):
        read_model_file(tmp_path / "x", 3)


def splitting(pattern: str) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(use_regex=False),
        ]
    )
    return tokenizer


def swelling(part: str, letter: str) -> str:
    """A tokenizer.json that makes 10^12 letters of one. Not by the library,
    which would try it at once."""
    content = json.loads(byte_level().to_str())
    step = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 1000}
    content[part] = {"type": "Sequence", f"{part}s": [step] * 4}
    return json.dumps(content)


def save(tokenizer: Tokenizer | str, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer if isinstance(tokenizer, str) else tokenizer.to_str())
    return folder


@pytest.mark.parametrize(
    "tokenizer", [splitting("(a+)+$"), swelling("normalizer", "o"), swelling("decoder", "e")]
)
def test_a_tokenizer_that_attacks_is_refused_before_it_is_loaded_here(
    tmp_path: Path, tokenizer: Tokenizer | str
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        TextCodec.load(save(tokenizer, tmp_path), limits=LIMITS)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("tokenizer", [splitting("(q+)+$"), swelling("normalizer", "q")])
def test_one_that_attacks_later_costs_that_prompt_only(
    tmp_path: Path, tokenizer: Tokenizer | str
) -> None:
    encoder = TextCodec.load(save(tokenizer, tmp_path), limits=LIMITS)
    for text in ("The end.", "q" * 99 + "!", "The end."):
        if text == "The end.":
            assert encoder.encode(text, add_special_tokens=False)
            continue
        with pytest.raises(RequestError, match="give prompt_token_ids") as caught:
            encoder.encode(text, add_special_tokens=False)
        assert caught.value.code == "invalid_prompt"
    encoder.close()


def test_a_panic_of_the_library_is_an_answer(tmp_path: Path) -> None:
    encoder = TextCodec.load(save(splitting(LLAMA_3), tmp_path))
    with pytest.raises(RequestError, match="PanicException") as caught:
        encoder.encode(" " * 12_000_000 + "a", add_special_tokens=False)
    assert caught.value.code == "invalid_prompt"
    assert encoder.encode("a", add_special_tokens=False)
    encoder.close()


@pytest.mark.parametrize("letter", ["x1 ", "é", "你"])
def test_a_text_that_could_never_fit_is_not_encoded(letter: str, tmp_path: Path) -> None:
    encoder = TextCodec.load(save(splitting(LLAMA_3), tmp_path), max_model_len=4)
    real = LimitedChild.ask
    with mock.patch.object(LimitedChild, "ask", autospec=True, side_effect=real) as ask:
        with pytest.raises(
            RequestError, match="this model's maximum context length is 4"
        ) as caught:
            encoder.encode(letter * 1_000_000, add_special_tokens=False)
        assert caught.value.code == "prompt_too_long"
        ((_, question),) = [call.args for call in ask.call_args_list]
        assert len(question["sequence"]) == 128
    encoder.close()


def test_blanks_that_may_fit_are_encoded(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([" " * 128])
    encoder = TextCodec.load(save(tokenizer, tmp_path), max_model_len=4)
    assert len(encoder.encode(" " * 1024, add_special_tokens=False)) == 8
    encoder.close()
