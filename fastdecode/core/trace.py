"""Events of a step with their times, which the engine reports to a ``Trace``.

All times are ``time.perf_counter()`` of the S-worker's host, in seconds. The engine's one thread
calls these methods in the order in which it learns of things; they must be cheap and must not
raise."""

from __future__ import annotations

from typing import Protocol


class Trace(Protocol):
    """Receives what the S-worker and the R-workers did."""

    def s_part(self, lane: int, step: int, layer: int | None, start_s: float, end_s: float) -> None:
        """The S-worker ran a lane's S-step: up to the attention of ``layer``;
        None: from the last layer's attention to the logits."""

    def sampled(self, lane: int, step: int, num_tokens: int, start_s: float, end_s: float) -> None:
        """The S-worker drew the tokens of a lane's step."""

    def waited(self, start_s: float, end_s: float) -> None:
        """The S-worker had nothing to do but wait for R-workers."""

    def attended(
        self,
        worker: int,
        lane: int,
        step: int,
        layer: int,
        sent_s: float,
        arrived_s: float,
        compute_s: float,
    ) -> None:
        """An R-worker's answer is here. ``compute_s`` is what it says that it
        computed; the rest of the time between ``sent_s`` and ``arrived_s`` went
        into transfer, waiting its turn there, and lying unread here."""

    def load(self, at_s: float, num_running: int, num_waiting: int, num_cached_tokens: int) -> None:
        """A step is over: the sequences that run and wait, and the tokens that
        those which run have cached (W)."""
