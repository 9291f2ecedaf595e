"""An engine elsewhere, in another thread or process, as its caller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Request
from fastdecode.engine.stats import EngineFigures, EngineStats


class EngineClient(Protocol):
    """A whole engine. No method waits for it."""

    @property
    def name(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Of KV that it has room for."""

    @property
    def max_sequences(self) -> int:
        """That it runs at once."""

    @property
    def broken(self) -> FastDecodeError | None:
        """Why it can't go on; None: it can."""

    @property
    def stranded(self) -> FastDecodeError | None:
        """Why it runs nothing for now, though it lives: it has no R-worker. None: it
        runs what it is given."""

    def submit(self, request: Request, *, every_step: bool) -> None:
        """Run a request. Raises FastDecodeError: it is broken."""

    def cancel(self, request_id: str) -> None:
        """End a request, and let go of what it holds."""

    def give_role(self, role: InstanceRole) -> None:
        """What it will be given from now on."""

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""

    @property
    def num_steps(self) -> int:
        """That it has reported."""

    @property
    def stats(self) -> EngineStats:
        """Its totals, as it has reported them."""

    def figures(self) -> EngineFigures | None:
        """Likewise; None: it has not reported any."""
