"""A small model, requests for it, and jobs that answer them: what every part of
the campaign has in common."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi_launch import Outcome, Running, mpirun, open_mpi_options, running
from random_llama import llama_config, write_checkpoint

ROOT = Path(__file__).parents[2]
FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(ROOT)}
NUM_LINES = 6
SILENCE_S = 2.0
LIMIT_S = 400.0
"""A job that takes longer hangs."""
LAST_WORDS = 3000
"""Characters of a job's output that are kept."""
_DIRECTORIES = re.compile(r"/(?:[\w.+-]+/)+")
KV_MEMORY = ["--kv-memory-gb", "0.02"]
PARTITIONS = {
    "sequences": [],
    "heads": ["--r-partition", "heads"],
    "split": ["--split-tokens", "64"],
    "replicas": ["--replicas", "1"],
    "replaced": ["--replicas", "1", "--spare-r-workers", "3"],
    "heads replicas": ["--r-partition", "heads", "--replicas", "1"],
    "heads replaced": ["--r-partition", "heads", "--replicas", "1", "--spare-r-workers", "3"],
}
"""How sequences are shared out, whether they are kept twice, and whether others
come in the place of those that are lost: at their addresses, over ZeroMQ."""
SHAPE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 16}  # fmt: skip
PHASES = ("start", "greeting", "prompts", "decoding", "end")
"""Of a job, in their order. ``start`` is all before R-workers are greeted:
imports, ranks that join, loading."""


def lines(times: int = 1) -> list[dict[str, Any]]:
    """The first is done long before the others; every other one is sampled.
    ``times``: so many times as long."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    return [
        {"id": str(i), "prompt_token_ids": [(7 * i + 3 * j) % 500 + 1 for j in range(20 + 40 * i)],
         "ignore_eos": True, "max_tokens": times * (90 + 20 * i) if i else 3, **({**sampled,
             "seed": i} if i % 2 else {"temperature": 0})}
        for i in range(NUM_LINES)
    ]  # fmt: skip


NOBODY_CAN = ("the MPI job can't begin", "MPI hasn't returned")
"""Said by jobs that end because MPI can't go on, as docs/guides/cluster.md says."""


@dataclass(frozen=True)
class Ended:
    """How a job did: its answers are held against those of one in which nothing happens."""

    exit_code: int | None
    seconds: float
    num_missing: int
    num_changed: int
    orphans: list[str]
    last_words: str
    """Without paths of this machine."""

    @property
    def is_hung(self) -> bool:
        return self.exit_code is None or bool(self.orphans)

    @property
    def is_right(self) -> bool:
        """Everything was answered, as it should be."""
        return not self.is_hung and not self.num_changed and not self.num_missing

    @property
    def verdict(self) -> str:
        """Where R-workers were lost, and one would do."""
        if self.is_hung:
            return "hung"
        if self.num_changed:
            return "changed"
        if not self.num_missing:
            return "right"
        told = self.exit_code == 4 and any(words in self.last_words for words in NOBODY_CAN)
        return "ended by MPI" if told else "lost"

    def shown(self) -> dict[str, Any]:
        """For a table."""
        told = {**vars(self), "verdict": self.verdict}
        if self.is_right and not self.exit_code:
            del told["last_words"]
        return told


@dataclass(frozen=True)
class Job:
    """One under way."""

    command: Running
    """The S-worker's process, or the launcher's."""
    r_workers: tuple[Running, ...]
    """At addresses; ranks belong to ``command``."""

    def victims(self) -> list[Any]:
        """R-workers' processes that may be hit."""
        if self.r_workers:
            return [process for worker in self.r_workers for process in worker.processes()]
        return [process for process in self.command.processes() if is_r_rank(process)]

    def target(self, name: str) -> Any | None:
        """The process that is told to stop, once it is there: by a word of its command line."""
        found = [p for p in self.command.processes() if name in words_of(p)]
        return min(found, key=lambda process: process.pid) if found else None


class SmallJobs:
    """Starts them.

    Args:
        directory: for the model, the requests and their answers.
        times: as of ``lines``.
    """

    def __init__(self, directory: Path, times: int = 1) -> None:
        self.directory = directory
        self.model, self.input, self.output = (
            directory / name for name in ("model", "in.jsonl", "out.jsonl")
        )
        self.model.mkdir()
        write_checkpoint(self.model, llama_config(**SHAPE, max_position_embeddings=2048), "random")
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines(times)))
        self.expected: dict[str, Any] = {}
        """Answers of a job in which nothing happens."""
        with running([*FASTDECODE, *self.words("generate"), *KV_MEMORY], **PATHS) as job:
            outcome = job.wait(LIMIT_S)
        assert outcome.exit_code == 0, outcome
        self.expected = self.answers()

    def words(self, command: str) -> list[str]:
        """What makes a job of these requests."""
        shared = ["--dtype", "float32", "--prefill-chunk", "16", "--log-level", "warning"]
        if command == "serve":
            return [command, str(self.model), "--port", "0", *shared]
        return [command, "--model", str(self.model), "--input", str(self.input), "--output",
                str(self.output), *shared]  # fmt: skip

    def clear(self) -> None:
        """Throw away what the last job wrote."""
        for path in self.directory.glob("out.jsonl*"):
            path.unlink()

    @contextlib.contextmanager
    def start(
        self,
        transport: str,
        num_r_workers: int,
        options: Sequence[str] = (),
        command: str = "generate",
        *,
        num_s_ranks: int = 1,
        **environ: str,
    ) -> Iterator[Job]:
        """A job over ``zmq``, ``launch`` or plain ``mpi``, or in one process.
        ``num_s_ranks``: of stages, over MPI, which may have no R-workers."""
        words = [*self.words(command), *options, "--worker-silence-s", str(SILENCE_S)]
        environ = {**PATHS, **environ}
        if transport == "inproc":
            here = ["--r-workers", str(num_r_workers), "--r-threads", "1", *KV_MEMORY]
            with running([*FASTDECODE, *words, *here], **environ) as job:
                yield Job(job, ())
            return
        if transport == "zmq":
            with (
                addresses(num_r_workers, environ) as (workers, at),
                running([*FASTDECODE, *words, *at], **environ) as job,
            ):
                yield Job(job, workers)
            return
        line = [*FASTDECODE, "launch", "--hosts", f"localhost:{num_r_workers or num_s_ranks}"]
        line += ["--r-threads", "1", *KV_MEMORY] if num_r_workers else []
        line += ["--", *words]
        if transport == "mpi":
            line = [mpirun(), *open_mpi_options(), "-n", str(num_s_ranks), *FASTDECODE, *words]
            r_workers = [":", "-n", str(num_r_workers), *FASTDECODE, *R_WORKER]
            line += r_workers if num_r_workers else []
        with running(line, **environ) as job:
            yield Job(job, ())

    def answers(self) -> dict[str, Any]:
        """Tokens by id; requests that failed aren't there."""
        found: dict[str, Any] = {}
        if self.output.exists():
            for text in self.output.read_text().splitlines():
                line = json.loads(text)  # every line is whole
                if "error" not in line:
                    found[str(line["id"])] = line["token_ids"]
        return found

    def ended(self, outcome: Outcome) -> Ended:
        """What became of a job that is over."""
        answers = self.answers()
        words = _DIRECTORIES.sub("", outcome.output).strip()[-LAST_WORDS:]
        return Ended(
            outcome.exit_code,
            outcome.seconds,
            len(self.expected) - len(answers),
            sum(answers[key] != self.expected[key] for key in answers),
            outcome.orphans,
            words,
        )

    def has_begun(self, job: Job, phase: str) -> Callable[[], bool]:
        """Whether a phase has: an event that any process can see."""

        def greeted() -> bool:
            told = job.command.output()
            return "greeting" in told or "no R-workers: " in told

        def num_done() -> int:
            with contextlib.suppress(FileNotFoundError):
                return self.output.read_text().count("\n")
            return 0

        return {
            "start": lambda: bool(job.victims()),
            "greeting": greeted,
            "prompts": lambda: greeted() and self.output.exists(),
            "decoding": lambda: num_done() >= 1,
            "end": lambda: num_done() >= NUM_LINES - 2,
        }[phase]


R_WORKER = ["r-worker", "--threads", "1", *KV_MEMORY]


@contextlib.contextmanager
def addresses(
    number: int, environ: dict[str, str]
) -> Iterator[tuple[tuple[Running, ...], list[str]]]:
    """R-workers that listen, and how to name them."""
    bind = ["--bind", "tcp://127.0.0.1:*", "--silence-s", str(SILENCE_S), "--return-s", "10"]
    with contextlib.ExitStack() as stack:
        command = [*FASTDECODE, *R_WORKER, *bind]
        workers = [stack.enter_context(running(command, **environ)) for _ in range(number)]
        at = [address_of(worker) for worker in workers]
        yield tuple(workers), [word for one in at for word in ("--r-worker", one)]


def address_of(worker: Running) -> str:
    """At which an R-worker listens."""
    worker.wait_until(lambda: " listens at " in worker.output() and worker.output().endswith("\n"))
    return worker.output().split(" listens at ")[1].split()[0]


def options_of(partition: str, transport: str) -> list[str]:
    """Of a job. Over ZeroMQ others come at the addresses of those that are lost."""
    options = PARTITIONS[partition]
    return options[:-2] if transport == "zmq" and is_replaced(partition) else options


def is_replaced(partition: str) -> bool:
    """Whether others come in the place of those that are lost."""
    return partition.endswith("replaced")


def addresses_again(job: Job, index: int = 0) -> contextlib.AbstractContextManager[Running]:
    """An R-worker in the place of one of the job's, which has died."""
    bind = ["--bind", address_of(job.r_workers[index]), "--return-s", "10"]
    return running([*FASTDECODE, *R_WORKER, *bind, "--silence-s", str(SILENCE_S)], **PATHS)


def is_r_rank(process: Any) -> bool:
    with contextlib.suppress(Exception):  # it has ended
        return int(process.environ().get("OMPI_COMM_WORLD_RANK", 0)) > 0
    return False


def words_of(process: Any) -> list[str]:
    with contextlib.suppress(Exception):
        return list(process.cmdline())
    return []
