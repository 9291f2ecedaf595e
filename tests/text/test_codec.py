"""The tokenizer wrapper, the incremental detokenizers against decoding at once,
and stop strings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    BYTE_TOKENS,
    LINES,
    TOKENIZERS,
    byte_ids,
    byte_level,
    id_of,
    kinds,
    with_text,
)
from tokenizers import Tokenizer, models, processors

from examples import examples
from fastdecode.core.errors import CheckpointError, MissingExtraError, RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import ByteLevelDetokenizer, Vocabulary, detokenizer_for


def pieces_of(kind: str, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = detokenizer_for(Vocabulary(TOKENIZERS[kind]), prompt)
    return [*map(detokenizer.append, token_ids), detokenizer.flush()]


# --- detokenizers
# ------------------------------------------------------------------------------


@kinds
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_make_the_text_of_all(kind: str, data: st.DataObject) -> None:
    # Beyond the vocabulary too: models are padded, and tokenizers know fewer ids.
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[kind].get_vocab_size() + 3), max_size=40))
    assert "".join(pieces_of(kind, ids)) == TOKENIZERS[kind].decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_runs_of_bytes_valid_and_not(kind: str, data: st.DataObject) -> None:
    tokenizer, of_byte = TOKENIZERS[kind], byte_ids(kind)
    parts = st.one_of(
        st.text(max_size=4).map(lambda text: text.encode(errors="ignore")),
        st.binary(max_size=4),
        st.sampled_from(
            [b"\xf0\x9f\x98", b"\xe4\xbd", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90", b"\xef\xbf\xbd"]
        ),
    )
    others = st.sampled_from([id_of(tokenizer, x) for x in ("a", "</s>")])
    ids: list[int] = []
    for part in data.draw(st.lists(st.one_of(parts, others), max_size=8)):
        ids += [of_byte[byte] for byte in part] if isinstance(part, bytes) else [part]
    assert "".join(pieces_of(kind, ids)) == tokenizer.decode(ids)


@with_text
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.sampled_from("ab é你😀\n."), max_size=30))
def test_no_piece_of_sound_text_is_broken(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    pieces = pieces_of(kind, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TOKENIZERS[kind].decode(ids)


@settings(max_examples=examples(200), deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZERS["byte-level"].get_vocab_size() - 1), max_size=30))
def test_byte_level_text_lags_by_no_more_than_part_of_a_character(ids: list[int]) -> None:
    detokenizer = ByteLevelDetokenizer(Vocabulary(TOKENIZERS["byte-level"]))
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.append(token)
        whole = TOKENIZERS["byte-level"].decode(ids[:count])
        assert whole.startswith(text) and len(whole) <= len(text) + 3  # of at most three bytes


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_a_byte_run_shows_when_it_ends(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [
        id_of(tokenizer, x) for x in ("▁The", "<0xE4>", "<0xBD>", "<0xA0>", "<0xC3>", "<0xA9>", "a")
    ]
    first = " The" if kind == "gemma" else "The"
    assert pieces_of(kind, ids) == [first, "", "", "", "", "", "你éa", ""]
    assert pieces_of(kind, ids[:-1])[-1] == "你é"
    # As the library decodes a run with a broken end.
    assert pieces_of(kind, ids[:-2])[-1] == "\ufffd" * 4


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "wordpiece"])
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_output_continues_the_text_of_its_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    sound = [
        i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) not in BYTE_TOKENS
    ]
    prompt = data.draw(st.lists(st.sampled_from(sound), min_size=1, max_size=10))
    output = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    if all(tokenizer.decode([token]) == "" for token in prompt):
        # Then the output begins the text, and how much of its space is dropped
        # hangs on the decoder.
        return
    whole = tokenizer.decode(prompt + output)
    assert "".join(pieces_of(kind, output, prompt)) == whole[len(tokenizer.decode(prompt)) :]


def test_the_space_before_the_first_word_is_kept() -> None:
    tokenizer = TOKENIZERS["llama"]
    codec = TextCodec(tokenizer)
    token = id_of(tokenizer, "▁brown")
    for prompt, expected in (((), "brown"), ((id_of(tokenizer, "▁quick"),), " brown")):
        text = codec.sequence_text(SamplingParams(), prompt)
        text.append(token)
        assert text.finish() == expected


@kinds
def test_the_cost_of_a_token_does_not_grow(kind: str) -> None:
    decoded: list[int] = []

    class Spy(Vocabulary):
        def text(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().text(token_ids)

    tokenizer = TOKENIZERS[kind]
    ids = [i % tokenizer.get_vocab_size() for i in range(7, 3000, 13)] * 3
    ids += [*Vocabulary(tokenizer).skipped, 10_000] * 300 + ids  # those without text come between
    detokenizer = detokenizer_for(Spy(tokenizer))
    for token in ids:
        detokenizer.append(token)
    if not isinstance(detokenizer, ByteLevelDetokenizer):
        assert sum(decoded) < 8 * len(ids)


# --- the codec
# ------------------------------------------------------------------------------


def save(tokenizer: Tokenizer, folder: Path, config: Any = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_encode_and_decode(tmp_path: Path) -> None:
    codec = TextCodec.load(save(byte_level(), tmp_path))
    for line in LINES:
        assert codec.decode(codec.encode(line)) == line
    assert codec.decode([0, *codec.encode("a"), 1, 99_999]) == "a"


@pytest.mark.parametrize("template", [None, "$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("tokenizer_class", [None, "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, tokenizer_class: str | None, add_bos: bool | None, template: str | None
) -> None:
    """Only tokenizer.json adds special tokens: add_bos_token is ignored."""
    tokenizer = byte_level()
    if template is not None:
        special_tokens = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special_tokens
        )
    given = {"tokenizer_class": tokenizer_class, "add_bos_token": add_bos}
    config = {name: value for name, value in given.items() if value is not None}
    save(tokenizer, tmp_path, {**config, "bos_token": "<s>", "eos_token": "</s>"})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = TextCodec.load(tmp_path)
    for text in ("the end", "<s>the end", "", "<s><s>The quick</s>"):
        for add_special_tokens in (True, False):
            expected = theirs(text, add_special_tokens=add_special_tokens).input_ids
            assert ours.encode(text, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize(
    ("config", "eos_token_id"),
    [
        ({"eos_token": "</s>"}, 1),
        ({"eos_token": {"content": "</s>", "special": True}}, 1),
        ({"eos_token": "<nowhere>"}, None),
        ({"eos_token": None}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_eos_of_the_tokenizers_config(
    tmp_path: Path, config: Any, eos_token_id: int | None
) -> None:
    assert TextCodec.load(save(byte_level(), tmp_path, config)).eos_token_id == eos_token_id


def test_saved_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode(LINES[0]).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    assert TextCodec.load(save(tokenizer, tmp_path)).encode(LINES[0]) == expected


def test_a_directory_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    codec = TextCodec.load(tmp_path)
    assert codec.vocabulary is None
    with pytest.raises(RequestError, match=r"no tokenizer.json: give prompt_token_ids") as refused:
        codec.encode("Hello")
    assert refused.value.code == "no_tokenizer"
    with pytest.raises(RequestError, match="stop strings need text"):
        codec.sequence_text(SamplingParams(stop=("x",)))
    text = codec.sequence_text(SamplingParams(), (1, 2))
    assert not text.append(3)
    assert text.finish() == codec.decode([3]) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", each) for each in ("", "{", "[]", '{"version": "1.0"}', "\x00\x01")),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", '{"add_bos_token": tr'),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (save(byte_level(), tmp_path) / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        TextCodec.load(tmp_path)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(byte_level(), tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"\[sworker\]"):
        TextCodec.load(tmp_path)


def test_prompts_that_cannot_be_encoded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="character 2") as refused:
        TextCodec.load(save(byte_level(), tmp_path)).encode("ab\ud83d")
    assert refused.value.code == "invalid_prompt"
    words = save(Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")), tmp_path)
    with pytest.raises(RequestError, match="can't encode the prompt"):
        TextCodec.load(words).encode("b")
