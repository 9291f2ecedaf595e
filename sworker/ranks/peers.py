"""Whether the other ranks are still there: a process that ends is noticed, also
in the middle of a collective, which says nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastdecode.core.errors import WorkerError
from sworker.failures import DEVICE_ERRORS
from sworker.ranks.sharding import Shard

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0  # a connection may break this long before its process has ended
_STUCK_S = 30.0  # how long collectives on a GPU may take to notice that they were aborted


class PeerWatch:
    """Watches processes of this host, by what Linux calls a pidfd. Elsewhere nothing is noticed.

    Args:
        on_end: Called once, in a separate thread, with the ranks that have ended, when the
            first does.
    """

    def __init__(self, processes: Mapping[int, int], on_end: Callable[[list[int]], None]) -> None:
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._gone: list[int] = []  # ended before they could be watched
        self._on_end = on_end
        for rank, process in processes.items():
            try:
                self._ranks[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self._gone.append(rank)
            except (AttributeError, OSError):
                continue  # not on this system
        self._wakes, self._woken_by = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """The ranks that have ended; waits until one has, ``wait_s`` at most."""
        if self._gone:
            return self._gone
        return self._poll(int(wait_s * 1000))

    def close(self) -> None:
        """Watch no more."""
        os.close(self._woken_by)
        self._thread.join()
        for fd in (self._wakes, *self._ranks):
            os.close(fd)

    def _poll(self, timeout_ms: int | None, *others: int) -> list[int]:
        poll = select.poll()
        for fd in (*self._ranks, *others):
            poll.register(fd, select.POLLIN)
        return [self._ranks[fd] for fd, _ in poll.poll(timeout_ms) if fd in self._ranks]

    def _watch(self) -> None:
        ended = self._gone or self._poll(None, self._wakes)
        if ended:
            self._on_end(ended)


@dataclass
class Peers:
    """Whether the other ranks are still there, in the middle of a step too.

    Args:
        data: the connections that are broken when a rank has ended.
        patience_s: how long a rank may keep another one waiting in the middle of a step.
    """

    shard: Shard
    device: torch.device
    data: dist.ProcessGroup
    patience_s: float
    stuck: threading.Timer | None = None  # ends this process if it doesn't ``close`` in time
    _watch: PeerWatch | None = None
    _out_of_step: bool = False
    """A step broke off in the middle: some rank waits for what will never come, or hangs itself."""

    def watch(self, processes: Mapping[int, int]) -> None:
        """Watch the others, rank → process id, from now on."""
        self._watch = PeerWatch(processes, self._on_end)

    def _on_end(self, ended: list[int]) -> None:
        """In a thread of its own: another rank has ended. Connections of gloo
        break by themselves; collectives on a GPU would wait for ever."""
        if self.device.type != "cuda":
            return
        logger.critical("%s", self._lost(ended))
        self.stuck = threading.Timer(_STUCK_S, os._exit, (WorkerError.exit_code,))
        self.stuck.daemon = True
        self.stuck.start()
        backend = self.data._get_backend(self.device)
        abort = getattr(backend, "abort", None) or getattr(backend, "_abort", None)
        if abort is not None:
            abort()

    def check(self) -> None:
        """See that all ranks are still there.

        Raises:
            WorkerError: If one has ended: recent exchanges can't be trusted then.
        """
        if ended := self._ended():
            raise self._lost(ended)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Let ranks compute together within. Errors stay as they are, unless a rank has ended:
        then results can't be relied on.

        Raises:
            WorkerError: If a rank has ended, or keeps this one waiting for too long, or if an
                earlier step broke off, and the others are still in the middle of it.
        """
        self.check()
        if self._out_of_step:
            raise WorkerError(
                f"S-worker {self.shard.rank} of {self.shard.size} failed in an earlier "
                "step, and the others still wait in it: see its error above, and restart the job",
                code="tp_out_of_step",
            )
        try:
            yield
        except BaseException as error:
            ended = self._ended(_LAST_WORDS_S if isinstance(error, RuntimeError) else 0)
            self._out_of_step |= not ended
            if (
                ended
                and isinstance(error, RuntimeError)
                and not isinstance(error, torch.OutOfMemoryError)
            ):
                raise self._lost(ended, error) from error
            raise

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within is nothing but a collective: if it fails, it is another rank's
        doing; but not while a CUDA graph is captured, when nothing runs."""
        captures = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        try:
            yield
        except DEVICE_ERRORS:
            raise  # not of who is waited for: what a GPU computed before may fail only now
        except RuntimeError as error:
            if captures:
                raise
            raise self._lost(self._ended(_LAST_WORDS_S), error) from error

    def _ended(self, wait_s: float = 0.0) -> list[int]:
        return self._watch.ended(wait_s) if self._watch is not None else []

    def _lost(self, ended: list[int], error: RuntimeError | None = None) -> WorkerError:
        others = [rank for rank in range(self.shard.size) if rank != self.shard.rank]
        names = f"S-worker {' and '.join(map(str, ended or others))} of {self.shard.size}"
        what = (
            "has ended"
            if ended
            else f"doesn't go on, or not within {self.patience_s:g} s (worker_timeout_s)"
        )
        if error is not None and not ended:
            # Leave out the places in their source code that gloo and NCCL name, and their advice.
            first_line = str(error).splitlines()[0]
            what += ": " + re.sub(r"^\[[^]]*\] *", "", first_line).split(". ")[0]
        return WorkerError(
            f"{names} {what}. Without its part of every layer the job can't go on: see that rank's "
            "own output, and start the job again (fastdecode run-batch --resume keeps what is "
            "done)",
            code="tp_rank_lost",
        )

    @property
    def is_in_step(self) -> bool:
        """No step broke off: nobody waits for this rank."""
        return not self._out_of_step

    def close(self) -> bool:
        """Watch no more. Returns whether all are there and in step."""
        is_whole = self.is_in_step and not self._ended()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.stuck is not None:
            self.stuck.cancel()
        return is_whole
