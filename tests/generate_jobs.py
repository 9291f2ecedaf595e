"""Files of requests for ``fastdecode generate``, and what is to be answered."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from fastdecode.cli.main import main

GenerateJob: TypeAlias = "tuple[list[str], Path, Callable[[], str]]"
LENGTHS = tuple(1 + 5 * i for i in range(8))


def write_requests(path: Path, max_tokens: int, lengths: Sequence[int] = LENGTHS) -> None:
    """One request for each length of a prompt, greedy. The first is done long before the others."""
    lines = [
        {
            "id": i,
            "prompt_token_ids": [5 + i] * length,
            "max_tokens": max_tokens if i else 3,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def job_of(
    directory: Path, model: Path, max_tokens: int, lengths: Sequence[int] = LENGTHS
) -> GenerateJob:
    """Write requests. Return the command that answers them, its output, and the right answers."""
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    write_requests(source, max_tokens, lengths)
    options = ["--model", str(model), "--dtype", "float32", "--prefill-chunk", "16"]
    command = ["generate", *options, "--input", str(source), "--output", str(output)]
    return command, output, lambda: answers_alone(source, *options)


def answers_alone(source: Path, *options: str) -> str:
    """What this process answers on its own, on threads; computed once."""
    return _answers(source.read_text(), options)


@cache
def _answers(requests: str, options: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "in.jsonl"), Path(directory, "out.jsonl")
        source.write_text(requests)
        files = ["--input", str(source), "--output", str(output)]
        assert main(["generate", *options, *files, "--kv-memory-gb", "0.01"]) == 0
        return output.read_text()
