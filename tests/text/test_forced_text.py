"""Text that a grammar forces has the tokens that the model's tokenizer gives it."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from small_tokenizers import CALL_LINE, JSON_TOKENIZERS, KEYS, codec_of, id_of, json_byte_level
from tokenizers import Tokenizer

from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import GrammarMasks, GrammarState
from fastdecode.text.lark import calls_rules
from fastdecode.text.tools import TOOL_FORMATS

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
kinds = pytest.mark.parametrize("kind", JSON_TOKENIZERS)
EOS = 1
BEGINS_WITH_A_BLANK = ("llama", "metaspace", "unigram")
"""Their tokenizers write a blank before a text: what follows a blank is encoded without it."""


def usual_ids(kind: str, text: str) -> list[int]:
    said = text.removeprefix(" ") if kind in BEGINS_WITH_A_BLANK else text
    ids: list[int] = JSON_TOKENIZERS[kind].encode(said, add_special_tokens=False).ids
    return ids


def allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def masks_of(codec: TextCodec) -> GrammarMasks:
    assert codec.vocabulary is not None
    return GrammarMasks(codec, codec.vocabulary.tokenizer.get_vocab_size(), (EOS,))


def num_steps(kind: str, wanted: StructuredOutputs, ids: list[int]) -> int:
    """Tokens of a model that wants to write a text with these, as far as it may: then it takes
    the longest token that may come."""
    tokenizer = JSON_TOKENIZERS[kind]
    masks = masks_of(codec_of(tokenizer))
    texts = [token.encode() for token in masks_texts(tokenizer)]
    state, steps = masks.state(wanted), 0
    todo = b"".join(texts[token] for token in ids)
    while todo:
        may = allowed(state)
        if ids and ids[0] in may:
            token = ids[0]
        else:
            token = max(
                (each for each in may if texts[each] and todo.startswith(texts[each])),
                key=lambda each: len(texts[each]),
            )
        todo = todo[len(texts[token]) :]
        ids = ids[1:] if ids and token == ids[0] else []
        state.observe(token)
        steps += 1
    masks.close()
    return steps


def masks_texts(tokenizer: Tokenizer) -> list[str]:
    tokens = [tokenizer.id_to_token(each) or "" for each in range(tokenizer.get_vocab_size())]
    return [token.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n") for token in tokens]


@kinds
@pytest.mark.parametrize(
    "text",
    [
        " The quick brown fox jumped over 3 lazy dogs",
        ' {"name": "city name", "is_open": [12, 3.5, true, null]}',
        " naïve café owner in Zürich",
    ],
)
def test_forced_text_has_the_ids_of_the_tokenizer(kind: str, text: str) -> None:
    masks = masks_of(codec_of(JSON_TOKENIZERS[kind]))
    state = masks.state(StructuredOutputs(regex=re.escape(text)))
    for token in usual_ids(kind, text):
        assert allowed(state) == {token}
        state.observe(token)
    assert state.is_complete
    masks.close()


ANSWER = {
    "name": "The quick", "city": "Zürich", "country": "Austria", "temperature": 12.5,
    "is_open": True, "tags": ["brown", "fox"], "words": "Once upon a time",
}  # fmt: skip
TYPES: dict[str, Any] = {key: {"type": "string"} for key in KEYS} | {
    "country": {"enum": ["Austria", "Zürich"]},
    "temperature": {"type": "number"},
    "is_open": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = {"type": "object", "properties": TYPES, "required": KEYS, "additionalProperties": False}


@kinds
@pytest.mark.parametrize("is_compact", [False, True])
def test_json_of_seven_keys_takes_the_usual_steps(kind: str, is_compact: bool) -> None:
    text = json.dumps(ANSWER, ensure_ascii=False, separators=(",", ":") if is_compact else None)
    wanted = StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=is_compact)
    ids = within_text(kind, text)
    assert num_steps(kind, wanted, ids) <= 1.05 * len(ids)


def within_text(kind: str, text: str) -> list[int]:
    """The ids of a text behind another one."""
    encode = JSON_TOKENIZERS[kind].encode
    first: list[int] = encode(".", add_special_tokens=False).ids
    ids: list[int] = encode("." + text, add_special_tokens=False).ids
    return ids[len(first) :]


@pytest.mark.parametrize("is_special", [False, True])
def test_a_mark_of_calls_is_one_token(is_special: bool) -> None:
    tokenizer = json_byte_level()
    if is_special:
        tokenizer.add_special_tokens(["<tool_call>"])
    codec = codec_of(tokenizer)
    parameters = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "get_weather", "parameters": parameters}]
    rules = calls_rules(TOOL_FORMATS["hermes"], tools, codec.special_tokens, most_one=True)
    masks = masks_of(codec)
    state = masks.state(StructuredOutputs(grammar=f"start: calls\n{rules}"))
    ids = tokenizer.encode(CALL_LINE, add_special_tokens=False).ids
    assert ids[0] == id_of(tokenizer, "<tool_call>")
    for place, token in enumerate(ids):
        assert token in allowed(state)
        assert place > 5 or allowed(state) == {token}
        state.observe(token)
    assert state.is_complete
    masks.close()


def test_text_that_the_tokenizer_cannot_encode_has_the_longest_tokens() -> None:
    codec = TextCodec(JSON_TOKENIZERS["byte level"])  # it has nothing that encodes
    masks = masks_of(codec)
    state = masks.state(StructuredOutputs(regex=" country\\?"))
    for token in (" country", "?"):
        assert allowed(state) == {id_of(JSON_TOKENIZERS["byte level"], token.replace(" ", "Ġ"))}
        state.observe(min(allowed(state)))
    assert state.is_complete
    masks.close()
