"""An R-worker without a thread: it works when the S-worker waits for it, in the
S-worker's own thread.

Where S-part and R-part share their cores and take turns anyway, a thread of its
own gives an R-worker nothing, and every layer would pay for two hand-overs and
for two sets of threads that spin on the same cores.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Final

from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.transport import closed_error, timeout_error
from rworker.attention import AttentionExecutor
from rworker.state import RWorkerState
from rworker.tiers.disk import Disk
from rworker.tiers.tiers import Tiers
from rworker.worker import Answers, RWorker, RWorkerExecutor, last_words

logger = logging.getLogger(__name__)

WORKER: Final = 0  # the one connection's index


class InlineConnection:
    """The S-worker's side of a connection. The next call that looks for an answer does what was
    sent, and its time counts as waiting, as it does with any other R-worker."""

    heard_s = None  # it can't hang alone

    def __init__(self, state: RWorkerState, executor: RWorkerExecutor) -> None:
        self.peer = f"R-worker {state.name}"
        self._name = state.name
        self._answers = Answers("the S-worker", WORKER)
        # None once it has ended. It reaches no other R-workers.
        self._worker: RWorker | None = RWorker(self._answers, state, executor)
        self._requests: deque[ToRWorker] = deque()
        self._closed = False

    def send(self, message: ToRWorker) -> None:
        if self._closed or self._worker is None:
            raise closed_error(self.peer, by_peer=not self._closed)
        self._requests.append(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        """Return the next answer. Call it only while one is owed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (answer := self.poll()) is None:
            assert self._worker is not None
            left_s = None if deadline is None else deadline - time.monotonic()
            assert self._worker.behind.is_moving, f"{self.peer} owes no answer"
            if left_s is not None and left_s <= 0:
                raise timeout_error(self.peer, timeout_s or 0.0)
            self._worker.executor.tiers.wait(left_s)
        return answer

    def poll(self) -> FromRWorker | None:
        if self._closed:
            raise closed_error(self.peer, by_peer=False)
        answers = self._answers.queue
        while not answers and self._requests and self._worker is not None:
            self._handle(self._requests.popleft(), self._worker)
        if self._worker is not None:
            self._worker.behind.report_moves()
        if answers:
            return answers.popleft()
        if self._worker is None:
            raise closed_error(self.peer, by_peer=True)
        return None

    def close(self) -> None:
        """Drop requests that nothing has looked at, answers, and the KV cache."""
        self._closed = True
        self._answers.queue.clear()
        self._end()

    def work(self) -> None:
        """Do all that was sent."""
        while self._requests and self._worker is not None:
            self._handle(self._requests.popleft(), self._worker)

    @property
    def is_busy(self) -> bool:
        """True if blocks are on their way, on which it will report."""
        return self._worker is not None and self._worker.behind.is_moving

    @property
    def is_open(self) -> bool:
        return not self._closed and self._worker is not None

    def _handle(self, message: ToRWorker, worker: RWorker) -> None:
        continues = False
        try:
            continues = worker.obey(worker.state.handle(WORKER, message))
            continues = continues and not self._answers.are_over
        except Exception as error:
            self._answers.send(last_words(self._name, error))
        except BaseException:
            # Ctrl-C in the middle of a layer: the caller must not wait for its answer.
            self._answers.send(Failed(self._name, "interrupted", "it was interrupted"))
            raise
        finally:
            if not continues:
                self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.behind.close()
        self._worker = None
        self._requests.clear()


def make_inline_worker(
    name: str,
    *,
    kv_bytes: int,
    num_threads: int,
    openmp_library: str | None = None,
    disk: Disk | None = None,
) -> InlineConnection:
    """Make an R-worker that works in this thread.

    Args:
        openmp_library: file of the OpenMP runtime in whose ``num_threads`` threads the S-part
            runs: they run the kernels, too. If it is None, or can't be used, the kernels have
            threads of their own.
        disk: where cached blocks may go. None if nowhere.

    Raises:
        ConfigError: If an option is out of range.
    """
    state = RWorkerState(
        name, kv_bytes=kv_bytes, num_threads=num_threads, has_tier=disk is not None
    )
    team = None
    if openmp_library is not None and num_threads > 1:
        from cpu_kernels.team import OpenMPTeam

        try:
            team = OpenMPTeam(num_threads, openmp_library)
        except OSError as error:
            logger.info("R-worker %s has threads of its own: %s", name, error)
    executor = AttentionExecutor(num_threads=num_threads, team=team, tiers=Tiers(disk))
    return InlineConnection(state, executor)
