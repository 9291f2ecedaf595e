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
    """Return a file's content.

    Raises:
        CheckpointError: If it is not a regular file, or has more than ``max_bytes``.
    """

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: {why}. Fetch the file again")

    return read_bytes(path, most_bytes=max_bytes, refuse=refuse)


def read_model_json(path: Path, max_bytes: int = MAX_TOKENIZER_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Empty if the file is missing or holds another value.

    Raises:
        CheckpointError: If it cannot be read, or is not JSON.
    """
    content = parse_json(path, read_model_file(path, max_bytes)) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def parse_json(path: Path, data: bytes) -> Any:
    """Parse a file's content. Raises: CheckpointError: If it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}). Fetch the file again."
        ) from None
