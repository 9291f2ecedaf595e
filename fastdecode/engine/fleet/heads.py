"""R-workers that share out the KV heads: each keeps some heads of every
sequence (``--r-partition heads``).

However long or short the sequences are, every R-worker then has the same share
of every step's work, up to whole heads. The engine sees one R-worker.
``HeadsHub`` is that one: it cuts q, k and v by heads on the way out, and puts o
together on the way back; all else is said to everybody, and answered once all
have. Its capacity is that of the smallest.

Who loses one of them loses a part of every sequence. Those that are left then
share the heads anew (``Resharing``), and the engine recomputes everything, as
it does after any loss.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ConfigError, ProtocolError, WorkerError
from fastdecode.core.spec import HeadShare
from fastdecode.engine.fleet.answers import GroupAnswers, check_arrays
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.peers import RHub
from fastdecode.engine.fleet.workers import Reached
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import (
    Accepted,
    Answer,
    Attend,
    AttendResult,
    BeginStep,
    Failed,
    FromRWorker,
    Hello,
    Refused,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import TIMEOUT, PeerLostError, loss

logger = logging.getLogger(__name__)


def share_heads(num_q_heads: int, num_kv_heads: int, num_workers: int) -> list[HeadShare]:
    """As even as whole KV heads allow.

    Raises:
        ConfigError: there are fewer KV heads than R-workers.
    """
    if num_workers > num_kv_heads:
        raise ConfigError(
            f"{num_workers} R-workers can't share {num_kv_heads} KV heads: start {num_kv_heads} at "
            "most, or place by sequence (--r-partition sequences)"
        )
    group = num_q_heads // num_kv_heads
    bounds = [num_kv_heads * i // num_workers for i in range(num_workers + 1)]
    return [
        HeadShare(slice(a, b), slice(a * group, b * group)) for a, b in itertools.pairwise(bounds)
    ]


class HeadsConnection:
    """The one R-worker that the engine sees; see ``fastdecode.wire.transport.Connection``."""

    def __init__(self, hub: HeadsHub) -> None:
        self._hub = hub

    @property
    def peer(self) -> str:
        return self._hub.peer

    @property
    def heard_s(self) -> float | None:
        return self._hub.heard_s

    def send(self, message: ToRWorker) -> None:
        self._hub.send(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._hub.receive_any(timeout_s)[1]

    def poll(self) -> FromRWorker | None:
        return self._hub.poll()

    def close(self) -> None:
        for connection in self._hub.parts.connections:
            connection.close()


class HeadsHub:
    """See the module, and ``fastdecode.wire.transport.Hub``.

    Args:
        parts: the real R-workers.
        absent: those that aren't there to begin with, and why.
    """

    def __init__(self, parts: RHub, absent: Mapping[int, WorkerError] | None = None) -> None:
        self.parts = parts
        self.dead: dict[int, WorkerError] = dict(absent or {})
        """The R-workers that are lost, and why."""
        self.connections = (HeadsConnection(self),)
        self._shares: dict[int, HeadShare] = {}
        self._answers = GroupAnswers(_present(parts, self.dead))
        self._want_lse: dict[int, bool] = {}  # of each lane's step
        self._broken: WorkerError | None = None
        """One is lost that the others don't do without yet."""

    @property
    def peer(self) -> str:
        return (
            "the group of "
            f"{', '.join(self.parts.connections[worker].peer for worker in self._answers.workers)}"
        )

    @property
    def heard_s(self) -> float | None:
        """When the one that has been silent for longest was heard."""
        return min(
            (s for s in map(self._heard_s, self._answers.workers) if s is not None), default=None
        )

    def _heard_s(self, worker: int) -> float | None:
        return self.parts.connections[worker].heard_s

    def send(self, message: ToRWorker) -> None:
        if isinstance(message, Hello):
            self._start_anew(message)
        if self._broken is not None:
            raise self._broken
        if isinstance(message, BeginStep):
            self._want_lse[message.lane] = message.want_lse
        self._answers.ask(message)
        for worker in self._answers.workers:
            self._answers.sent(worker, message)
            try:
                self.parts.connections[worker].send(message.part(self._shares[worker]))
            except WorkerError as error:
                self._find_closed()  # its last words, perhaps
                self._lose(worker, error)
                raise self._broken or error from None

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._broken is not None:
                raise self._broken
            answer = self._join()
            if answer is not None:
                return 0, answer
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._arrive(*self.parts.receive_any(remaining_s))
            except WorkerError as error:
                if error.code == TIMEOUT:
                    raise
                if isinstance(error, PeerLostError) and error.index not in self.dead:
                    self._lose(error.index, error)
                self._find_closed()

    def poll(self) -> FromRWorker | None:
        if self._broken is not None:
            raise self._broken
        self._find_closed()
        if self._broken is not None:
            raise self._broken
        return self._join()

    def give_up_the_slowest(self) -> None:
        """Somebody has kept us waiting for too long: whoever has answered
        least, or was heard least lately, is lost."""
        if self._broken is None:
            behind = self._answers.behind
            if len(behind) == len(self._answers.workers):
                behind = [min(behind, key=lambda worker: self._heard_s(worker) or 0.0)]
            for worker in behind:
                peer = self.parts.connections[worker].peer
                self._lose(worker, WorkerError(f"{peer} keeps the others waiting", code=TIMEOUT))

    def give_up_heads(self, heads: NDArray[np.bool_], reason: str) -> None:
        """Those that answered for any of these query heads [Hq] are lost."""
        for worker, share in self._shares.items():
            if heads[share.q].any():
                peer = self.parts.connections[worker].peer
                self._lose(worker, WorkerError(f"{peer} {reason}", code=ProtocolError.default_code))

    def give_up_overdue(self, deadlines: Deadlines, since_s: float) -> None:
        """Whoever should have answered by now, or given a sign of life, is lost."""
        now = deadlines.clock()
        for worker in self._answers.silent:
            end_s, reason = deadlines.end(since_s, self._heard_s(worker))
            if end_s <= now:
                self._lose(
                    worker,
                    WorkerError(f"{self.parts.connections[worker].peer} {reason}", code=TIMEOUT),
                )

    def _start_anew(self, hello: Hello) -> None:
        """Share the heads among those that are alive. What they have been asked
        before is forgotten on both sides."""
        self._broken = None
        self._answers.begin(workers := _present(self.parts, self.dead))
        kv, spec = hello.kv, hello.attention[0]
        shares = share_heads(spec.num_q_heads, kv.num_kv_heads, len(workers))
        self._shares = dict(zip(workers, shares, strict=True))

    def _arrive(self, worker: int, message: FromRWorker) -> None:
        if worker in self.dead:
            return  # it was given up, and answers after all
        if isinstance(message, Failed):
            text = f"R-worker {message.worker} failed: {message.message}"
            self._lose(worker, WorkerError(text, code=message.code))
        elif isinstance(message, ReplicationNews):
            text = f"{self.parts.connections[worker].peer} speaks of replicas, which it keeps none"
            self._lose(worker, WorkerError(text, code=ProtocolError.default_code))
        else:
            self._answers.take(worker, message)

    def _join(self) -> Answer | None:
        """The answer to what was asked first, once everybody has given it."""
        answered = self._answers.next()
        if answered is None:
            return None
        asked, answers = answered
        # Once they are joined, nobody knows any more who has lied.
        for worker, answer in answers.items():
            try:
                _check(asked, answer, self._shares[worker], self._want_lse)
            except ProtocolError as lie:
                peer = self.parts.connections[worker].peer
                self._lose(worker, WorkerError(f"{peer} {lie.message}", code=lie.code))
        if self._broken is not None:
            raise self._broken
        return _joined(self.parts, asked, answers)

    def _find_closed(self) -> None:
        for worker in self._answers.workers:
            try:
                while worker not in self.dead:
                    answer = self.parts.connections[worker].poll()
                    if answer is None:
                        break
                    self._arrive(worker, answer)
            except WorkerError as error:
                self._lose(worker, error)

    def _lose(self, worker: int, error: WorkerError) -> None:
        if isinstance(error, PeerLostError):
            # Its index means something to the parts' hub only.
            error = WorkerError(error.message, code=error.code)
        if worker not in self.dead:
            self.dead[worker] = error
            logger.error(
                "%s: its heads of every sequence with it",
                loss(self.parts.connections[worker].peer, error),
            )
        self._broken = self._broken or error


def _present(parts: RHub, dead: Collection[int]) -> list[int]:
    return [worker for worker in range(len(parts.connections)) if worker not in dead]


def _check(
    asked: ToRWorker, answer: Answer, share: HeadShare, want_lse: Mapping[int, bool]
) -> None:
    """
    Args:
        share: the heads of who gave the answer.
        want_lse: whether each lane's step asked for it.

    Raises:
        ProtocolError: it can't be an answer to what was asked.
    """
    asked.check(answer)
    if isinstance(asked, Attend) and isinstance(answer, AttendResult):
        num_rows, _, head_dim = asked.q.shape
        shape = (num_rows, share.num_q_heads, head_dim)
        check_arrays(answer, shape, asked.q.dtype, want_lse=want_lse[asked.lane])


def _joined(parts: RHub, asked: ToRWorker, answers: dict[int, Answer]) -> Answer:
    """Everybody's answer as one."""
    joined = asked.join(list(answers.values()))
    undo = asked.undo()
    if isinstance(joined, Refused) and undo is not None:
        for worker, answer in answers.items():
            if isinstance(answer, Accepted):
                parts.connections[worker].send(undo)
    return joined


def share_out_heads(workers: Reached) -> Reached:
    """R-workers that share the heads, in the place of those that each have
    their own sequences. The group is there; who of it isn't, its hub knows."""
    hub = HeadsHub(workers.hub, workers.absent)

    def close(lost: Collection[int], timeout_s: float) -> None:
        if lost:  # the engine may have given up waiting before anybody asked for whom
            hub.give_up_the_slowest()
        workers.close(hub.dead, timeout_s)

    return Reached(
        hub,
        close,
        replacements=partial(Resharing, hub),
        group=workers.hub,
        group_lost=hub.dead,
        give_up_heads=hub.give_up_heads,
    )


class Resharing:
    """In the place of the R-workers of whom one is lost come those that are
    left.

    Args:
        hub: theirs.
        hello: what they are greeted with again.
        deadlines: how long an answer may take, and a silence last.
    """

    def __init__(self, hub: HeadsHub, hello: Hello, deadlines: Deadlines) -> None:
        self._hub = hub
        self._hello = hello
        self._deadlines = deadlines
        self._greeting: tuple[Deadlines, float] | None = None
        """How long they may take to answer, and since when they have been asked."""
        self._welcome: Welcome | None = None

    @property
    def timeout_s(self) -> float:
        """See ``Replacements``."""
        return math.inf if self._num_left else 0.0

    @property
    def _num_left(self) -> int:
        return len(self._hub.parts.connections) - len(self._hub.dead)

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """See ``Replacements``."""
        raise AssertionError("where heads are shared out there are no replicas")

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        """See ``Replacements``. They may take long to answer: they may have to
        compile kernels for other numbers of heads."""
        while self._welcome is None and 0 in lost and self._num_left:
            try:
                if self._greeting is None:
                    self._greet()
                else:
                    self._welcome = self._answer(*self._greeting)
                    break
            except WorkerError:
                self._greeting = None  # one less
        return {} if self._welcome is None else {0: self._welcome}

    def admit(self, worker: int) -> None:
        """See ``Replacements``."""
        self._welcome = self._greeting = None

    def _greet(self) -> None:
        """Raises WorkerError: another one is lost."""
        self._hub.give_up_the_slowest()
        if self._num_left:
            self._hub.send(self._hello)
            deadlines = self._deadlines.while_greeting()
            self._greeting = deadlines, deadlines.clock()

    def _answer(self, deadlines: Deadlines, asked_s: float) -> Welcome | None:
        """Everybody's answer, once all have given it. Raises WorkerError:
        another one is lost."""
        deadlines.begin_look()
        try:
            answer = self._hub.poll()
            if answer is None:
                self._hub.give_up_overdue(deadlines, asked_s)
        finally:
            deadlines.end_look()
        assert answer is None or isinstance(answer, Welcome)
        return answer
