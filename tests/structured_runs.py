"""Requests with structured outputs, of a model with random weights, and what
their answers must be."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jsonschema
from checkpoints import save_checkpoint
from random_schemas import regex, schema
from small_tokenizers import byte_level

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import Completion

MAX_TOKENS = 480
EOS = 1
OPTIONS: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.02}


def save_model(directory: Path) -> str:
    """A random model whose tokens are bytes and a few longer ones."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    save_checkpoint(directory, "llama", {"vocab_size": size + 5, "eos_token_id": EOS})
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


@dataclass(frozen=True)
class Asked:
    """One request."""

    structured: dict[str, Any]
    params: SamplingParams

    def check(self, completion: Completion) -> None:
        """The answer is whole, and what was asked."""
        assert completion.finish_reason == "stop", (self.structured, completion.text)
        (kind, wanted), text = next(iter(self.structured.items())), completion.text
        if kind == "json":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(wanted, format_checker=checker).validate(
                json.loads(text)
            )
        else:
            assert re.fullmatch(wanted, text), (wanted, text)


def random_asked(num_schemas: int, num_regexes: int, first: int = 0) -> list[Asked]:
    """Greedy and sampled; some with several completions, logprobs, penalties."""
    wanted: list[dict[str, Any]] = []
    wanted += [{"json": schema(random.Random(first + i))} for i in range(num_schemas)]
    wanted += [{"regex": regex(random.Random(first + i))} for i in range(num_regexes)]
    return [Asked(each, _params(each, random.Random(i))) for i, each in enumerate(wanted)]


def _params(structured: dict[str, Any], rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.7, 1.0]),
        seed=rng.randrange(1 << 30),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=rng.choice([None, None, 2]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.2]),
        max_tokens=MAX_TOKENS,
        structured_outputs=structured,  # type: ignore[arg-type]  # as a line gives it
    )


def prompts_of(asked: list[Asked]) -> list[list[int]]:
    """Random ones."""
    rng = random.Random(1)
    return [[rng.randrange(2, 300) for _ in range(rng.randint(1, 20))] for _ in asked]


def write_lines(path: Path, asked: list[Asked]) -> None:
    """The same requests as lines of ``fastdecode generate``."""
    with path.open("w") as file:
        for place, (prompt, each) in enumerate(zip(prompts_of(asked), asked, strict=True)):
            params = {f.name: getattr(each.params, f.name) for f in fields(SamplingParams)}
            usual = {f.name: f.default for f in fields(SamplingParams)}
            said = {name: value for name, value in params.items() if value != usual[name] and value}
            said["structured_outputs"] = each.structured
            file.write(json.dumps({"id": place, "prompt_token_ids": prompt, **said}) + "\n")


def check_lines(path: Path, asked: list[Asked]) -> None:
    """Every answer in a file is what it must be."""
    answers = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    answers.sort(key=lambda answer: int(answer["id"]))
    assert len(answers) == len(asked)
    for answer, each in zip(answers, asked, strict=True):
        assert "error" not in answer, answer
        for place, one in enumerate(answer.get("completions", [answer])):
            each.check(Completion(place, one["text"], (), one["finish_reason"]))


def run(llm: LLM, asked: list[Asked]) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens; every answer is what it must be."""
    outputs = llm.generate(prompts_of(asked), [each.params for each in asked])
    for each, output in zip(asked, outputs, strict=True):
        assert output.ok, (each.structured, output.error)
        for completion in output.completions:
            each.check(completion)
    return [[each.token_ids for each in output.completions] for output in outputs]
