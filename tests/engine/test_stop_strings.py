"""Stop strings: text ends before the first of them, wherever tokens and characters are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import LINES, TOKENIZERS, byte_ids, id_of, with_text

from examples import examples
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.codec import SequenceText, TextCodec
from fastdecode.text.detokenizer import Vocabulary, detokenizer_for


class Letters:
    """A detokenizer whose token i is the i-th of some strings, all final at once."""

    def __init__(self, *strings: str) -> None:
        self._strings = strings

    def append(self, token_id: int) -> str:
        return self._strings[token_id]

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


def speak(
    pieces: Sequence[str], stop: Sequence[str], min_tokens: int = 0
) -> tuple[str, int | None]:
    """The text, and how many tokens it took to stop it (None: never). What is taken meanwhile is
    all of it, and as much as can't become a stop string any more."""
    text = SequenceText(Letters(*pieces), stop, min_tokens)
    taken, stopped_by = "", None
    for i in range(len(pieces)):
        if text.append(i):
            stopped_by = i + 1
            break
        taken += text.take()
        so_far = "".join(pieces[: i + 1])
        ends = [
            n
            for n in range(len(so_far))
            if any(s.startswith(so_far[n:]) and s != so_far[n:] for s in stop)
        ]
        assert taken == so_far[: min(ends, default=len(so_far))]
    whole = text.finish()
    assert taken + text.take() == whole and text.take() == ""
    return whole, stopped_by


@settings(max_examples=examples(600), deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_as_a_search_of_the_whole_text_finds_them(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    def naive() -> tuple[str, int | None]:
        for count in range(max(1, min_tokens), len(pieces) + 1):
            before, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
            ends = [(i, s) for s in stop for i in range(len(text)) if text.startswith(s, i)]
            fresh = [i for i, s in ends if i + len(s) > len(before)]
            if fresh:
                return text[: min(fresh)], count
        return "".join(pieces), None

    assert speak(pieces, stop, min_tokens) == naive()


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_a_stop_string_in_held_back_bytes_stops_at_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    codec = TextCodec(tokenizer)
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "好，世界。".encode()]
    text = codec.sequence_text(SamplingParams(stop=("世界", "。")), [id_of(tokenizer, "a")])
    hits = [text.append(token) for token in [id_of(tokenizer, "a"), *ids[:12]]]
    assert hits == [False] * 12 + [True]
    assert text.text == text.finish() == "a好，"


def test_held_back_bytes_stop_nothing_before_min_tokens() -> None:
    ids = [byte_ids("llama")[byte] for byte in "é你é!".encode()]
    text = TextCodec(TOKENIZERS["llama"]).sequence_text(
        SamplingParams(stop=("é", "!"), min_tokens=4)
    )
    assert [text.append(token) for token in ids[:7]] == [False] * 6 + [True]
    assert text.finish() == "é你"
    text = TextCodec(TOKENIZERS["llama"]).sequence_text(SamplingParams(stop=("é",), min_tokens=3))
    assert [
        text.append(token) for token in [*ids[:2], id_of(TOKENIZERS["llama"], "a"), *ids[:2]]
    ] == [False] * 4 + [True]
    assert text.finish() == "éa"


def test_a_broken_run_of_bytes_can_be_seen_only_when_it_ends_and_spoils_no_later_run() -> None:
    vocabulary = Vocabulary(TOKENIZERS["llama"])
    detokenizer = detokenizer_for(vocabulary)
    letter, of_byte = id_of(TOKENIZERS["llama"], "a"), byte_ids("llama")
    for byte in b"\xff\xc3\xa9!":
        assert detokenizer.append(of_byte[byte]) == ""
        assert not detokenizer.peek()
    assert detokenizer.append(letter) == "\ufffd" * 4 + "a"
    for byte, held in zip("é".encode(), ("", "é"), strict=True):
        assert detokenizer.append(of_byte[byte]) == ""
        assert detokenizer.peek() == held


def test_a_stop_string_across_the_border_of_text_and_held_back_bytes() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [id_of(tokenizer, x) for x in ("▁The", "a", "<0xC3>", "<0xA9>", "b")]
    text = TextCodec(tokenizer).sequence_text(SamplingParams(stop=("aé",)))
    assert [text.append(token) for token in ids[:4]] == [False, False, False, True]
    assert text.finish() == "The"


def test_a_stop_string_that_only_the_flush_completes_is_cut_off() -> None:
    text = TextCodec(TOKENIZERS["byte-level"]).sequence_text(SamplingParams(stop=("\ufffd",)))
    assert not text.append(byte_ids("byte-level")[ord("a")])
    assert not text.append(byte_ids("byte-level")[0xF0])  # may become an emoji yet
    assert text.text == "a"
    assert text.finish() == "a"


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_a_special_tokens_name_stops_by_its_id(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    codec = TextCodec(tokenizer)
    end, letter, start = id_of(tokenizer, "</s>"), id_of(tokenizer, "a"), id_of(tokenizer, "<s>")
    text = codec.sequence_text(SamplingParams(stop=("</s>", "never")))
    assert [text.append(token) for token in (letter, start, end)] == [False, False, True]
    assert text.finish() == "a"
    text = codec.sequence_text(SamplingParams(stop=("</s>", "aa")))
    assert [text.append(token) for token in (letter, start, letter)] == [False, False, True]
    assert text.finish() == ""
    text = codec.sequence_text(SamplingParams(stop=("</s>",), min_tokens=3))
    assert [text.append(token) for token in (letter, end, letter, end)] == [
        False,
        False,
        False,
        True,
    ]
    assert text.finish() == "aa"


def test_a_special_token_ends_held_back_bytes() -> None:
    tokenizer = TOKENIZERS["llama"]
    text = TextCodec(tokenizer).sequence_text(SamplingParams(stop=("</s>",)))
    ids = [byte_ids("llama")[byte] for byte in "é".encode()]
    assert [text.append(token) for token in [*ids, id_of(tokenizer, "</s>")]] == [
        False,
        False,
        True,
    ]
    assert text.finish() == "é"


@with_text
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_stop_strings_in_real_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    line = data.draw(st.sampled_from(LINES))
    start = data.draw(st.integers(0, len(line) - 1))
    stop = line[start : start + data.draw(st.integers(1, 12))]
    ids = tokenizer.encode(line, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    text = TextCodec(tokenizer).sequence_text(SamplingParams(stop=(stop,)))
    assert any(text.append(token) for token in ids)
    assert text.finish() == whole[: whole.index(stop)]
