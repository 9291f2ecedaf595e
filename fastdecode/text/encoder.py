"""Prompts to token ids, in a child process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdecode.core.errors import CheckpointError, RequestError
from fastdecode.core.os_errors import explained
from fastdecode.text.child import ChildDiedError, ChildFailedError, LimitedChild, Limits

ORDINARY_BYTES_PER_TOKEN = 16
MAX_BYTES_PER_TOKEN = 128
"""Texts of up to this many bytes per token of the model's limit are encoded whole."""
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
        limits: what loading and encoding may take; None: what honest tokenizers never need.
        added: tokens that other files add to it (``TokenizerFiles``).

    Raises:
        CheckpointError: If the file is no tokenizer, or takes more than the limits for an
            ordinary text.
    """

    def __init__(
        self,
        path: Path,
        max_model_len: int | None = None,
        limits: Limits | None = None,
        added: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        opening = {"tokenizer": {"path": str(path.resolve()), "added": list(added)}}
        self._child = LimitedChild(opening, limits or _limits(path))
        self._max_model_len = max_model_len
        try:
            self._child.open()
        except ChildFailedError as error:
            remedy = "fetch the file again, or remove it to serve token ids only"
            what = "is not a tokenizer that the package tokenizers can read"
            if not error.refused:
                what = "can't be loaded and encode an ordinary text"
            raise CheckpointError(f"{path} {what} ({error}): {remedy}") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids.

        Raises:
            RequestError: (code ``invalid_prompt``) If the text can't be encoded within the
                limits. (``prompt_too_long``) If its beginning alone is too long for the model.
                (``child_died``) If the child was ended from outside.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a surrogate pair at character {error.start}, which is no "
                "text: write the whole character",
                code="invalid_prompt",
            ) from None
        limit = self._max_model_len
        if limit is not None and num_bytes > limit * MAX_BYTES_PER_TOKEN:
            start = text[: limit * MAX_BYTES_PER_TOKEN // 4]
            num_tokens = len(self._ids(start, add_special_tokens=False))
            if num_tokens > 2 * limit:  # a cut changes the tokens beside it, not half of them
                raise RequestError(
                    f"the prompt is too long: this model's maximum context length is {limit} "
                    f"tokens, and the first {num_tokens} are of {len(start)} of the prompt's "
                    f"{len(text)} characters ({num_bytes} bytes): shorten the prompt",
                    code="prompt_too_long",
                )
        return self._ids(text, add_special_tokens=add_special_tokens)

    def close(self) -> None:
        """End the child process. Safe to call twice."""
        self._child.close()

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        question = {"sequence": text, "add_special_tokens": add_special_tokens}
        try:
            ids: list[int] = self._child.ask(question)
        except ChildDiedError as error:
            raise error.as_request_error() from None
        except ChildFailedError as error:
            raise RequestError(
                f"the tokenizer can't encode the prompt: {error}; give prompt_token_ids",
                code="invalid_prompt",
            ) from None
        return ids


def _limits(path: Path) -> Limits:
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {explained(error)}") from None
    memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_FILE_BYTE * file_bytes
    return Limits(memory_bytes=memory_bytes, cpu_s=ENCODE_CPU_S, open_cpu_s=LOAD_CPU_S)
