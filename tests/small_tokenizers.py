"""Small tokenizers of every kind, trained on a few lines."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
