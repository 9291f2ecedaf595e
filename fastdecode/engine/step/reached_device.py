"""The KV cache on the S-worker's device as an R-worker that others reach: it exports prompts,
fetches what other engines' R-workers export, and takes K and V of prompts that other stages run.

The S-worker still works in its own thread (``fastdecode.engine.step.device``). A second thread
does what happens behind compute: it answers readers and writes what is fetched. Both hold one
lock while they touch the R-worker's state; attention needs none, since readers and fetches never
touch slots of sequences that a step has.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fastdecode.core.errors import WorkerError
from fastdecode.engine.step.device import DeviceWorker
from fastdecode.engine.step.torch_executor import AttendPaged, TorchExecutor
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import BeginStep, Failed, FromRWorker, Inspect, ToRWorker
from fastdecode.wire.transport import CLOSED, TIMEOUT, PeerLostError, timeout_error
from rworker.cache_state import CacheState
from rworker.inline import WORKER
from rworker.instructions import EndStep, HangUp, Instruction
from rworker.tiers.tiers import POLL_S
from rworker.transfers.background_transfers import BackgroundTransfers, TransferNews
from rworker.transfers.neighbours import Neighbourhood
from rworker.worker import Peer, RWorker, last_words
from sworker.step_tables import StepTables

logger = logging.getLogger(__name__)

_LOOK_UP: Final = Inspect()
"""From the S-worker's side: the thread has something to do."""
_ENDS_WITHIN_S: Final = 5.0


@dataclass(frozen=True, eq=False)
class _Peers:
    """The S-worker, which is the first, and others that reach the device's cache."""

    s_worker: Peer
    hub: InprocHub[FromRWorker, ToRWorker]

    @property
    def connections(self) -> Sequence[Peer]:
        return (self.s_worker, *self.hub.connections[1:])


class ReachedDevice(DeviceWorker):
    """See the module, and ``DeviceWorker``.

    Args:
        executor, kv_bytes: see ``DeviceWorker``.
        name: by which others reach it.
        peer: see ``DeviceWorker``.

    Raises:
        ConfigError: it can't be reached as ``neighbours`` say.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        kv_bytes: int,
        name: str,
        neighbours: Neighbourhood,
        peer: str | None = None,
    ) -> None:
        super().__init__(executor, kv_bytes, peer)
        self._changed = threading.Condition(threading.RLock())
        self._hub: InprocHub[FromRWorker, ToRWorker] = InprocHub(keeps_places=False)
        # The first of the hub's connections is the S-worker's, which only wakes the thread.
        self._wake, _ = connect(InprocHub(), name, self._hub, "the S-worker")
        reaches = neighbours.add(name, self._hub)
        self._transfers = BackgroundTransfers(executor, reaches, self._tell)
        peers = _Peers(self._answers, self._hub)
        self._worker = self._at_work = RWorker(peers, self._state, executor, self._transfers)
        self._pause_s: float | None = None  # of the thread, until it looks after transfers
        self.neighbours: Final = neighbours
        self.address: Final = neighbours.address_of(name)
        """What others reach it by."""
        self._thread = threading.Thread(target=self._serve, name=f"rworker-{name}", daemon=True)
        self._thread.start()

    def begin_step(self, begin: BeginStep) -> tuple[StepTables, CacheState, AttendPaged]:
        with self._changed:
            return super().begin_step(begin)

    def end_step(self, begin: BeginStep) -> None:
        """See ``DeviceWorker``. The replica follows, if there is one."""
        with self._changed:
            super().end_step(begin)
            cache = self._state.cache_of(WORKER, begin.holder)
            if cache.is_replicated:
                self._at_work.obey((EndStep(cache.holder, begin.lane, begin.step),))
                self._wake_up()

    def send(self, message: ToRWorker) -> None:
        """See ``InlineConnection``, but it is done at once: readers wait for what is
        exported, while the S-worker may not look for long."""
        super().send(message)
        self.work()

    def work(self) -> None:
        with self._changed:
            super().work()

    def poll(self) -> FromRWorker | None:
        with self._changed:
            return super().poll()

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        """See ``Connection``. What is fetched comes while this waits."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (answer := self.poll()) is None:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise timeout_error(self.peer, timeout_s or 0.0)
                self._wait(left_s)
        return answer

    @property
    def is_busy(self) -> bool:
        """See ``InlineConnection``. KV of others comes to it, too."""
        with self._changed:
            return self._transfers.wait_s is not None

    def close(self) -> None:
        """See ``InlineConnection``. Readers find it gone."""
        with self._changed:
            self._transfers.close()
        self._wake.close()
        self._thread.join(_ENDS_WITHIN_S)
        with self._changed:
            super().close()
            self._changed.notify_all()  # what waits for an answer gets none

    def _wait(self, timeout_s: float | None) -> None:
        """Until the thread has an answer, or so long that a tier may have moved blocks.
        Readers get the lock meanwhile: no wait for a tier may keep it."""
        if self._transfers.is_moving:
            timeout_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
        self._changed.wait(timeout_s)

    def _handle(self, message: ToRWorker, worker: RWorker) -> None:
        super()._handle(message, worker)
        self._wake_up()

    def _wake_up(self) -> None:
        """Have the thread look after transfers, if it would do so later than they are due."""
        wait_s = self._transfers.wait_s
        if wait_s is not None and (self._pause_s is None or wait_s < self._pause_s):
            self._pause_s = wait_s
            self._wake.send(_LOOK_UP)

    def _serve(self) -> None:
        """The thread."""
        try:
            while self._serve_next():
                pass
        except Exception:
            logger.exception("%s and other R-workers do not reach each other any more", self.peer)
        finally:
            with self._changed:
                self._transfers.give_up(f"{self.peer} does not reach other R-workers any more")
            self._hub.close()

    def _serve_next(self) -> bool:
        """Deal with what comes next. False: the S-worker is done with this."""
        with self._changed:
            if self._transfers.is_late:
                self._transfers.work()
            wait_s = self._pause_s = self._transfers.wait_s
        try:
            peer, message = self._hub.receive_any(wait_s)
        except PeerLostError as lost:
            if lost.index == WORKER:
                return False
            gone = HangUp(lost.index, may_return=lost.code == CLOSED)
            self._carry_out(gone.peer, lambda: (gone,))
        except WorkerError as error:
            if error.code != TIMEOUT:
                return False
            with self._changed:
                self._transfers.work()
        else:
            if peer != WORKER:
                self._carry_out(peer, lambda: self._state.handle(peer, message))
        return True

    def _carry_out(self, peer: int, decide: Callable[[], tuple[Instruction, ...]]) -> None:
        """Do what a reader's message comes to. A mistake of ours costs that reader alone."""
        with self._changed:
            try:
                self._at_work.obey(decide())
            except Exception as error:
                self._tell(peer, last_words(self.peer, error))
                self._at_work.obey((HangUp(peer),))

    def _tell(self, peer: int, news: TransferNews | Failed) -> None:
        with contextlib.suppress(WorkerError):  # a reader is gone: the hub says so next
            self._at_work.peers.connections[peer].send(news)
        self._changed.notify_all()
