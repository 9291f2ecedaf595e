"""What structured outputs cost in a step of 128 sequences: the same batch with and
without a JSON schema, in turns, in one process.

    python benchmarks/structured_masks.py [--out FILE]

The model is random, of Llama's shape, with a vocabulary of 32,000 tokens. A step's
time is that of the decode steps alone: the difference of two runs that differ in how
many tokens they generate. ``parts`` are CPU times of the engine's own thread, within
the runs with a schema: masks added to logits, waiting for masks, tokens taken in.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from provenance import keep, provenance
from random_llama import llama_config, write_checkpoint
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from fastdecode import LLM, SamplingParams
from fastdecode.text.grammar_masks import GrammarState
from sworker.sampling import penalties

NUM_SEQUENCES, VOCAB = 128, 32_000
SHORT, LONG = 4, 20
SHAPES: Mapping[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
"""The second is Llama 3.2 1B's, but for the vocabulary."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 40},
        "age": {"type": "integer"},
        "mood": {"enum": ["calm", "angry"]},
    },
    "required": ["tags", "name", "age", "mood"],
}


def make_model(directory: Path, shape: Mapping[str, int]) -> str:
    """A random model whose tokens are bytes and made-up words."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ("Ġ" * (i % 2) + "".join(each) for i, each in enumerate(
        itertools.product(syllables, repeat=3)
    ))  # fmt: skip
    tokens = [*sorted(ByteLevel.alphabet()), *itertools.islice(words, VOCAB - 257), "</s>"]
    tokenizer = Tokenizer(BPE({token: place for place, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = llama_config(**shape, vocab_size=VOCAB, eos_token_id=VOCAB - 1)
    write_checkpoint(directory, config, "random")
    return str(directory)


@contextmanager
def timed_parts(parts: dict[str, float]) -> Iterator[None]:
    """Inside, the CPU seconds of what a schema adds are summed up by name."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                parts[name] = parts.get(name, 0.0) + time.thread_time() - began

        return call

    before = penalties.mask_logits, GrammarState.mask, GrammarState.observe
    penalties.mask_logits = timed("add", before[0])
    GrammarState.mask = timed("wait", before[1])  # type: ignore[method-assign]
    GrammarState.observe = timed("take in", before[2])  # type: ignore[method-assign]
    try:
        yield
    finally:
        penalties.mask_logits = before[0]
        GrammarState.mask, GrammarState.observe = before[1:]  # type: ignore[method-assign]


def seconds(llm: LLM, num_tokens: int, structured: bool) -> tuple[float, float]:
    """By the clock and of the CPU, for all sequences to get so many tokens."""
    more = {"structured_outputs": {"json": SCHEMA}} if structured else {"ignore_eos": True}
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=num_tokens, **more)
        for i in range(NUM_SEQUENCES)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate([[i % 200, 5, 6, 7] for i in range(NUM_SEQUENCES)], params)
    took = time.perf_counter() - began, time.process_time() - cpu
    num = sum(len(output.completions[0].token_ids) for output in outputs)
    assert num == NUM_SEQUENCES * num_tokens, "a sequence ended before its time"
    return took


def steps(llm: LLM, structured: bool) -> tuple[float, float]:
    """A decode step, by the clock and of the CPU."""
    short, long = (seconds(llm, num, structured) for num in (SHORT, LONG))
    clock, cpu = ((b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True))
    return clock, cpu


def measure(shape: str, rounds: int) -> dict[str, Any]:
    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), SHAPES[shape])
        options: dict[str, Any] = {"kv_memory_gb": 1, "prefix_cache": "off"}
        with LLM(model, max_num_sequences=NUM_SEQUENCES, **options) as llm:
            for structured in (False, True):
                seconds(llm, 2, structured)
            plain, masked = [], []
            for _ in range(rounds):
                plain.append(steps(llm, False))
                with timed_parts(parts):
                    masked.append(steps(llm, True))
    num_steps = rounds * (SHORT + LONG)
    return {
        "shape": shape,
        "plain_ms": [[1e3 * x for x in each] for each in plain],
        "masked_ms": [[1e3 * x for x in each] for each in masked],
        "clock_ratio": statistics.median(b[0] / a[0] for a, b in zip(plain, masked, strict=True)),
        "cpu_ratio": statistics.median(b[1] / a[1] for a, b in zip(plain, masked, strict=True)),
        "parts_ms": {name: 1e3 * s / num_steps for name, s in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    rows = [measure(shape, args.rounds) for shape in args.shapes]
    for row in rows:
        print(
            f"{row['shape']}: clock {row['clock_ratio']:.3f}, CPU {row['cpu_ratio']:.3f}; "
            + ", ".join(f"{name} {ms:.2f} ms" for name, ms in row["parts_ms"].items())
        )
    if args.out is not None:
        keep({**provenance(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
