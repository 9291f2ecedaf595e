"""What a model directory's files say of its tokens, against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import byte_level

from fastdecode.core.errors import CheckpointError
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.codec import TextCodec
from fastdecode.text.tokenizer_files import TokenizerFiles

N = byte_level().get_vocab_size()
TEXT = "<|im_start|>user\nhi<|im_end|> <tool> x"
ADDED = {"<|im_start|>": N, "<|im_end|>": N + 1, "<tool>": N + 2}


def token(content: str, special: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": special, **off}


DECODER = {str(each): token(name, name != "<tool>") for name, each in ADDED.items()}
PLAIN = {each: {**row, "special": False} for each, row in DECODER.items()}


def in_json(special: bool) -> list[dict[str, Any]]:
    return [{"id": each, **token(name, special)} for name, each in ADDED.items()]


CASES: dict[str, dict[str, Any]] = {
    "tokenizer.json alone": {"json": in_json(special=True)},
    "nothing added": {},
    "added_tokens_decoder": {"config": {"added_tokens_decoder": DECODER}},
    "its EOS is not special": {
        "config": {"added_tokens_decoder": PLAIN, "eos_token": "<|im_end|>"}
    },
    "added_tokens.json": {"added": ADDED, "config": {"eos_token": "<|im_end|>"}},
    "special_tokens_map.json": {
        "added": ADDED, "map": {"eos_token": token("<|im_end|>", True), "pad_token": "<tool>"}
    },
    "the newer file counts": {
        "added": {"<old>": N}, "config": {"added_tokens_decoder": DECODER}
    },
    "tokenizer.json flags none": {"json": in_json(special=False)},
    "a name is special": {
        "json": in_json(special=False), "config": {"eos_token": "<|im_end|>"}
    },
    "the config flags them": {
        "json": in_json(special=False), "config": {"added_tokens_decoder": DECODER}
    },
    "no flag is taken back": {
        "json": in_json(special=True), "config": {"added_tokens_decoder": PLAIN}
    },
    "older files don't override": {"json": in_json(special=True), "added": ADDED},
    "a word of the vocabulary is EOS": {"config": {"eos_token": "s"}},
}  # fmt: skip


def write(folder: Path, case: dict[str, Any]) -> Path:
    tree = json.loads(byte_level().to_str())
    tree["added_tokens"] += case.get("json", [])
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **case.get("config", {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, content in (("added_tokens", "added"), ("special_tokens_map", "map")):
        if content in case:
            (folder / f"{name}.json").write_text(json.dumps(case[content]))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_flags_equal_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(write(tmp_path, CASES[name]))
    codec = TextCodec.load(tmp_path)
    ids = codec.encode(TEXT)
    codec.close()
    assert ids == oracle.encode(TEXT)
    assert codec.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    whole = SamplingParams(skip_special_tokens=False)
    vocabulary = codec.vocabulary_of(whole)
    assert vocabulary is not None and vocabulary.text(ids) == oracle.decode(ids)
    assert codec.eos_token_id == oracle.eos_token_id
    assert TokenizerFiles.read(tmp_path).special_ids() == codec.special_tokens


def test_names_and_ids_without_tokens_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gap = {str(N + 5): token("<late>", True)}
    config = {"eos_token": "<|nowhere|>", "added_tokens_decoder": gap}
    with caplog.at_level(logging.WARNING):
        codec = TextCodec.load(write(tmp_path, {"config": config}))
    codec.close()
    assert codec.eos_token_id is None
    assert "'<|nowhere|>' as eos_token" in caplog.text
    assert f"'<late>' has the id {N} there, and {N + 5} in" in caplog.text


@pytest.mark.parametrize(
    "rows", [5, [1], {"x": token("a", True)}, {"1": "a"}, {"1": {}}, {"1": token("", True)}]
)
def test_added_tokens_that_are_none_are_refused(rows: Any, tmp_path: Path) -> None:
    write(tmp_path, {"config": {"added_tokens_decoder": rows}})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has added tokens"):
        TokenizerFiles.read(tmp_path)
