"""Small tokenizers of every kind, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fastdecode.text.child import ChildFailedError, LimitedChild
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import Vocabulary

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
        vocab_size=340, special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<tool call>", "名"])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """As Llama 2's: ▁ for spaces, byte tokens for characters that the vocabulary lacks."""
    words = sorted({"▁" + word for line in LINES for word in line.split() if word.isascii()})
    letters = sorted({char for char in "▁" + "".join(LINES) if char.isascii() or char == "▁"})
    scores = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    scores += (
        [(byte, -9.0) for byte in BYTE_TOKENS]
        + [(x, -5.0) for x in letters]
        + [(x, -1.0) for x in words]
    )
    tokenizer = Tokenizer(models.Unigram(list(dict(scores).items()), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    words = [
        "[UNK]",
        "[SEP]",
        "the",
        "quick",
        "fox",
        "##es",
        "##y",
        ".",
        ",",
        "o",
        "'",
        "clock",
        "ca",
        "n't",
        "##fé",
    ]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


LLAMA_DECODER = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


GEMMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)


METASPACE_DECODER = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def bpe_with_suffix() -> Tokenizer:
    words = ["a", "b</w>", "c", "c</w>", "</w>", "é</w>"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], end_of_word_suffix="</w>")
    )
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


@cache
def byte_ids(kind: str) -> dict[int, int]:
    """Byte → the token that stands for it alone."""
    tokenizer = TOKENIZERS[kind]
    if kind != "byte-level":
        return {byte: id_of(tokenizer, token) for byte, token in enumerate(BYTE_TOKENS)}
    vocabulary = Vocabulary(tokenizer)
    ids = [id_of(tokenizer, char) for char in pre_tokenizers.ByteLevel.alphabet()]
    return {vocabulary.byte_level_bytes(token)[0]: token for token in ids}


class _OwnEncoder(LimitedChild):
    """Encodes in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ask(self, question: Mapping[str, Any]) -> list[int]:
        try:
            return list(self._tokenizer.encode(**question).ids)
        except Exception as error:  # as the process that encodes reports it
            raise ChildFailedError(str(error), refused=True) from None


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    """A codec that encodes, too."""
    return TextCodec(tokenizer, _OwnEncoder(tokenizer))


KEYS = ("name", "city", "country", "temperature", "is_open", "tags", "words")
KEYS_LINES = [
    f'{{"{a}": "{b} {a}", "{b}": [12, 3.5, true, null, "Austria"]}}' for a in KEYS for b in KEYS
]
CALL_LINE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Wien"}}\n</tool_call>'


def trained(tokenizer: Tokenizer, alphabet: Sequence[str], others: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer that knows JSON, and the marks of calls."""
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=list(alphabet), show_progress=False,
        special_tokens=["<unk>", "</s>", *others],
    )  # fmt: skip
    tokenizer.train_from_iterator([*KEYS_LINES, *[CALL_LINE] * 9, *LINES], trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def json_byte_level(split: str | None = None) -> Tokenizer:
    """As Qwen's; with a pattern that splits texts, as Mistral's Tekken."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split is not None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def json_sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2's, whose ▁ comes from the normalizer, or from Metaspace; or as Gemma's, which
    begins no text with it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = METASPACE_DECODER
    made = json.loads(trained(tokenizer, (), BYTE_TOKENS).to_str())
    made["added_tokens"] = [each for each in made["added_tokens"] if "<0x" not in each["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    if kind == "metaspace":
        return tokenizer
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer, tokenizer.decoder = blanks, GEMMA_DECODER
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        tokenizer.decoder = LLAMA_DECODER
    return tokenizer


def json_words() -> Tokenizer:
    """Whole words, blanks and signs."""
    split = pre_tokenizers.Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    texts = [*KEYS_LINES, CALL_LINE, *LINES]
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    vocab = {word: place for place, word in enumerate(["<unk>", "</s>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


TEKKEN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
JSON_TOKENIZERS = {
    "byte level": json_byte_level(),
    "tekken": json_byte_level(TEKKEN_SPLIT),
    "llama": json_sentencepiece("llama"),
    "metaspace": json_sentencepiece("metaspace"),
    "gemma": json_sentencepiece("gemma"),
    "unigram": sentencepiece(LLAMA_DECODER),
    "word level": json_words(),
}
