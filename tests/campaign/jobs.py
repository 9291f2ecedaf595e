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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from mpi_launch import FASTDECODE, Outcome, Running, rank_of, running
from random_llama import llama_config, write_checkpoint

from fastdecode.core.config.instances import Instances
from fastdecode.core.config.placement import PLACEMENT_FORMAT
from fastdecode.wire.ranks import InstanceRanks

SILENCE_S = 2.0
LIMIT_S = 400.0  # a job that takes longer hangs
KV_MEMORY = ["--kv-memory-gb", "0.02"]
R_WORKER = [*FASTDECODE, "r-worker", "--threads", "1", "--silence-s", str(SILENCE_S),
            "--return-s", "10"]  # fmt: skip
SHAPE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 16}  # fmt: skip
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
    are_turns: bool = False  # the lines are turns of conversations

    def degree(self, name: str) -> int:
        """Return ``--tp`` or ``--pp``."""
        return int(self.options[self.options.index(name) + 1]) if name in self.options else 1


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
class Struck:
    """A job, and the signal to one of its processes."""

    kind: str
    transport: str
    whom: str = "command"  # A word of ``SIGNALS``
    number: int = 0
    """Rank in an MPI job. Place among the R-workers over ZeroMQ."""
    trouble: str = "SIGINT"
    is_early: bool = False  # the moment may come before the greeting of the R-workers


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
    while every and len(chosen) < number:
        for name, transport, whom in chance.sample(every, len(every)):
            victim = chance.choice(_victims(KINDS[name], transport, whom))
            # An R-worker that dies inside MPI_Init ends the job.
            is_early = chance.random() < 0.5 and (whom, transport) != ("R-worker", "launch")
            trouble = chance.choice(SIGNALS[whom])
            chosen.append(Struck(name, transport, whom, victim, trouble, is_early))
    return chosen[:number]


def _victims(kind: Kind, transport: str, whom: str) -> list[int]:
    """Return the numbers of the processes that may be struck."""
    if kind.instances and whom == "instance":
        placed = Instances(instances=kind.instances).placed
        ranks = InstanceRanks(placed)
        roles = Counter(each.role for each in placed)
        return [
            rank for rank in range(1, ranks.size) if roles[placed[ranks.instance_of(rank)].role] > 1
        ]
    if whom == "R-worker":  # one of every stage is left
        first, per_stage = kind.num_s_ranks, kind.num_r_workers // kind.degree("--pp")
        first = 0 if transport == "zmq" else first
        return [first + i for i in range(kind.num_r_workers) if i % per_stage]
    return list(range(1, kind.num_s_ranks)) if whom == "stage" else [0]


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


class Rack:
    """Processes at addresses, and others that start at the addresses of the killed.

    Args:
        commands: One for each, without ``--bind``.
    """

    def __init__(self, commands: Sequence[list[str]]) -> None:
        self._commands = commands
        self._stack = contextlib.ExitStack()
        self.workers = [self._start(each, "tcp://127.0.0.1:*") for each in commands]
        self.addresses = [worker.address() for worker in self.workers]

    @property
    def options(self) -> list[str]:
        """Options that name R-workers."""
        return [word for address in self.addresses for word in ("--r-worker", address)]

    def kill(self, place: int) -> None:
        """Kill one, and start another at its address."""
        self.workers[place].process.kill()
        self.workers[place].wait(LIMIT_S)
        self.workers[place] = self._start(self._commands[place], self.addresses[place])

    def close(self) -> None:
        self._stack.close()

    def _start(self, command: list[str], address: str) -> Running:
        return self._stack.enter_context(running([*command, "--bind", address]))


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
        self._lengths: dict[tuple[str, str], tuple[float, float]] = {}
        for are_turns in (False, True):
            text = "".join(json.dumps(line) + "\n" for line in lines(are_turns=are_turns))
            self._input(are_turns).write_text(text)
            self._clear()
            plain = Struck("conversations" if are_turns else "whole sequences", "inproc")
            with self._start(plain) as (command, _):
                outcome = command.wait(LIMIT_S)
            assert outcome.exit_code == 0, outcome.output
            self._expected[are_turns] = self._answers()

    def strike(self, job: Struck) -> dict[str, Any]:
        """Run a job, and run it again with ``--resume`` if its first process was struck.

        Returns:
            A row for the campaign's table.
        """
        before_s, after_s = self._lengths_of(job)
        self._clear()
        resumed: Outcome | None = None
        with self._start(job) as (command, rack):
            length_s = before_s + after_s if job.is_early else after_s
            is_hit = self._hit(job, command, rack, self._chance.uniform(0, length_s))
            outcome = command.wait(LIMIT_S)
        if is_hit and job.whom in ("first", "command") and outcome.exit_code != 0:
            with self._start(job, "--resume") as (command, _):
                resumed = command.wait(LIMIT_S)
        verdict = self._verdict(job, is_hit, outcome, resumed)
        words = "" if verdict == "right" else _DIRECTORIES.sub("", outcome.output)[-3000:]
        hits = [f"{job.whom} {job.trouble}"] if is_hit else []
        seconds = round(outcome.seconds, 1)
        return {**asdict(job), "hits": hits, "seconds": seconds, "verdict": verdict,
                "last_words": words}  # fmt: skip

    def _verdict(self, job: Struck, is_hit: bool, outcome: Outcome, resumed: Outcome | None) -> str:
        answers, expected = self._answers(), self._expected[KINDS[job.kind].are_turns]
        is_whole, exit_code = len(answers) == len(expected), outcome.exit_code
        orphans = [*outcome.orphans, *(resumed.orphans if resumed is not None else ())]
        if exit_code is None or orphans:
            return "hung"
        if any(answers[key] != expected[key] for key in answers):
            return "changed"
        if not is_hit:
            return "right" if exit_code == 0 and is_whole else "failed by itself"
        if job.whom in ("first", "command"):
            if not is_whole or (resumed is not None and resumed.exit_code != 0):
                return "not resumed"
            # A signal may end the process before Python has come to our code.
            usual = (0, 130, *([-signal.Signals[job.trouble]] if job.is_early else []))
            return "right" if job.whom == "first" or exit_code in usual else "other exit code"
        if is_whole:
            return "right"
        if exit_code == 4 and any(each in outcome.output for each in _CANNOT_BEGIN):
            return "ended by MPI"
        if job.whom != "stage":
            return "lost"
        if exit_code != 4:
            return "other exit code"
        return "right" if any(name in outcome.output for name in _names(job)) else "unnamed"

    def _hit(self, job: Struck, command: Running, rack: Rack | None, moment_s: float) -> bool:
        """Send the signal, ``moment_s`` after the start or the greeting. True if it came in time.

        An assertion of ``wait_until`` means that the job has ended: the verdict says how."""
        with contextlib.suppress(AssertionError, psutil.Error):
            if not job.is_early:
                command.wait_until(lambda: self._has_greeted(command), timeout_s=LIMIT_S)
            end_s = time.monotonic() + moment_s
            command.wait_until(lambda: time.monotonic() >= end_s, timeout_s=LIMIT_S)
            if job.whom == "R-worker" and rack is not None:
                victims = rack.workers[job.number].processes()
            else:
                victims = sorted(command.processes(), key=lambda process: process.pid)
                if job.whom == "command" or not any(map(rank_of, victims)):
                    victims = victims[:1]
                else:
                    victims = [each for each in victims if rank_of(each) == str(job.number)]
            for victim in victims:
                victim.send_signal(signal.Signals[job.trouble])
            return bool(victims)
        return False

    def _lengths_of(self, job: Struck) -> tuple[float, float]:
        """Return an undisturbed job's seconds before and after the greeting."""
        key = job.kind, job.transport
        if key not in self._lengths:
            self._clear()
            began_s = time.monotonic()
            with self._start(job) as (command, _):
                command.wait_until(lambda: self._has_greeted(command), timeout_s=LIMIT_S)
                greeted_s = time.monotonic()
                outcome = command.wait(LIMIT_S)
            expected = self._expected[KINDS[job.kind].are_turns]
            assert outcome.exit_code == 0 and self._answers() == expected, outcome
            self._lengths[key] = greeted_s - began_s, time.monotonic() - greeted_s
        return self._lengths[key]

    def _has_greeted(self, command: Running) -> bool:
        said = command.output()
        return "greeting" in said or "no R-workers: " in said or self._output.exists()

    @contextlib.contextmanager
    def _start(self, job: Struck, *more: str) -> Iterator[tuple[Running, Rack | None]]:
        """Start a job. Yield its S-worker or launcher, and its R-workers at addresses."""
        kind = KINDS[job.kind]
        words = ["run-batch", "--model", str(self._model), "--input"]
        words += [str(self._input(kind.are_turns)), "--output", str(self._output)]
        words += ["--dtype", "float32", "--prefill-chunk", "16", "--log-level", "warning"]
        words += ["--worker-silence-s", str(SILENCE_S), "--sync-lines", "1", *kind.options, *more]
        share = ["--r-threads", "1", *KV_MEMORY]
        with contextlib.ExitStack() as stack:
            rack = None
            if job.transport == "inproc":
                line = [*FASTDECODE, *words, *share]
            elif job.transport == "zmq":
                rack = Rack([[*R_WORKER, *KV_MEMORY]] * kind.num_r_workers)
                stack.callback(rack.close)
                line = [*FASTDECODE, *words, *rack.options]
            else:
                placed = ["--hosts", f"localhost:{kind.num_r_workers or kind.num_s_ranks}"]
                if kind.instances:
                    placed = ["--placement", self._placement(kind)]
                share = share if kind.num_r_workers else []
                line = [*FASTDECODE, "launch", *placed, *share, "--", *words]
            yield stack.enter_context(running(line)), rack

    def _placement(self, kind: Kind) -> str:
        instances = [
            {"role": x.role.value, "tp": x.tp, "pp": x.pp, "r_worker_sockets": x.num_r_workers}
            for x in Instances(instances=kind.instances).placed
        ]
        path = self._directory / "placement.json"
        tree = {"format": PLACEMENT_FORMAT, "model": "small", "instances": instances}
        path.write_text(json.dumps(tree))
        return str(path)

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


def _names(job: Struck) -> list[str]:
    """Return names by which an error may call the rank that was struck."""
    tp = KINDS[job.kind].degree("--tp")
    stage = job.number // tp
    return [f"stage {stage}", f"rank {job.number}", f"S-worker {job.number % tp} of {tp}"]
