"""What a user may choose about scheduling. Imports little: the command line
asks for it to draw up its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fastdecode.core.errors import ConfigError, Given
from fastdecode.schedule.admission.load_control import FixedInterval

Mode = Literal["stabilized", "fixed-f", "greedy", "synchronized"]
ColdStartMode = Literal["headroom", "none"]
MODES: tuple[Mode, ...] = get_args(Mode)
COLD_STARTS: tuple[ColdStartMode, ...] = get_args(ColdStartMode)

# By default a fixed interval keeps so many micro-batches running: a peak 6%
# above the mean load, and a crowd that starts within 1/16 of a sequence's
# steps.
_MICRO_BATCHES = 16


@dataclass(frozen=True)
class ScheduleOptions:
    """What a user may choose about scheduling.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """

    mode: Mode = "stabilized"
    max_num_sequences: int = 256
    """Most sequences that run at once, over all lanes: B."""
    prefill_chunk: int = 512
    """Most prompt tokens of one sequence in a step."""
    max_step_tokens: int = 256 + 2048
    """Most tokens of a lane's step."""
    num_lanes: int = 1
    load_limit: int | None = None
    """W_lim in tokens, over all lanes and R-workers; None: what step times say,
    else half of what a full batch has if all of it ends together."""
    target_length: int | None = None
    """S: steps that a sequence typically takes, which is the tokens that it
    generates. Only fixed intervals need it."""
    interval: int | None = None
    """F in steps, for fixed intervals; None: S/16, or S/B if that is longer."""
    cold_start: ColdStartMode = "headroom"
    """How ``stabilized`` fills an empty lane: the way it goes on later, by
    leaving room for those that are still to start; or at once."""
    learn_lengths: bool = True
    """Project load by the lengths of finished requests; else every sequence may
    run to its max_tokens, which keeps the load below its limit at all times,
    and far below it where most end early."""
    length_quantile: float | None = None
    """Reserve KV blocks by this quantile of those lengths, not for max_tokens;
    where it is exceeded and blocks run out, sequences are suspended and
    recomputed."""

    split_tokens: int | None = None
    """Sequences that may get longer than this are split into parts of so many
    tokens, on several R-workers; a multiple of the KV block size."""
    max_closed_rows: int = 1 << 19
    """Most queries of a step that go to an R-worker which doesn't store their
    tokens: of prompts, and as many of decoding sequences, over all lanes."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(Given("schedule", self.mode), f" is not one of {', '.join(MODES)}")
        if self.cold_start not in COLD_STARTS:
            raise ConfigError(
                Given("cold_start", self.cold_start), f" is not one of {', '.join(COLD_STARTS)}"
            )
        for name in (
            "max_num_sequences",
            "prefill_chunk",
            "max_step_tokens",
            "num_lanes",
            "max_closed_rows",
        ):
            self._check_int(name, getattr(self, name))
        for name in ("load_limit", "target_length", "interval", "split_tokens"):
            if getattr(self, name) is not None:
                self._check_int(name, getattr(self, name))
        if self.max_step_tokens <= self.max_num_sequences:
            raise ConfigError(
                Given("max_step_tokens", self.max_step_tokens),
                " must exceed ",
                Given("max_num_sequences", self.max_num_sequences),
                ": every running sequence decodes one token a step, and prompts need the rest",
            )
        if self.length_quantile is not None and not 0 < self.length_quantile <= 1:
            raise ConfigError(
                Given("length_quantile", self.length_quantile), " is not above 0 and at most 1"
            )
        if self.length_quantile is not None and not self.learn_lengths:
            raise ConfigError(
                Given("length_quantile", self.length_quantile), " needs ", Given("learn_lengths")
            )
        if self.mode == "fixed-f" and self.target_length is None:
            raise ConfigError(
                "fixed intervals need ",
                Given("target_length"),
                ": tokens that a sequence typically generates",
            )

    @staticmethod
    def _check_int(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
            raise ConfigError(Given(name, value), f" is not a whole number from 1 to {1 << 40}")

    @property
    def lane_size(self) -> int:
        """Most sequences of a lane."""
        return -(-self.max_num_sequences // self.num_lanes)

    def fixed_interval(self) -> FixedInterval:
        """A lane's micro-batches.

        Raises:
            ConfigError: the interval is longer than a sequence.
            CapacityError: the load limit is too low for even one sequence every
                F steps.
        """
        assert self.target_length is not None
        interval = self.interval or -(-self.target_length // min(_MICRO_BATCHES, self.lane_size))
        limit = None if self.load_limit is None else self.load_limit // self.num_lanes
        return FixedInterval.of(self.lane_size, self.target_length, interval, limit)
