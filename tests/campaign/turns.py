"""Batches of conversations whose process is killed in the middle of them, and
that go on with ``--resume``."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpi_launch import Running, running
from small_jobs import FASTDECODE, LIMIT_S, PATHS, SmallJobs

NUM_CONVERSATIONS = 5
NUM_TURNS = 4
OPTIONS = ["--r-threads", "1", "--prefix-cache", "on", "--block-size", "16"]
"""Of every job."""
MEMORY = {"plenty": "0.02", "hardly any": "0.0012"}
"""For K and V, in GB: where there is hardly any, kept blocks are given up all
the time, and turns have gaps to fill."""
LONGEST_PAUSE_S = 0.4


def lines() -> list[dict[str, Any]]:
    """Turns of all conversations, in turns; half of these are sampled."""
    return [
        {
            "id": f"{whose}-{turn}",
            "conversation_id": f"c{whose}",
            "prompt_token_ids": [(11 * whose + 5 * turn + 3 * j) % 500 + 1 for j in range(24)],
            "ignore_eos": True,
            "max_tokens": 20 + 4 * whose,
            **({"temperature": 0.9, "seed": whose} if whose % 2 else {"temperature": 0}),
        }
        for turn in range(NUM_TURNS)
        for whose in range(NUM_CONVERSATIONS)
    ]


@dataclass(frozen=True)
class Kill:
    """What happens in one job: after each of so many answers it is killed."""

    memory: str
    after: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What became of it."""

    kill: Kill
    exit_code: int | None
    """Of the last run."""
    num_killed: int
    num_kept: tuple[int, ...]
    """Answers that were there when it was killed."""
    num_changed: int
    num_missing: int
    seconds: float
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None:
            return "hung"
        if self.num_changed:
            return "changed"
        return "lost" if self.num_missing or self.exit_code else "right"


def kills(number: int, chance: random.Random) -> list[Kill]:
    """So many, one to three a job."""
    chosen: list[Kill] = []
    most = NUM_CONVERSATIONS * NUM_TURNS - 1
    while (left := number - sum(len(kill.after) for kill in chosen)) > 0:
        count = min(left, chance.randint(1, 3))
        after = tuple(sorted(chance.sample(range(most), count)))
        chosen.append(Kill(chance.choice(list(MEMORY)), after))
    return chosen


class Kills:
    """Runs such jobs.

    Args:
        jobs: whose model they run.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._chance = chance
        directory = jobs.directory / "turns"
        directory.mkdir()
        self._input, self._output = directory / "in.jsonl", directory / "out.jsonl"
        self._model = jobs.model
        self._input.write_text("".join(json.dumps(line) + "\n" for line in lines()))
        with self._start("plenty") as job:
            outcome = job.wait(LIMIT_S)
        assert outcome.exit_code == 0, outcome
        self.expected = answers(self._output)
        """Of a job in which nothing happens."""

    def kill(self, kill: Kill) -> Report:
        """One job, killed and resumed as often as that says."""
        for path in self._output.parent.glob("out.jsonl*"):
            path.unlink()
        kept: list[int] = []
        seconds = 0.0
        for after in kill.after:
            with self._start(kill.memory) as job:
                self._wait(job, after)
                job.process.kill()
                seconds += job.wait(LIMIT_S).seconds
            kept.append(len(answers(self._output)))
        with self._start(kill.memory) as job:
            outcome = job.wait(LIMIT_S)
        found = answers(self._output)
        return Report(
            kill,
            outcome.exit_code,
            len(kill.after),
            tuple(kept),
            sum(found[name] != self.expected[name] for name in found),
            len(self.expected) - len(found),
            round(seconds + outcome.seconds, 1),
            outcome.output.strip()[-3000:],
        )

    def _start(self, memory: str) -> contextlib.AbstractContextManager[Running]:
        """A job, or what is left of it."""
        files = ["--model", str(self._model), "--input", str(self._input)]
        files += ["--output", str(self._output), "--resume", "--sync-lines", "1"]
        shared = ["--dtype", "float32", "--prefill-chunk", "16", "--log-level", "warning"]
        words = [*files, *shared, *OPTIONS, "--kv-memory-gb", MEMORY[memory]]
        return running([*FASTDECODE, "run-batch", *words], **PATHS)

    def _wait(self, job: Running, after: int) -> None:
        """Until so many answers are there, and then for a moment."""
        with contextlib.suppress(AssertionError):  # it has ended
            job.wait_until(lambda: len(answers(self._output)) >= after, timeout_s=LIMIT_S)
            pause_s = self._chance.uniform(0, LONGEST_PAUSE_S)
            job.wait_until(lambda: False, timeout_s=pause_s)


def answers(output: Path) -> dict[str, list[int]]:
    """Tokens by id, of all lines that are whole."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for text in output.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n"):
                line = json.loads(text)
                if "token_ids" in line:
                    found[line["id"]] = line["token_ids"]
    return found


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    shown = {**asdict(report.kill), **vars(report), "verdict": report.verdict}
    del shown["kill"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
