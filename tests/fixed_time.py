"""Step times that are the same whatever the batch: what closed forms are about."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.schedule.simulation.instance_time import InstanceTime
from fastdecode.schedule.times import Prompts, StepTime


@dataclass(frozen=True)
class FixedTime(StepTime):
    """Seconds of each prompt, of a step of any batch, and of K and V of a token."""

    prompt_s: float
    step_s: float = 0.0
    token_transfer_s: float = 0.0

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        return self.step_s * (num_decoding > 0) + self.prompt_s * len(prompts)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return 0.0

    def transfer_s(self, num_tokens: float) -> float:
        return self.token_transfer_s * num_tokens


def fixed(
    prompt_s: float, step_s: float = 0.0, *, num_stages: int = 1, token_transfer_s: float = 0.0
) -> InstanceTime:
    return InstanceTime(FixedTime(prompt_s, step_s, token_transfer_s), num_stages=num_stages)
