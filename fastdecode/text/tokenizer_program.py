"""Encodes prompts with a model's tokenizer; runs in a child process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file
from fastdecode.text.child_words import Answer, Refusal
from fastdecode.text.token_span import max_bytes_per_token

# A bit of everything, and the runs that make a regular expression go back and forth.
TRIAL_TEXT = "Once upon a time, 12345 naïve cafés — 你好 😀 don't\r\n\t{x: [1.5e-3]};\n" + "".join(
    char * 100 + "!\n" for char in "a Z0.-_=\té"
)


def open_service(opening: dict[str, Any]) -> tuple[None, Answer]:
    """Load a tokenizer, and try it.

    Args:
        opening: ``path`` of the tokenizer.json.

    Returns:
        What encodes a ``text``, with special tokens around it or without
        (``add_special_tokens``); or, if the question has no text, tells
        ``max_bytes_per_token``.

    Raises:
        Refusal: the file can't be read.
        Exception: of the library; it is no tokenizer.
        BaseException: a panic of the library; it breaks down on an ordinary
            text.
    """
    try:
        content = read_model_file(Path(opening["path"]), MAX_TOKENIZER_BYTES)
    except CheckpointError as error:
        raise Refusal(str(error)) from None
    tokenizer = Tokenizer.from_buffer(content)
    # Some tokenizer.json carry the settings that their training ran with.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for text in ("", TRIAL_TEXT):
        with contextlib.suppress(Exception):
            # A small vocabulary may lack letters; a panic is no Exception.
            tokenizer.encode(text)
    tokenizer.decode(list(range(tokenizer.get_vocab_size())), skip_special_tokens=False)

    def answer(question: dict[str, Any]) -> list[int] | int | None:
        if "text" not in question:
            return max_bytes_per_token(tokenizer)
        add_special_tokens = question["add_special_tokens"]
        ids: list[int] = tokenizer.encode(
            question["text"], add_special_tokens=add_special_tokens
        ).ids
        return ids

    return None, answer
