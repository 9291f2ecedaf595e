"""The tokenizer wrapper, the incremental detokenizers against decoding at once, and stop strings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fastdecode.core.errors import CheckpointError, MissingExtraError, RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.engine.detokenizer import ByteLevelDetokenizer, Vocabulary, WindowDetokenizer, detokenizer_for
from fastdecode.engine.text import SequenceText, TextCodec

LINES = [
    "Once upon a time, a naïve café owner in Zürich said: “Grüß Gott!”",
    "The quick brown fox — 12 o'clock — jumped over 3 lazy dogs. 你好，世界。",
    "Emoji 😀😃👩‍👩‍👧 and flags 🇨🇭 are several code points; so is é (e + combining acute).",
    "STOP here. <END> The end.",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<tool call>", "名"])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """As Llama 2's: ▁ for spaces, byte tokens for characters that the vocabulary lacks."""
    words = sorted({"▁" + word for line in LINES for word in line.split() if word.isascii()})
    letters = sorted({char for char in "▁" + "".join(LINES) if char.isascii() or char == "▁"})
    scores = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    scores += [(byte, -9.0) for byte in BYTE_TOKENS] + [(x, -5.0) for x in letters] + [(x, -1.0) for x in words]
    tokenizer = Tokenizer(models.Unigram(list(dict(scores).items()), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "the", "quick", "fox", "##es", "##y", ".", ",", "o", "'", "clock", "ca", "n't", "##fé"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE_DECODER = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def bpe_with_suffix() -> Tokenizer:
    words = ["a", "b</w>", "c", "c</w>", "</w>", "é</w>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": sentencepiece(LLAMA_DECODER),
    "gemma": sentencepiece(GEMMA_DECODER),
    "metaspace": sentencepiece(METASPACE_DECODER),
    "wordpiece": wordpiece(),
    "bpe with suffix": bpe_with_suffix(),
    "no decoder": Tokenizer(models.WordLevel({"a": 0, "b": 1, "ç": 2})),
}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)
with_text = pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def pieces_of(kind: str, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = detokenizer_for(Vocabulary(TOKENIZERS[kind]), prompt)
    return [*map(detokenizer.append, token_ids), detokenizer.flush()]


@cache
def byte_ids(kind: str) -> dict[int, int]:
    """Byte → the token that stands for it alone."""
    tokenizer = TOKENIZERS[kind]
    if kind != "byte-level":
        return {byte: id_of(tokenizer, token) for byte, token in enumerate(BYTE_TOKENS)}
    vocabulary = Vocabulary(tokenizer)
    ids = [id_of(tokenizer, char) for char in pre_tokenizers.ByteLevel.alphabet()]
    return {vocabulary.byte_level_bytes(token)[0]: token for token in ids}


# --- detokenizers ----------------------------------------------------------------------------------------------------


@kinds
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_make_the_text_of_all(kind: str, data: st.DataObject) -> None:
    # Beyond the vocabulary too: models are padded, and tokenizers know fewer ids.
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[kind].get_vocab_size() + 3), max_size=40))
    assert "".join(pieces_of(kind, ids)) == TOKENIZERS[kind].decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_runs_of_bytes_valid_and_not(kind: str, data: st.DataObject) -> None:
    tokenizer, of_byte = TOKENIZERS[kind], byte_ids(kind)
    parts = st.one_of(
        st.text(max_size=4).map(lambda text: text.encode(errors="ignore")),
        st.binary(max_size=4),
        st.sampled_from([b"\xf0\x9f\x98", b"\xe4\xbd", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90", b"\xef\xbf\xbd"]),
    )
    others = st.sampled_from([id_of(tokenizer, x) for x in ("a", "</s>")])
    ids: list[int] = []
    for part in data.draw(st.lists(st.one_of(parts, others), max_size=8)):
        ids += [of_byte[byte] for byte in part] if isinstance(part, bytes) else [part]
    assert "".join(pieces_of(kind, ids)) == tokenizer.decode(ids)


@with_text
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab é你😀\n."), max_size=30))
def test_no_piece_of_sound_text_is_broken(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    pieces = pieces_of(kind, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TOKENIZERS[kind].decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZERS["byte-level"].get_vocab_size() - 1), max_size=30))
def test_byte_level_text_lags_by_no_more_than_part_of_a_character(ids: list[int]) -> None:
    detokenizer = ByteLevelDetokenizer(Vocabulary(TOKENIZERS["byte-level"]))
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.append(token)
        assert text + detokenizer.peek() == TOKENIZERS["byte-level"].decode(ids[:count])
        assert len(detokenizer.peek()) <= 3  # of at most three bytes


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_a_byte_run_shows_when_it_ends(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [id_of(tokenizer, x) for x in ("▁The", "<0xE4>", "<0xBD>", "<0xA0>", "<0xC3>", "<0xA9>", "a")]
    first = " The" if kind == "gemma" else "The"
    assert pieces_of(kind, ids) == [first, "", "", "", "", "", "你éa", ""]
    assert pieces_of(kind, ids[:-1])[-1] == "你é"
    assert pieces_of(kind, ids[:-2])[-1] == "\ufffd" * 4  # as the library decodes a run with a broken end


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "wordpiece"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_continues_the_text_of_its_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    sound = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) not in BYTE_TOKENS]
    prompt = data.draw(st.lists(st.sampled_from(sound), min_size=1, max_size=10))
    output = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    if all(tokenizer.decode([token]) == "" for token in prompt):
        return  # then the output begins the text, and how much of its space is dropped hangs on the decoder
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
    detokenizer = detokenizer_for(Spy(tokenizer))
    for token in ids:
        detokenizer.append(token)
    if not isinstance(detokenizer, ByteLevelDetokenizer):
        assert sum(decoded) < 8 * len(ids)


def test_special_tokens_and_unknown_ids_do_not_pile_up() -> None:
    tokenizer = TOKENIZERS["llama"]
    detokenizer = detokenizer_for(Vocabulary(tokenizer))
    assert isinstance(detokenizer, WindowDetokenizer)
    for token in [id_of(tokenizer, "</s>"), 10_000] * 50:
        assert detokenizer.append(token) == ""
    assert detokenizer._window == []


# --- stop strings ----------------------------------------------------------------------------------------------------


class Letters:
    """A detokenizer whose token i is the i-th of some strings, all final at once."""

    can_peek = False

    def __init__(self, *strings: str) -> None:
        self._strings = strings

    def append(self, token_id: int) -> str:
        return self._strings[token_id]

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


def speak(pieces: Sequence[str], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, int | None]:
    """The text, and how many tokens it took to stop it (None: never)."""
    text = SequenceText(Letters(*pieces), stop, min_tokens)
    for i in range(len(pieces)):
        if text.append(i):
            return text.finish(), i + 1
    return text.finish(), None


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["Hello", " END", " more"], ["END"], ("Hello ", 2)),
        (["Hello E", "N", "D more"], ["END"], ("Hello ", 3)),
        (["one\n", "\ntwo"], ["\n\n"], ("one", 2)),
        (["abcXdef"], ["X"], ("abc", 1)),
        (["abcdef"], ["e", "cd"], ("ab", 1)),
        (["ab", "cdef"], ["ef", "bcd"], ("a", 2)),
        (["aaa", "ab"], ["aab"], ("aa", 2)),
        (["x", "", "", "y"], ["xy"], ("", 4)),
        (["ST", "O", "OP", "STOP"], ["STOP"], ("STOOP", 4)),
        (["never"], ["no"], ("never", None)),
        (["EN"], ["END"], ("EN", None)),
        (["e", "\u0301"], ["e"], ("", 1)),
    ],
)
def test_text_is_cut_before_the_first_stop(
    pieces: list[str], stop: list[str], expected: tuple[str, int | None]
) -> None:
    assert speak(pieces, stop) == expected


def test_stop_strings_wait_for_min_tokens() -> None:
    pieces = ["a", "END", "b", "EN", "D", "c"]
    assert speak(pieces, ["END"], min_tokens=2) == ("a", 2)
    assert speak(pieces, ["END"], min_tokens=3) == ("aENDb", 5)
    assert speak(pieces, ["END"], min_tokens=6) == ("aENDbENDc", None)


@settings(max_examples=300, deadline=None)
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
    text = TextCodec(TOKENIZERS["llama"]).sequence_text(SamplingParams(stop=("é", "!"), min_tokens=4))
    assert [text.append(token) for token in ids[:7]] == [False] * 6 + [True]
    assert text.finish() == "é你"
    text = TextCodec(TOKENIZERS["llama"]).sequence_text(SamplingParams(stop=("é",), min_tokens=3))
    assert [text.append(token) for token in [*ids[:2], id_of(TOKENIZERS["llama"], "a"), *ids[:2]]] == [False] * 4 + [
        True
    ]
    assert text.finish() == "éa"


def test_a_broken_run_of_bytes_can_be_seen_only_when_it_ends_and_spoils_no_later_run() -> None:
    vocabulary = Vocabulary(TOKENIZERS["llama"])
    detokenizer = detokenizer_for(vocabulary)
    letter, of_byte = id_of(TOKENIZERS["llama"], "a"), byte_ids("llama")
    for byte in b"\xff\xc3\xa9!":
        assert detokenizer.append(of_byte[byte]) == ""
        assert not detokenizer.can_peek
    assert detokenizer.append(letter) == "\ufffd" * 4 + "a"
    for byte, can_peek in zip("é".encode(), (False, True), strict=True):
        assert detokenizer.append(of_byte[byte]) == ""
        assert detokenizer.can_peek == can_peek
    assert detokenizer.peek() == "é"


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


@with_text
@settings(max_examples=60, deadline=None)
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


def test_finish_flushes_and_can_be_asked_again() -> None:
    tokenizer = TOKENIZERS["llama"]
    text = TextCodec(tokenizer).sequence_text(SamplingParams())
    for token in ("▁The", "<0xC3>", "<0xA9>"):
        text.append(id_of(tokenizer, token))
    assert text.text == "The"
    assert text.finish() == text.finish() == text.text == "Theé"
    with pytest.raises(AssertionError):
        text.append(5)


# --- the codec -------------------------------------------------------------------------------------------------------


def save(tokenizer: Tokenizer, folder: Path, config: Any = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_encode_and_decode(tmp_path: Path) -> None:
    codec = TextCodec.load(save(byte_level(), tmp_path))
    assert codec.has_tokenizer
    for line in LINES:
        assert codec.decode(codec.encode(line)) == line
    assert codec.decode([0, *codec.encode("a"), 1, 99_999]) == "a"


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "special": True}])
def test_bos_is_added_once_if_the_config_asks_for_it(tmp_path: Path, bos: Any) -> None:
    plain = byte_level()
    bare = plain.encode("the end").ids
    templated = byte_level()
    templated.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    asks, refrains = {"add_bos_token": True, "bos_token": bos}, {"add_bos_token": False, "bos_token": bos}
    assert TextCodec.load(save(plain, tmp_path, asks)).encode("the end") == [0, *bare]
    assert TextCodec.load(save(plain, tmp_path, refrains)).encode("the end") == bare
    assert TextCodec.load(save(plain, tmp_path, {"add_bos_token": True})).encode("the end") == bare
    assert TextCodec.load(save(templated, tmp_path, asks)).encode("the end") == [0, *bare, 1]
    assert TextCodec.load(save(templated, tmp_path, refrains)).encode("the end") == [0, *bare, 1]


def test_saved_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode(LINES[0]).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    assert TextCodec.load(save(tokenizer, tmp_path)).encode(LINES[0]) == expected


def test_a_directory_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    codec = TextCodec.load(tmp_path)
    assert not codec.has_tokenizer
    with pytest.raises(RequestError, match=r"no tokenizer.json: give prompt_token_ids") as refused:
        codec.encode("Hello")
    assert refused.value.code == "no_tokenizer"
    with pytest.raises(RequestError, match="stop strings need text"):
        codec.sequence_text(SamplingParams(stop=("x",)))
    text = codec.sequence_text(SamplingParams(), (1, 2))
    assert not text.append(3)
    assert text.finish() == codec.decode([3]) == ""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": 3}', "\x00\x01"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextCodec.load(tmp_path)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": tr')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        TextCodec.load(tmp_path)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(byte_level(), tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"fastdecode\[sworker\]"):
        TextCodec.load(tmp_path)


def test_prompts_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(RequestError, match="character 2") as refused:
        TextCodec(byte_level()).encode("ab\ud83d")
    assert refused.value.code == "invalid_prompt"
    with pytest.raises(RequestError, match="can't encode the prompt"):
        TextCodec(Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))).encode("b")
