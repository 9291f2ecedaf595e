"""An engine that only counts, for tests of what stands around an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import CapacityError, FastDecodeError
from fastdecode.core.sequence import Request


@dataclass
class Counting:
    """An engine whose every request says 0, 1, 2, …; ``max_tokens`` of them."""

    before_step: Callable[[], None] = lambda: None
    before_close: Callable[[], None] = lambda: None
    num_steps: int = 0
    pause_s: float = 0.0
    is_closed: bool = False
    threads: set[int] = field(default_factory=set)
    num_r_workers: int = 2
    num_live_r_workers: int = 2
    has_hung_r_workers: bool = False
    most_tokens: int = 1000
    said: dict[str, tuple[Request, Listener | None, int]] = field(default_factory=dict)

    @property
    def engine(self) -> Counting:
        return self

    @property
    def has_work(self) -> bool:
        return bool(self.said)

    @property
    def num_running(self) -> int:
        return sum(1 for _, _, num_said in self.said.values() if num_said)

    @property
    def num_unfinished_sequences(self) -> int:
        return len(self.said)

    def look(self) -> None:
        """Its R-workers are none."""

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        if request.max_tokens > self.most_tokens:
            raise CapacityError("too long")
        self.said[request.request_id] = (request, listener, 0)

    def step(self) -> None:
        self.threads.add(threading.get_ident())
        self.before_step()
        self.num_steps += 1
        for request_id, (asked, listener, num_said) in list(self.said.items()):
            is_over = num_said + 1 == asked.max_tokens
            assert listener is not None
            for index in range(asked.params.n):
                reason = "length" if is_over else None
                delta = Delta(request_id, index, "", (num_said,), None, reason)  # type: ignore[arg-type]
                if is_over or listener.every_step:
                    listener.tell(delta)
            self.said[request_id] = (asked, listener, num_said + 1)
            if is_over:
                del self.said[request_id]

    def cancel(self, request_id: str) -> bool:
        return self.said.pop(request_id, None) is not None

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        waiting = [request_id for request_id, (_, _, num_said) in self.said.items() if not num_said]
        waiting = [request_id for request_id in waiting if among is None or request_id in among]
        return [request_id for request_id in waiting if self.cancel(request_id)]

    def abandon(self, error: FastDecodeError) -> None:
        self.said.clear()

    def close(self) -> None:
        self.before_close()
        self.is_closed = True
