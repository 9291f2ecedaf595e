"""A cluster of instances whose members are started again when they were killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

from instance_processes import ENGINE, PATHS, SILENCE_S, instance, ready
from mpi_launch import Running, running
from news import NewsLLM
from small_jobs import FASTDECODE

KINDS = ("prefill", "decode", "controller", "prefill's R-worker", "decode's R-worker")
SLOW = ("--fetch-gbps", "0.004")
"""A prompt takes some tenths of a second to fetch."""


class Member:
    """A process of the cluster, started again when it was killed."""

    def __init__(self, start: Callable[[str], contextlib.AbstractContextManager[Running]]) -> None:
        self._start = start
        self._stack = contextlib.ExitStack()
        self.address = ""
        self.begin()

    def begin(self) -> None:
        """Start it, at its address if it had one."""
        port = self.address.rpartition(":")[2] or "*"
        self.job = self._stack.enter_context(self._start(port))

    def wait(self) -> None:
        self.address = ready(self.job, "").address

    def hurt(self, trouble: str) -> None:
        os.kill(self.job.pid, getattr(signal, trouble))

    def mend(self, trouble: str) -> None:
        """It is there again."""
        if trouble == "SIGSTOP" and self.job.process.is_running():
            os.kill(self.job.pid, signal.SIGCONT)
        if trouble == "SIGKILL":
            self._stack.close()
            self._stack = contextlib.ExitStack()
            self.begin()
            self.wait()

    def is_over(self) -> bool:
        return self.job.process.status() == "zombie" if self.job.process.is_running() else True

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.job.pid, signal.SIGCONT)
        self._stack.close()


class Cluster:
    """Members, by kind."""

    def __init__(self, model: str, *, with_r_workers: bool) -> None:
        self.model = model
        self.members: dict[str, list[Member]] = {kind: [] for kind in KINDS}
        try:
            self._begin(with_r_workers)
        except BaseException:
            self.close()
            raise

    def _begin(self, with_r_workers: bool) -> None:
        for role in ("prefill", "decode"):
            own = self.members[f"{role}'s R-worker"]
            if with_r_workers:
                own += [Member(_r_worker) for _ in range(2)]
                for member in own:
                    member.wait()
            words = [word for x in own for word in ("--r-worker", x.address)]
            self.members[role] = [
                Member(self._instance(role, words)) for _ in range(1 if with_r_workers else 2)
            ]
        for member in self.instances:
            member.wait()

    def _instance(
        self, role: str, words: list[str]
    ) -> Callable[[str], contextlib.AbstractContextManager[Running]]:
        engine = ENGINE if not words else tuple(_without(ENGINE, "--r-threads", "--kv-memory-gb"))
        return lambda port: instance(self.model, role, *SLOW, *words, port=port, engine=engine)

    @property
    def instances(self) -> list[Member]:
        return [*self.members["prefill"], *self.members["decode"]]

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in self.instances]

    def controller(self) -> NewsLLM:
        return NewsLLM(
            self.model,
            instances=self.addresses,
            worker_silence_s=SILENCE_S,
            worker_timeout_s=30.0,
        )

    def close(self) -> None:
        for member in itertools.chain.from_iterable(self.members.values()):
            member.close()


def _without(words: tuple[str, ...], *names: str) -> Iterator[str]:
    pairs = zip(words[::2], words[1::2], strict=True)
    for name, value in pairs:
        if name not in names:
            yield from (name, value)


@contextlib.contextmanager
def _r_worker(port: str) -> Iterator[Running]:
    command = [*FASTDECODE, "r-worker", "--threads", "1", "--kv-memory-gb", "0.004"]
    command += ["--keep-serving", "--silence-s", str(SILENCE_S), "--return-s", "0"]
    command += ["--session-keep-s", "0"]
    with running([*command, "--bind", f"tcp://127.0.0.1:{port}"], **PATHS) as job:
        yield job
