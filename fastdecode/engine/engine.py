"""The engine: requests in, one step of a lane at a time, and what they say to
whoever listens.

A request's life: ``submit`` → waiting → room opened on its holders
(``OpenSequence`` or ``ForkSequence``) → its prompt run in one or more chunks →
one token drawn a step → finished, its blocks freed (``CloseSequence``). Whoever
listens is told what it says (``fastdecode.core.delta``). What comes next is
decided by ``fastdecode.schedule.life.lifecycle``, which is told what happens,
and carried out by ``fastdecode.engine.executor``; nothing here knows how a step
is scheduled, what a layer computes, or where an R-worker runs.

When an R-worker is lost, its sequences start again elsewhere, and what was
cached is recomputed from their tokens, prompt and generated alike. Since a
token depends on the sequence alone, the text goes on as if nothing had
happened.
"""

from __future__ import annotations

import time
from collections.abc import Container
from collections.abc import Sequence as Seq
from copy import copy
from typing import Final

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Listener
from fastdecode.core.errors import FastDecodeError, duplicate_id, without_frames
from fastdecode.core.sequence import Request
from fastdecode.engine.executor import Executor, Watch
from fastdecode.engine.figures import EngineFigures, figures_of
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.recovery import Recovery
from fastdecode.engine.requests import Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.text.codec import TextCodec
from sworker.failures import typed_failures
from sworker.worker import SWorker


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and
    steps.

    Args:
        s_worker: every layer that has weights.
        pipeline: runs the lanes' steps.
        fleet: the holders.
        lifecycle: decides what is opened, what steps, and what becomes of whom.
        codec: between text and token ids.
        eos_token_ids: any of them ends a sequence, unless the request ignores
            EOS.
        recovery: lets in those that come in the place of lost holders; None:
            nobody comes.
        watch: who is told.
    """

    def __init__(
        self,
        s_worker: SWorker,
        pipeline: Pipeline,
        fleet: Fleet,
        lifecycle: Lifecycle,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        recovery: Recovery | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._lifecycle = lifecycle
        self.requests: Final = Requests(codec, eos_token_ids, s_worker.spec.vocab_size)
        """Those that are waiting or running."""
        self._recovery = recovery or Recovery(fleet)
        self.broken: FastDecodeError | None = None
        """Why a step broke down, after which it takes no requests any more."""
        hybrid = lifecycle.scheduler.hybrid
        replicas = self._recovery.replicas
        self.stats = EngineStats(
            hybrid=None if hybrid is None else hybrid.counts,
            replicas=None if replicas is None else replicas.figures,
            resumed=lifecycle.adoptions.counts,
            tiers=lifecycle.scheduler.ledger.cache.stock.traffic.counts,
        )
        self._executor = Executor(
            s_worker,
            pipeline,
            fleet,
            lifecycle,
            self._recovery,
            watch or Watch(),
            self.requests,
            self.stats,
        )

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that are waiting or running: a request's n."""
        return self.requests.num_sequences

    @property
    def num_running(self) -> int:
        """Sequences that are running, or about to."""
        return self._lifecycle.scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: for requests, or for what is left of cancelled ones."""
        return bool(self.requests) or self._executor.is_busy

    @property
    def pause_s(self) -> float:
        """How long a step would do nothing, whatever work there is: all
        R-workers are lost, and others are looked for; or other instances are
        waited for."""
        return self._recovery.pause_s or self._executor.handing.pause_s

    def figures(self) -> EngineFigures:
        """What it tells of itself, between two steps."""
        return figures_of(self.stats, self._lifecycle.scheduler, self._fleet)

    def give_role(self, role: InstanceRole) -> None:
        """What it will be given from now on, one instance among others."""
        self._lifecycle.scheduler.set_whole_prompts(role is InstanceRole.PREFILL)

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a valid request. ``listener`` is told what it says, and its
        error if a step ends it with one.

        Raises:
            RequestError: an unfinished request has the same id, or its text
                can't be made.
            CapacityError: the request could never fit on any R-worker; nothing
                was queued.
            FastDecodeError: the engine broke down before, with this error.
        """
        if self.broken is not None:
            raise copy(self.broken)
        if request.request_id in self.requests:
            raise duplicate_id(request.request_id)
        self._executor.tell(events.Submitted(request))
        sequences = self._lifecycle.lives.sequences(request.request_id)
        try:
            self.requests.add(request, sequences, time.perf_counter(), listener)
        except FastDecodeError:
            self._executor.tell(events.Cancelled(request.request_id))
            raise

    def end_conversation(self, token_ids: Seq[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""
        self._executor.tell(events.Ended(tuple(token_ids), salt))

    def step(self) -> None:
        """Run until some lane has finished a step, or until there is nothing to
        run (see ``pause_s``).

        Raises:
            WorkerError: no R-worker is left, or the S-worker failed.
                ``abandon`` is all that can be done then.
        """
        with typed_failures():
            self._executor.step()

    def look(self) -> None:
        """Find out who of the R-workers is lost, and who has come, while there
        is no work: steps do so otherwise.

        Raises:
            WorkerError: no R-worker is left.
        """
        self._executor.look()

    def set_num_lanes(self, num_lanes: int) -> None:
        """Go on with so many lanes, when the steps in flight have ended."""
        self._executor.regroup(num_lanes)

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request; False if there is none of this id. What
        it holds is free as soon as the step in flight is over, at the
        latest."""
        if request_id not in self.requests:
            return False
        self.requests.forget(request_id)
        self._executor.tell(events.Cancelled(request_id))
        return True

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget the requests, ``among`` these or all, of which nothing has run
        yet. Returns their ids."""
        untouched = self._lifecycle.lives.untouched_requests()
        waiting = [request_id for request_id in untouched if among is None or request_id in among]
        for request_id in waiting:
            self.cancel(request_id)
        return waiting

    def abandon(self, error: FastDecodeError) -> None:
        """A step broke down: end every unfinished request with this error. The
        engine takes no requests from then on, since what its R-workers hold is
        unknown."""
        self.broken = without_frames(error)
        self.requests.fail_all(error)
