"""Reading the small files of a model directory, which somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdecode.core.errors import CheckpointError
from fastdecode.core.json_file import read_bytes

# The largest published tokenizers have a quarter of that.
MAX_TOKENIZER_BYTES = 128 << 20
MAX_TOKENIZER_CONFIG_BYTES = 8 << 20


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """A file's content.

    Raises:
        CheckpointError: it can't be read, is no regular file, or has more than
            ``max_bytes``.
    """

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: {why}. Fetch the file again")

    return read_bytes(path, most_bytes=max_bytes, refuse=refuse)


def read_model_json(path: Path, max_bytes: int = MAX_TOKENIZER_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file, or something else
    in it.

    Raises:
        CheckpointError: as ``read_model_file``, or it isn't JSON.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(read_model_file(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not readable JSON ({error}): fetch the file again, or remove it"
        ) from None
    return content if isinstance(content, dict) else {}
