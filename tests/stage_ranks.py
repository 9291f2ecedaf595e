"""Jobs whose stages are ranks: what they are given, which process is which, and
how the first stage says that it has ended."""

from __future__ import annotations

import sys
from pathlib import Path

from generate_jobs import write_requests

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
R_WORKER = [*FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
_FORKED = (
    '{"id": "forked", "prompt_token_ids": [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8], '
    '"max_tokens": 8, "n": 3, "temperature": 0.8, "seed": 5, "ignore_eos": true}\n'
)


def write_some_forked(path: Path, max_tokens: int) -> None:
    """Requests, the last of which has several completions."""
    write_requests(path, max_tokens)
    with path.open("a") as lines:
        lines.write(_FORKED)


def exit_code_file(directory: Path) -> Path:
    """Where the first stage says how the job has ended; mpirun's own exit code
    says little once a rank was lost."""
    return directory / "exit_code"
