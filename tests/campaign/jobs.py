"""Batch jobs whose processes are killed, stopped and told to stop at random moments.

One table, ``KINDS``: how a job is started, and which of its processes may be struck. What must
hold follows from what was struck:

* an R-worker, or a rank of an instance while another instance of its role is left: every answer
  equals the undisturbed job's;
* a later stage: the job ends with exit code 4 and names it;
* the first S-worker, or the controller: the same command with ``--resume`` gives the rest;
* the command, by a signal: exit code 130, and ``--resume`` gives the rest.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from mpi_launch import Running, running
from random_llama import llama_config, write_checkpoint

from fastdecode.core.config.instances import Instances
from fastdecode.core.config.placement import PLACEMENT_FORMAT
from fastdecode.wire.mpi.roles import InstanceRanks

ROOT = Path(__file__).parents[2]
FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(ROOT)}
SILENCE_S = 2.0
LIMIT_S = 400.0
"""A job that takes longer hangs."""
PARTING_S = 25.0
"""R-workers at addresses listen for another S-worker for 10 s."""
KV_MEMORY = ["--kv-memory-gb", "0.02"]
R_WORKER = ["r-worker", "--threads", "1", *KV_MEMORY]
SHAPE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 16}  # fmt: skip
PHASES = ("start", "greeting", "prompts", "decoding", "end")
"""Phases of a job in order. ``start``: imports, ranks that join, loading."""
NUM_LINES = 6
NUM_TURNS = 3
_DIRECTORIES = re.compile(r"/(?:[\w.+-]+/)+")
_CANNOT_BEGIN = ("the MPI job can't begin", "MPI hasn't returned")
"""Words of jobs that lost a rank without which MPI can't continue (docs/guides/cluster.md)."""


@dataclass(frozen=True)
class Kind:
    """How jobs of a kind are started."""

    transports: tuple[str, ...] = ("zmq", "launch")
    num_r_workers: int = 4
    """R-workers, standby ones included. One of them is never struck."""
    options: tuple[str, ...] = ()
    num_s_ranks: int = 1
    instances: tuple[str, ...] = ()
    """``--instances`` of a job of instance ranks, in place of the numbers above."""
    strikes: tuple[str, ...] = ("R-worker",)
    """What may be struck: ``R-worker``, ``stage``, ``instance``, ``first`` or ``command``."""
    are_turns: bool = False
    """The lines are turns of conversations."""


_HEADS = ("--r-partition", "heads")
_REPLICAS = ("--replicas", "1")
_STAGES = ("--prefill-chunk", "4", "--max-num-sequences", "3")
"""Prompts arrive all the time: few run at once, in small chunks."""
_MPI = ("launch",)
_EVERY = ("R-worker", "first", "command")
KINDS = {
    "whole sequences": Kind(strikes=_EVERY),
    "shared heads": Kind(options=_HEADS, strikes=_EVERY),
    "split sequences": Kind(options=("--split-tokens", "64"), strikes=_EVERY),
    "replicas": Kind(options=_REPLICAS, strikes=_EVERY),
    "heads with replicas": Kind(options=(*_HEADS, *_REPLICAS), strikes=_EVERY),
    "standby": Kind(_MPI, 6, (*_REPLICAS, "--spare-r-workers", "2")),
    "conversations": Kind(("inproc", "zmq"), 2, ("--prefix-cache", "on", "--block-size", "16"),
                          strikes=("first", "command"), are_turns=True),
    "two stages": Kind(_MPI, 6, ("--pp", "2", *_STAGES), 2, strikes=("R-worker", "stage")),
    "stages with replicas": Kind(_MPI, 6, ("--pp", "2", *_REPLICAS, *_STAGES), 2,
                                 strikes=("R-worker", "stage")),
    "prompt stages": Kind(_MPI, 6, ("--pp", "2", "--prompt-pp", "1", *_STAGES), 3,
                          strikes=("R-worker", "stage")),
    "prompt stages to heads": Kind(_MPI, 3, ("--prompt-pp", "1", *_HEADS, *_STAGES), 2,
                                   strikes=("R-worker", "stage")),
    "tensor parallelism": Kind(_MPI, 4, ("--pp", "2", "--tp", "2", "--worker-timeout-s", "30",
                                         *_STAGES), 4, strikes=("stage",)),
    "swapped lanes": Kind(_MPI, 0, ("--pp", "3", "--kv-placement", "swap", *KV_MEMORY, *_STAGES), 3,
                          strikes=("stage",)),
    "instances": Kind(_MPI, instances=("prefill:1", "prefill:1", "decode:1", "decode:1"),
                      options=("--fetch-gbps", "0.01"), strikes=("instance", "first")),
    "instances of several S-workers": Kind(
        _MPI, instances=("prefill:1:tp=2", "decode:2:pp=2", "decode:1"),
        options=("--fetch-gbps", "0.01"), strikes=("instance", "first")),
}  # fmt: skip
SIGNALS = {
    "R-worker": ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM"),
    "stage": ("SIGKILL", "SIGSTOP"),
    "instance": ("SIGKILL", "SIGSTOP"),
    "first": ("SIGKILL",),
    "command": ("SIGINT", "SIGTERM"),
}


@dataclass(frozen=True)
class Blow:
    """A signal to one process."""

    phase: str
    trouble: str
    whom: str
    """A word of ``SIGNALS``."""
    number: int = 0
    """Rank in an MPI job. Place among the R-workers over ZeroMQ."""


@dataclass(frozen=True)
class Struck:
    """A job and its blows, in order."""

    kind: str
    transport: str
    blows: tuple[Blow, ...]

    @property
    def whom(self) -> str:
        return self.blows[0].whom


@dataclass
class Report:
    """What became of a job."""

    job: Struck
    hits: list[str]
    """Blows for which the process existed in time."""
    exit_code: int | None
    seconds: float
    num_missing: int
    num_changed: int
    orphans: list[str]
    is_named: bool
    """True if the output names the rank that was lost."""
    resumed_code: int | None
    """Exit code of the run with ``--resume``. None if there was none."""
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.orphans:
            return "hung"
        if self.num_changed:
            return "changed"
        if not self.hits:
            return "right" if self.exit_code == 0 and not self.num_missing else "failed by itself"
        if self.job.whom in ("first", "command"):
            if self.num_missing or self.resumed_code not in (None, 0):
                return "not resumed"
            is_told = self.job.whom == "first" or self.exit_code in (0, 130) or self._by_itself
            return "right" if is_told else "other exit code"
        if not self.num_missing:
            return "right"
        if self.exit_code == 4 and any(each in self.last_words for each in _CANNOT_BEGIN):
            return "ended by MPI"
        if self.job.whom != "stage":
            return "lost"
        if self.exit_code != 4:
            return "other exit code"
        return "right" if self.is_named else "unnamed"

    @property
    def _by_itself(self) -> bool:
        """True if the signal ended the process before Python had come to our code."""
        (blow,) = self.job.blows
        return blow.phase == "start" and self.exit_code == -signal.Signals[blow.trouble]

    def row(self) -> dict[str, Any]:
        shown = {**asdict(self), "verdict": self.verdict}
        if self.verdict == "right":
            del shown["last_words"]
        return shown


def drawn(number: int, chance: random.Random, of: str = "") -> list[Struck]:
    """Return ``number`` jobs: every kind, transport and victim in turn, shuffled.

    Args:
        of: Beginning of the kinds' names.
    """
    every = [
        (name, transport, whom)
        for name, kind in KINDS.items()
        if name.startswith(of)
        for transport in kind.transports
        for whom in kind.strikes
    ]
    chosen: list[Struck] = []
    while len(chosen) < number:
        for name, transport, whom in chance.sample(every, len(every)):
            blows = _blows(KINDS[name], transport, whom, chance)
            chosen.append(Struck(name, transport, blows))
    return chosen[:number]


def _blows(kind: Kind, transport: str, whom: str, chance: random.Random) -> tuple[Blow, ...]:
    numbers = _victims(kind, transport, whom)
    if whom == "R-worker":  # one of them, or one of every stage, is left
        numbers = [each for each in numbers if _column(kind, transport, each)]
        numbers = chance.sample(numbers, chance.randint(1, len(numbers)))
    else:
        numbers = [chance.choice(numbers)]
    phases = sorted((chance.choice(PHASES) for _ in numbers), key=PHASES.index)
    if whom == "R-worker":
        phases = [
            phase if phase != "start" or transport == "zmq" else "greeting" for phase in phases
        ]
    return tuple(
        Blow(phase, chance.choice(SIGNALS[whom]), whom, number)
        for phase, number in zip(phases, numbers, strict=True)
    )


def _victims(kind: Kind, transport: str, whom: str) -> list[int]:
    if kind.instances and whom == "instance":
        placed = Instances(instances=kind.instances).placed
        ranks = InstanceRanks(placed)
        roles = Counter(each.role for each in placed)
        return [
            rank for rank in range(1, ranks.size) if roles[placed[ranks.instance_of(rank)].role] > 1
        ]
    if whom == "R-worker":
        first = 0 if transport == "zmq" else kind.num_s_ranks
        return list(range(first, first + kind.num_r_workers))
    return list(range(1, kind.num_s_ranks)) if whom == "stage" else [0]


def _column(kind: Kind, transport: str, number: int) -> int:
    """Place of an R-worker among those of its stage."""
    words = kind.options
    pp = int(words[words.index("--pp") + 1]) if "--pp" in words else 1
    first = 0 if transport == "zmq" else kind.num_s_ranks
    return (number - first) % (kind.num_r_workers // pp)


def lines(*, are_turns: bool) -> list[dict[str, Any]]:
    """Return requests; every other one is sampled. The first ends long before the others."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    return [
        {
            "id": f"{i + NUM_LINES * turn}",
            "prompt_token_ids": [(7 * i + 5 * turn + 3 * j) % 500 + 1 for j in range(20 + 30 * i)],
            "ignore_eos": True,
            "max_tokens": 60 + 20 * i if i else 3,
            **({**sampled, "seed": i} if i % 2 else {"temperature": 0}),
            **({"conversation_id": f"c{i}"} if are_turns else {}),
        }
        for turn in range(NUM_TURNS if are_turns else 1)
        for i in range(NUM_LINES)
    ]


@dataclass(frozen=True)
class Job:
    """A job that runs."""

    command: Running
    """Process of the S-worker, or of the launcher."""
    r_workers: tuple[Running, ...] = ()
    """R-workers at addresses. Ranks belong to ``command``."""

    def processes(self, blow: Blow) -> list[psutil.Process]:
        """Return the process that a blow strikes, if it exists."""
        if blow.whom == "R-worker" and self.r_workers:
            return self.r_workers[blow.number].processes()
        every = self.command.processes()
        if blow.whom == "command" or not any(map(_rank_of, every)):
            return sorted(every, key=lambda process: process.pid)[:1]
        return [process for process in every if _rank_of(process) == str(blow.number)]


class Jobs:
    """Runs jobs and strikes them.

    Args:
        directory: Holds the model, the requests and their answers.
        chance: Draws the moments.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._chance = chance
        self._directory = directory
        self._model, self._output = directory / "model", directory / "out.jsonl"
        self._model.mkdir()
        write_checkpoint(self._model, llama_config(**SHAPE, max_position_embeddings=2048), "random")
        self._expected: dict[bool, dict[str, Any]] = {}
        self._lengths: dict[tuple[str, str], dict[str, float]] = {}
        for are_turns in (False, True):
            text = "".join(json.dumps(line) + "\n" for line in lines(are_turns=are_turns))
            self._input(are_turns).write_text(text)
            self._clear()
            plain = Struck("conversations" if are_turns else "whole sequences", "inproc", ())
            with self._start(plain) as job:
                outcome = job.command.wait(LIMIT_S)
            assert outcome.exit_code == 0, outcome.output
            self._expected[are_turns] = self._answers()

    def strike(self, job: Struck) -> Report:
        """Run a job, and run it again with ``--resume`` if its first process was struck."""
        lengths = self._lengths_of(job)
        self._clear()
        with self._start(job) as started:
            hits = list(self._hit(started, job, lengths))
            outcome = started.command.wait(LIMIT_S)
            orphans = [*outcome.orphans, *self._left(started, job)]
        resumed = None
        if hits and job.whom in ("first", "command") and outcome.exit_code != 0:
            with self._start(job, "--resume") as started:
                again = started.command.wait(LIMIT_S)
                resumed, orphans = again.exit_code, [*orphans, *again.orphans]
        answers, expected = self._answers(), self._expected[KINDS[job.kind].are_turns]
        names = [name for blow in job.blows for name in self._names(job, blow)]
        return Report(
            job,
            [f"{blow.phase} {blow.whom} {blow.trouble}" for blow in hits],
            outcome.exit_code,
            round(outcome.seconds, 1),
            len(expected) - len(answers),
            sum(answers[key] != expected[key] for key in answers),
            orphans,
            any(name in outcome.output for name in names),
            resumed,
            _DIRECTORIES.sub("", outcome.output).strip()[-3000:],
        )

    def _hit(self, started: Job, job: Struck, lengths: dict[str, float]) -> Iterator[Blow]:
        """Yield the blows that come in time."""
        shared = Counter(blow.phase for blow in job.blows)
        with contextlib.suppress(AssertionError):  # the job has ended: the verdict says how
            for blow in job.blows:
                started.command.wait_until(self._has_begun(started, blow.phase), timeout_s=LIMIT_S)
                length_s = lengths[blow.phase] / shared[blow.phase]
                end_s = time.monotonic() + self._chance.uniform(0, length_s)
                started.command.wait_until(lambda end_s=end_s: time.monotonic() >= end_s)
                for victim in started.processes(blow):
                    with contextlib.suppress(psutil.Error):  # it has ended
                        victim.send_signal(signal.Signals[blow.trouble])
                        yield blow

    def _lengths_of(self, job: Struck) -> dict[str, float]:
        """Return the seconds of each phase of an undisturbed job of this kind."""
        key = job.kind, job.transport
        if key not in self._lengths:
            self._clear()
            begins = []
            with self._start(job) as started:
                for phase in PHASES:
                    started.command.wait_until(self._has_begun(started, phase), timeout_s=LIMIT_S)
                    begins.append(time.monotonic())
                outcome = started.command.wait(LIMIT_S)
            expected = self._expected[KINDS[job.kind].are_turns]
            assert outcome.exit_code == 0 and self._answers() == expected, outcome
            begins.append(time.monotonic())
            self._lengths[key] = {
                phase: max(0.05, begins[i + 1] - begins[i]) for i, phase in enumerate(PHASES)
            }
        return self._lengths[key]

    def _has_begun(self, job: Job, phase: str) -> Any:
        """Return a condition on what any process can see."""

        def has_greeted() -> bool:
            said = job.command.output()
            return "greeting" in said or "no R-workers: " in said or self._output.exists()

        def num_done() -> int:
            with contextlib.suppress(FileNotFoundError):
                return self._output.read_text().count("\n")
            return 0

        return {
            "start": lambda: bool(job.command.processes()),
            "greeting": has_greeted,
            "prompts": self._output.exists,
            "decoding": lambda: num_done() >= 1,
            "end": lambda: num_done() >= NUM_LINES - 2,
        }[phase]

    @contextlib.contextmanager
    def _start(self, job: Struck, *more: str) -> Iterator[Job]:
        kind = KINDS[job.kind]
        words = ["run-batch", "--model", str(self._model), "--input"]
        words += [str(self._input(kind.are_turns)), "--output", str(self._output)]
        words += ["--dtype", "float32", "--prefill-chunk", "16", "--log-level", "warning"]
        words += ["--worker-silence-s", str(SILENCE_S), "--sync-lines", "1", *kind.options, *more]
        share = ["--r-threads", "1", *KV_MEMORY]
        if job.transport == "inproc":
            with running([*FASTDECODE, *words, "--r-threads", "1", *KV_MEMORY], **PATHS) as command:
                yield Job(command)
            return
        if job.transport == "zmq":
            with (
                addresses(kind.num_r_workers) as (workers, at),
                running([*FASTDECODE, *words, *at], **PATHS) as command,
            ):
                yield Job(command, workers)
            return
        line = self._launched(kind, words, share)
        with running(line, **PATHS) as command:
            yield Job(command)

    def _launched(self, kind: Kind, words: Sequence[str], share: Sequence[str]) -> list[str]:
        if kind.instances:
            placement = ["--placement", self._placement(kind)]
            return [*FASTDECODE, "launch", *share, *placement, "--", *words]
        hosts = ["--hosts", f"localhost:{kind.num_r_workers or kind.num_s_ranks}"]
        share = share if kind.num_r_workers else []
        return [*FASTDECODE, "launch", *hosts, *share, "--", *words]

    def _placement(self, kind: Kind) -> str:
        instances = [
            {"role": x.role.value, "tp": x.tp, "pp": x.pp, "r_worker_sockets": x.num_r_workers}
            for x in Instances(instances=kind.instances).placed
        ]
        path = self._directory / "placement.json"
        tree = {"format": PLACEMENT_FORMAT, "model": "small", "instances": instances}
        path.write_text(json.dumps(tree))
        return str(path)

    def _names(self, job: Struck, blow: Blow) -> list[str]:
        """Names by which an error may call a rank."""
        words = KINDS[job.kind].options
        tp = int(words[words.index("--tp") + 1]) if "--tp" in words else 1
        pp = int(words[words.index("--pp") + 1]) if "--pp" in words else 1
        stage = blow.number // tp
        name = f"stage {stage}" if stage < pp else f"prompt stage {stage - pp}"
        return [name, f"rank {blow.number}", f"S-worker {blow.number % tp} of {tp}"]

    def _left(self, started: Job, job: Struck) -> list[str]:
        """Return R-workers at addresses that stay although their S-worker has left."""
        if job.whom == "R-worker" or any(x.phase in PHASES[:2] for x in job.blows):
            return []  # stopped ones, and those that still wait for the first S-worker
        if job.whom == "first":
            return []  # they keep the session for the job that resumes it
        every = [process for worker in started.r_workers for process in worker.processes()]
        left = psutil.wait_procs(every, PARTING_S)[1]
        return [" ".join(process.cmdline()) for process in left]

    def _input(self, are_turns: bool) -> Path:
        return self._directory / ("turns.jsonl" if are_turns else "in.jsonl")

    def _clear(self) -> None:
        for path in self._directory.glob("out.jsonl*"):
            path.unlink()

    def _answers(self) -> dict[str, Any]:
        """Return the tokens of each whole line without an error, by its id."""
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            for text in self._output.read_bytes().splitlines(keepends=True):
                line = json.loads(text) if text.endswith(b"\n") else {"error": "torn"}
                if "error" not in line:
                    found[str(line["id"])] = line["token_ids"]
        return found


@contextlib.contextmanager
def addresses(number: int) -> Iterator[tuple[tuple[Running, ...], list[str]]]:
    """Start R-workers that listen. Yield them, and the options that name them."""
    bind = ["--bind", "tcp://127.0.0.1:*", "--silence-s", str(SILENCE_S), "--return-s", "10"]
    with contextlib.ExitStack() as stack:
        command = [*FASTDECODE, *R_WORKER, *bind]
        workers = [stack.enter_context(running(command, **PATHS)) for _ in range(number)]
        at = [address_of(worker) for worker in workers]
        yield tuple(workers), [word for one in at for word in ("--r-worker", one)]


def address_of(worker: Running) -> str:
    """Wait until an R-worker listens, and return its address."""
    worker.wait_until(lambda: " listens at " in worker.output() and worker.output().endswith("\n"))
    return worker.output().split(" listens at ")[1].split()[0]


def _rank_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # it has ended
        return str(process.environ().get("OMPI_COMM_WORLD_RANK", ""))
    return ""
