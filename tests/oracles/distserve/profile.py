"""Latencies of one pipeline stage, and which placements there is room for, as
the authors fitted them for OPT on A100-80GB. Milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastdecode.core.errors import ConfigError

Backend = Literal["distserve", "vllm"]
BACKENDS: tuple[Backend, ...] = ("distserve", "vllm")
"""``vllm``: one instance for both, prefill first; it has times of its own."""


@dataclass(frozen=True)
class StageTimes:
    """A stage's latencies at one degree of tensor parallelism."""

    prefill: tuple[float, float, float]  # fixed, a token, a token squared
    decode_small: tuple[float, float, float]  # fixed, a context token, a sequence
    decode_large: tuple[float, float, float]
    large_from: int  # batches of so many sequences on are large

    def prefill_ms(self, num_tokens: int, num_squared: int, num_stages: int) -> float:
        """One stage of a pipeline of so many.

        Args:
            num_tokens: of all prompts of the batch.
            num_squared: the sum of their squares.
        """
        fixed, token, square = self.prefill
        return (fixed + token * num_tokens + square * num_squared) / num_stages + num_stages

    def decode_ms(self, num_sequences: int, num_context: int, num_stages: int) -> float:
        """One stage of a pipeline of so many.

        Args:
            num_context: tokens of all sequences, the new one of each included.
        """
        coefficients = self.decode_small if num_sequences < self.large_from else self.decode_large
        fixed, token, sequence = coefficients
        return (fixed + token * num_context + sequence * num_sequences) / num_stages


def first_stage_ms(num_tokens: int) -> float:
    """What the first stage takes beside, for its batch's prompt or context tokens."""
    return 2.0 + 0.0001 * num_tokens


@dataclass(frozen=True)
class PublishedModel:
    """One model of the profile."""

    name: str
    times: dict[Backend, dict[int, StageTimes]]  # by tensor parallelism
    max_tokens: dict[tuple[int, int], int]
    """By tensor and pipeline parallelism: prompt tokens that a batch may have."""

    def is_runnable(self, tp: int, pp: int, backend: Backend = "distserve") -> bool:
        return (tp, pp) in self.max_tokens and tp in self.times[backend]

    def stage(self, tp: int, pp: int, backend: Backend) -> StageTimes:
        """Raises ConfigError if the profile has none."""
        if not self.is_runnable(tp, pp, backend):
            runnable = [f"{t}x{p}" for t, p in self.max_tokens if t in self.times[backend]]
            raise ConfigError(
                f"the published profile can't run {self.name} with tp={tp}, pp={pp}: "
                + (f"there are {', '.join(runnable)}" if runnable else "it has no times of it")
            )
        return self.times[backend][tp]


def published_models() -> dict[str, PublishedModel]:
    """All of the profile, by name."""
    text = Path(__file__).with_name("a100.json").read_text("utf-8")
    return {name: _model(name, row) for name, row in json.loads(text)["models"].items()}


def published_model(name: str) -> PublishedModel:
    """By a name like ``facebook/opt-13b``, ``OPT 13B`` or ``opt-13b``.

    Raises:
        ConfigError: the profile has no such model.
    """
    models = published_models()
    found = {_plain(each): model for each, model in models.items()}.get(_plain(name))
    if found is None:
        raise ConfigError(f"{name}: the published profile has {', '.join(models)} only")
    return found


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower().removeprefix("facebook/") if letter.isalnum())


def _model(name: str, row: dict[str, Any]) -> PublishedModel:
    return PublishedModel(
        name,
        {
            backend: {int(tp): _stage(each) for tp, each in row[backend].items()}
            for backend in BACKENDS
        },
        {(tp, pp): tokens for tp, pp, tokens in row["max_tokens"]},
    )


def _stage(row: dict[str, Any]) -> StageTimes:
    prefill, small, large = (tuple(row[x]) for x in ("prefill", "decode_small", "decode_large"))
    return StageTimes(prefill, small, large, row["large_from"])
