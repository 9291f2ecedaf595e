"""The steps that are under way in one cache, and which sequences they have."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.errors import ProtocolError


@dataclass
class OpenStep:
    """A step of which some layers are still to come."""

    step: int
    sequence_ids: list[int]
    num_new: int
    """Tokens that it appends, T_kv."""
    num_queries: int
    """And attends, T_q."""
    next_layer: int = 0


class OpenSteps:
    """One a lane at most.

    Args:
        num_layers: that each step has.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.of_lane: dict[int, OpenStep] = {}
        """Those that are under way."""
        self.settled: dict[int, int] = {}
        """Sequence in an open step → tokens cached before that step."""

    def check_idle(self, lane: int, step: int) -> None:
        """Raises ProtocolError if the lane, which begins this step, has one."""
        if lane in self.of_lane:
            raise ProtocolError(
                f"lane {lane} begins step {step}, but its step {self.of_lane[lane].step} is open"
            )

    def check_at_rest(self, sequence: int) -> None:
        """Raises ProtocolError if the sequence is in an open step."""
        if sequence in self.settled:
            raise ProtocolError(f"sequence {sequence} is in an open step")

    def begin(self, lane: int, step: OpenStep, num_past: Seq[int]) -> None:
        """A lane's step begins; so many tokens of its sequences come before it."""
        self.of_lane[lane] = step
        self.settled.update(zip(step.sequence_ids, num_past, strict=True))

    def due(self, lane: int, step_number: int, layer: int) -> OpenStep:
        """The step whose next layer this is.

        Raises:
            ProtocolError: it isn't.
        """
        step = self.of_lane.get(lane)
        if step is None:
            raise ProtocolError(f"lane {lane} has no open step")
        if (step_number, layer) != (step.step, step.next_layer):
            raise ProtocolError(
                f"lane {lane} sent step {step_number}, layer {layer} when step {step.step}, "
                f"layer {step.next_layer} was due"
            )
        return step

    def finish_layer(self, lane: int, step_number: int, layer: int) -> bool:
        """A layer, which is due, has been attended. Returns whether it was the
        last, which ends the step."""
        step = self.due(lane, step_number, layer)
        step.next_layer += 1
        if step.next_layer < self._num_layers:
            return False
        del self.of_lane[lane]
        for sequence in step.sequence_ids:
            self.settled.pop(sequence, None)  # it may be there twice
        return True

    def finish(self, lane: int, step_number: int) -> None:
        """The same of all layers at once: none has been attended yet."""
        self.due(lane, step_number, 0).next_layer = self._num_layers - 1
        self.finish_layer(lane, step_number, self._num_layers - 1)

    def give_up(self) -> None:
        """No step is under way any more."""
        self.settled.clear()
        self.of_lane.clear()

    def check_invariants(self) -> None:
        """For tests and debugging."""
        busy = [i for step in self.of_lane.values() for i in dict.fromkeys(step.sequence_ids)]
        assert sorted(busy) == sorted(self.settled), "open steps and busy sequences differ"
