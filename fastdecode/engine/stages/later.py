"""The stages behind the first, as the first one sees them: they are greeted, and
steps leave for them and come back."""

from __future__ import annotations

from collections.abc import Collection

from fastdecode.core.errors import ProtocolError
from fastdecode.engine.stages.links import StageLinks
from fastdecode.wire.stages import StageDone, StageHello, StagePass, StageWelcome


class LaterStages:
    """Sends stages their steps, and keeps what they report of them.

    Args:
        links: to all of them.
    """

    def __init__(self, links: StageLinks) -> None:
        self._links = links
        self.numbers = links.later
        """Those behind the first."""
        self._done: list[StageDone] = []
        self._welcomes: dict[int, StageWelcome] = {}
        self._num_layers: dict[int, int] = {}  # up to the end of each

    @property
    def are_welcome(self) -> bool:
        """Whether they have answered to the first greeting."""
        return bool(self._welcomes)

    def greet(self, hellos: dict[int, StageHello]) -> None:
        """Say to stages what they are to be; ``welcomes`` are due."""
        num_layers = 0
        for stage, hello in hellos.items():
            self._links.send(stage, hello)
            num_layers += hello.num_layers
            self._num_layers[stage] = num_layers

    def welcomes(self, stages: Collection[int]) -> dict[int, StageWelcome] | None:
        """By stage, once all of these have answered."""
        self._listen()
        answered = {stage: told for stage, told in self._welcomes.items() if stage in stages}
        return answered if len(answered) == len(stages) else None

    def send(self, message: StagePass) -> None:
        """A step leaves for the stages, all of which have to report on it. Each
        layer of theirs, and of those before them, may take its R-workers as long
        as any answer may."""
        for stage in self.numbers:
            self._links.expect(stage, message, self._num_layers.get(stage, 1))
        self._links.tell(self.numbers[0], message)

    def take_done(self) -> list[StageDone]:
        """What stages have reported of steps; each report is taken once."""
        self._listen()
        done, self._done = self._done, []
        return done

    def _listen(self) -> None:
        """
        Raises:
            WorkerError: a stage said what it may not say.
        """
        for stage, message in self._links.take_heard():
            self._links.answered(stage, message)
            if isinstance(message, StageDone):
                self._done.append(message)
            elif isinstance(message, StageWelcome):
                self._welcomes[stage] = message
            else:
                raise self._links.loss(stage, ProtocolError(f"it sent {type(message).__name__}"))
