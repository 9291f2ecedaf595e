"""An instance in this process: an engine with a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta, DeltaQueue
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.sequence import Request
from fastdecode.engine.figures import EngineFigures
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.stats import EngineStats

Arrived = Callable[[Sequence[Delta]], None]
"""Takes what requests say, from the instance's thread. It never waits."""


class _Reader(DeltaQueue):
    """Passes on at once what an instance's requests say."""

    def __init__(self, arrived: Arrived, *, every_step: bool) -> None:
        super().__init__(every_step=every_step)
        self._arrived = arrived

    def put(self, deltas: Iterable[Delta]) -> None:
        self._arrived(list(deltas))


class LocalEngine:
    """See ``EngineClient``.

    Args:
        name: what it is called towards people.
        service: runs the engine; it is open.
        running: what the service has made.
        arrived: takes what its requests say.
    """

    def __init__(
        self, name: str, service: EngineService[Any], running: RunningEngine, arrived: Arrived
    ) -> None:
        self.name = name
        self.service = service
        self.running = running
        self.num_tokens = num_tokens_of(running)
        self.max_sequences = running.resolved.config.batching.max_num_sequences
        self._figures: EngineFigures | None = None
        service.call(self._take_figures)
        self._readers = {every: _Reader(arrived, every_step=every) for every in (True, False)}

    @property
    def broken(self) -> FastDecodeError | None:
        """Why it can't go on; None: it can."""
        snapshot = self.service.snapshot()
        if snapshot.error is None and snapshot.state == "closed":
            return ConfigError(f"instance {self.name} was closed", code="closed")
        return snapshot.error

    stranded = None
    """R-workers of this process don't come back: an engine that has none left is broken."""

    def submit(self, request: Request, *, every_step: bool) -> None:
        """Run a request. Raises FastDecodeError: it is broken."""
        self.service.submit([request], self._readers[every_step])

    def cancel(self, request_id: str) -> None:
        """End a request, and let go of what it holds."""
        self.service.cancel(request_id)

    def give_role(self, role: InstanceRole) -> None:
        """What it will be given from now on."""
        self.service.look(lambda served: served.engine.give_role(role))

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""
        self.service.look(lambda served: served.engine.end_conversation(token_ids, salt))

    @property
    def num_steps(self) -> int:
        """That were made."""
        return self.service.snapshot().engine.num_steps

    @property
    def stats(self) -> EngineStats:
        """Its totals."""
        return self.running.engine.stats

    def figures(self) -> EngineFigures | None:
        """As it has reported them by now; it reports more between two of its steps."""
        self.service.look(self._take_figures)
        return self._figures

    def _take_figures(self, running: RunningEngine) -> None:
        self._figures = running.engine.figures()


def num_tokens_of(running: RunningEngine) -> int:
    """Of KV that an engine has room for."""
    num_blocks = sum(welcome.num_blocks for welcome in running.welcomes)
    return num_blocks * running.resolved.config.r_part.block_size
