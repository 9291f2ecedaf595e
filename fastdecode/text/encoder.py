"""Prompts to token ids, in a child process with limits (``tokenizer_program`` there)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from fastdecode.core.errors import CheckpointError, RequestError
from fastdecode.core.os_errors import explained
from fastdecode.text.child import ChildDiedError, ChildFailedError, LimitedChild, Limits, died

# Texts of up to so many are encoded before their length is judged.
ORDINARY_BYTES_PER_TOKEN = 16
# A million tokens of prose take 5 s.
ENCODE_CPU_S = 30
LOAD_CPU_S = 60
BASE_MEMORY_BYTES = 1 << 30
# A loaded tokenizer takes twelve times its file's size.
MEMORY_PER_FILE_BYTE = 24


class Encoder:
    """Encodes with a model's tokenizer.

    Args:
        path: its tokenizer.json.
        max_model_len: tokens that no prompt may reach; None: no limit.
        limits: what loading and encoding may take; None: what honest tokenizers
            never need.

    Raises:
        CheckpointError: the file is no tokenizer, or takes more than the limits
            for an ordinary text.
    """

    def __init__(
        self, path: Path, max_model_len: int | None = None, limits: Limits | None = None
    ) -> None:
        self._child = LimitedChild(
            "tokenizer", {"path": str(path.resolve())}, limits or _limits(path)
        )
        self._max_model_len = max_model_len
        try:
            self._child.open()
        except ChildFailedError as error:
            mend = "fetch the file again, or remove it to serve token ids only"
            what = "is not a tokenizer that the package tokenizers can read"
            if not error.refused:
                what = "can't be loaded and encode an ordinary text"
            raise CheckpointError(f"{path} {what} ({error}): {mend}") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text's token ids.

        Raises:
            RequestError: (code ``invalid_prompt``) the text can't be encoded
                within the limits, or (``prompt_too_long``) even the longest
                tokens can't make it fit the model; or (``child_died``) the process
                that encodes died twice.
        """
        try:
            self._check_length(text)
            ids: list[int] = self._child.ask(
                {"text": text, "add_special_tokens": add_special_tokens}
            )
        except ChildDiedError as error:
            raise died(error) from None
        except ChildFailedError as error:
            raise RequestError(
                f"the tokenizer can't encode the prompt: {error}; give prompt_token_ids",
                code="invalid_prompt",
            ) from None
        return ids

    def close(self) -> None:
        """End the child process. Safe to call twice."""
        self._child.close()

    def _check_length(self, text: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a surrogate pair at character {error.start}, which is no "
                "text: "
                f"write the whole character",
                code="invalid_prompt",
            ) from None
        limit = self._max_model_len
        if limit is None or num_bytes <= limit * ORDINARY_BYTES_PER_TOKEN:
            return
        span = self._max_bytes_per_token
        if span is not None and num_bytes > (limit - 1) * span:
            raise RequestError(
                f"the prompt is too long: this model's maximum context length is {limit} tokens "
                f"for prompt and completion together, and the prompt has {num_bytes} bytes: "
                "shorten the prompt",
                code="prompt_too_long",
            )

    @cached_property
    def _max_bytes_per_token(self) -> int | None:
        span = self._child.ask({})
        return None if span is None else int(span)


def _limits(path: Path) -> Limits:
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {explained(error)}") from None
    memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_FILE_BYTE * file_bytes
    return Limits(memory_bytes=memory_bytes, cpu_s=ENCODE_CPU_S, open_cpu_s=LOAD_CPU_S)
