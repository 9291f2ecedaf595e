"""Reading the small files of a model directory. Somebody else wrote them: a
name may stand for a pipe or a device that never ends, and a file may be of any
size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from fastdecode.core.errors import CheckpointError

# The largest published tokenizers have a quarter of that.
MAX_TOKENIZER_BYTES = 128 << 20
MAX_TOKENIZER_CONFIG_BYTES = 8 << 20


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """A file's content.

    Raises:
        CheckpointError: it can't be read, is no regular file, or has more than
            ``max_bytes``.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path} is not a regular file: put the file itself there")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{path} has more than {max_bytes} bytes, which can't be right: fetch the file again"
        )
    return data


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
