"""What a user may choose about a batch job. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode.core.config.options import REQUIRED, check_options, option, switch
from fastdecode.core.errors import ConfigError
from fastdecode.text.chat_format import ChatOptions

INPUT_HELP = "requests, JSON Lines, also compressed by gzip; -: standard input"


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    input: Path = option(REQUIRED, INPUT_HELP, short="-i")
    output: Path = option(REQUIRED, "answers, JSON Lines", short="-o")


@dataclass(frozen=True, kw_only=True)
class JobOptions(ChatOptions, JobFiles):
    """A user's choices about a job. Raises ConfigError: If an option has no valid value."""

    resume: bool = switch("continue the run that began the output, if any", is_alternative=True)
    overwrite: bool = switch("throw an existing output away", is_alternative=True)
    retry_errors: bool = switch("with --resume: also run again what had failed")
    on_error: str = option(
        "refuse",
        "bad lines in the input: refuse to start and list them, or answer each with an error",
        choices=("refuse", "skip"),
    )
    shard: str = option(
        "1/1",
        "answer lines I, I+N, ... of the file only: for N jobs, whose outputs `fastdecode merge` "
        "joins",
        metavar="I/N",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        'what a line\'s "model" may say; repeatable (default: DIR as given, and its last part)',
        metavar="NAME",
    )
    run_seed: int | None = option(
        None,
        "from it and its id comes a line's seed (default: drawn, and kept)",
        low=0,
        high=(1 << 63) - 1,
    )
    sync_lines: int = option(100, "fsync every N answers", low=1, high=1 << 30)
    sync_s: float = option(5.0, "and every S seconds", low=0, high=1e9, unit="s")
    grace_s: float = option(
        60.0, "when interrupted, most time for the lines that run", low=0, unit="s"
    )
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for lines that don't give them."""
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recommendations of the model's generation_config.json for lines without them."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.retry_errors and not self.resume:
            raise ConfigError(
                "--retry-errors goes with --resume: it is about answers that are already there"
            )
