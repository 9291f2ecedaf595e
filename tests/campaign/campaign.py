"""Jobs whose R-workers are killed, stopped or terminated at random moments, and
jobs that are told to stop.

    make campaign
    python tests/campaign/campaign.py --losses 20 --minutes 5    # with options

Every job's answers, greedy and sampled, are held against those of an
undisturbed one. Counted are jobs that **hung**, that were **lost** (an answer
is missing though an R-worker is left) and whose answers were **changed**. The
moments are random within a phase, whose beginning is an event and whose length
an undisturbed job's: start, prompts, decoding, end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from mpi_launch import Running, mpirun, open_mpi_options, running  # noqa: E402
from provenance import provenance  # noqa: E402
from random_llama import llama_config, write_checkpoint  # noqa: E402

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(ROOT)}
PARTITIONS = {
    "sequences": [],
    "heads": ["--r-partition", "heads"],
    "split": ["--split-tokens", "64"],
}
TROUBLES = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
PHASES = ("start", "prompts", "decoding", "end")
NUM_R_WORKERS, NUM_LINES = 3, 8
SILENCE_S = 2.0
LIMIT_S = 150.0
"""A job that takes longer hangs."""
SHAPE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """What happens in one job."""

    transport: str
    partition: str
    trouble: str
    phase: str
    num_hit: int


@dataclass(frozen=True)
class Report:
    """What became of it."""

    loss: Loss
    exit_code: int | None
    seconds: float
    num_missing: int
    num_changed: int
    num_orphans: int
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.num_orphans:
            return "hung"
        if self.num_missing:
            return "lost"
        return "changed" if self.num_changed else "right"


class Campaign:
    """A model, requests for it, and their answers.

    Args:
        directory: for them.
        seed: of the moments.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._model = directory / "model"
        self._input = directory / "in.jsonl"
        self._output = directory / "out.jsonl"
        self._model.mkdir()
        write_checkpoint(self._model, llama_config(**SHAPE, max_position_embeddings=2048), "random")
        self._input.write_text("".join(json.dumps(line) + "\n" for line in lines()))
        self._lengths: dict[tuple[str, str], dict[str, float]] = {}
        with running([*FASTDECODE, *self._generate(), "--kv-memory-gb", "0.02"], **PATHS) as job:
            outcome = job.wait(LIMIT_S)
        assert outcome.exit_code == 0, outcome
        self._expected = self._answers()

    def lose(self, loss: Loss) -> Report:
        """One job with its loss."""
        lengths = self._phase_lengths(loss.transport, loss.partition)
        self._output.unlink(missing_ok=True)
        with self._job(loss.transport, PARTITIONS[loss.partition]) as (job, victims):
            begin_phase(job, loss.phase, self._output)
            for _ in range(loss.num_hit):
                with contextlib.suppress(AssertionError):  # it has ended
                    pause(job, self._random.uniform(0, lengths[loss.phase]))
                found = victims()
                if found:
                    with contextlib.suppress(ProcessLookupError):
                        found[self._random.randrange(len(found))].send_signal(
                            signal.Signals[loss.trouble]
                        )
            outcome = job.wait(LIMIT_S)
        answers = self._answers()
        changed = sum(answers[key] != self._expected[key] for key in answers)
        last = outcome.output.strip()[-2000:]
        missing = len(self._expected) - len(answers)
        return Report(
            loss, outcome.exit_code, outcome.seconds, missing, changed, len(outcome.orphans), last
        )

    def stop(self, transport: str, command: str, trouble: signal.Signals) -> dict[str, Any]:
        """A job that is told to stop while it decodes; one that can go on does."""
        self._output.unlink(missing_ok=True)
        for rest in self._directory.glob("out.jsonl.*"):
            rest.unlink()
        with self._job(transport, ["--max-num-sequences", "3"], command) as (job, _):
            begin_phase(job, "decoding", self._output)
            names = ("launch",) if transport == "mpi" else (command,)
            next(
                p for p in job.processes() if any(name in p.cmdline() for name in names)
            ).send_signal(trouble)
            outcome = job.wait(LIMIT_S)
        return {"transport": transport, "command": command, "signal": trouble.name,
                "exit_code": outcome.exit_code, "seconds": outcome.seconds,
                "orphans": len(outcome.orphans)}  # fmt: skip

    def _phase_lengths(self, transport: str, partition: str) -> dict[str, float]:
        """Seconds, of a job in which nothing happens."""
        if (transport, partition) not in self._lengths:
            self._output.unlink(missing_ok=True)
            begins = []
            with self._job(transport, PARTITIONS[partition]) as (job, _):
                for phase in PHASES:
                    begin_phase(job, phase, self._output)
                    begins.append(time.monotonic())
                outcome = job.wait(LIMIT_S)
            assert outcome.exit_code == 0 and self._answers() == self._expected, outcome
            begins.append(time.monotonic())
            lengths = {
                phase: max(0.05, begins[i + 1] - begins[i]) for i, phase in enumerate(PHASES)
            }
            self._lengths[transport, partition] = lengths
        return self._lengths[transport, partition]

    def _generate(self, command: str = "generate") -> list[str]:
        shared = ["--dtype", "float32", "--prefill-chunk", "16", "--log-level", "warning"]
        return [command, "--model", str(self._model), "--input", str(self._input), "--output",
                str(self._output), *shared]  # fmt: skip

    @contextlib.contextmanager
    def _job(
        self, transport: str, options: Sequence[str], command: str = "generate"
    ) -> Iterator[tuple[Running, Callable[[], list[Any]]]]:
        """The S-worker's process or mpirun's, and the R-workers' that may be hit."""
        generate = [*self._generate(command), *options, "--worker-silence-s", str(SILENCE_S)]
        r_worker = ["r-worker", "--threads", "1", "--kv-memory-gb", "0.02"]
        if transport == "mpi":
            line = [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *generate]
            line += [":", "-n", str(NUM_R_WORKERS), *FASTDECODE, *r_worker]
            if command == "run-batch":
                launch = ["launch", "--hosts", f"localhost:{NUM_R_WORKERS}", "--r-threads", "1"]
                line = [*FASTDECODE, *launch, "--kv-memory-gb", "0.02", "--", *generate]
            with running(line, **PATHS) as job:
                yield job, lambda: [p for p in job.processes() if is_r_rank(p)]
            return
        with contextlib.ExitStack() as stack:
            workers = []
            for _ in range(NUM_R_WORKERS):
                bind = [
                    "--bind",
                    "tcp://127.0.0.1:*",
                    "--silence-s",
                    str(SILENCE_S),
                    "--return-s",
                    "10",
                ]
                workers.append(
                    stack.enter_context(running([*FASTDECODE, *r_worker, *bind], **PATHS))
                )
            for worker in workers:
                worker.wait_until(
                    lambda w=worker: " listens at " in w.output() and w.output().endswith("\n")
                )
            for worker in workers:
                generate += ["--r-worker", worker.output().split(" listens at ")[1].split()[0]]
            with running([*FASTDECODE, *generate], **PATHS) as job:
                yield job, lambda: [p for worker in workers for p in worker.processes()]

    def _answers(self) -> dict[str, Any]:
        """Tokens by id; requests that failed aren't there."""
        found: dict[str, Any] = {}
        if self._output.exists():
            for text in self._output.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    line = json.loads(text)
                    if "error" not in line:
                        found[str(line["id"])] = line["token_ids"]
        return found


def lines() -> list[dict[str, Any]]:
    """The first is done long before the others; every other one is sampled."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    return [
        {"id": str(i), "prompt_token_ids": [(7 * i + 3 * j) % 500 + 1 for j in range(20 + 40 * i)],
         "ignore_eos": True, "max_tokens": 150 + 20 * i if i else 3, **({**sampled,
             "seed": i} if i % 2 else {"temperature": 0})}
        for i in range(NUM_LINES)
    ]  # fmt: skip


def is_r_rank(process: Any) -> bool:
    with contextlib.suppress(Exception):  # it has ended
        return int(process.environ().get("OMPI_COMM_WORLD_RANK", 0)) > 0
    return False


def begin_phase(job: Running, phase: str, output: Path) -> None:
    """Wait for the event with which a phase begins, or for the job's end."""

    def num_done() -> int:
        with contextlib.suppress(FileNotFoundError):
            return output.read_text().count("\n")
        return 0

    begun = {
        "start": lambda: True,
        "prompts": lambda: "greeting" in job.output(),
        "decoding": lambda: num_done() >= 1,
        "end": lambda: num_done() >= NUM_LINES - 2,
    }[phase]
    with contextlib.suppress(AssertionError):  # it has ended, or gone wrong: that will be seen
        job.wait_until(begun, timeout_s=LIMIT_S)


def pause(job: Running, seconds: float) -> None:
    end = time.monotonic() + seconds
    job.wait_until(lambda: time.monotonic() >= end)


def losses(number: int, chance: random.Random) -> list[Loss]:
    """Every transport, partition, trouble and phase in turn, shuffled."""
    kinds = [
        Loss(transport, partition, trouble.name, phase, chance.choice((1, 2)))
        for transport in ("mpi", "zmq")
        for partition in PARTITIONS
        for trouble in TROUBLES
        for phase in PHASES
    ]
    repeats = -(-number // len(kinds))
    chosen = [loss for _ in range(repeats) for loss in chance.sample(kinds, len(kinds))]
    return chosen[:number]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses", type=int, default=72, help="jobs with a loss (default: 72, one of each kind)"
    )
    parser.add_argument(
        "--signals", type=int, default=8, help="jobs that are told to stop (default: 8)"
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="begin nothing after so long (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    reports: list[Report] = []
    stops: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
        campaign = Campaign(Path(directory), options.seed)
        for loss in losses(options.losses, random.Random(options.seed)):
            if time.monotonic() < end:
                reports.append(campaign.lose(loss))
                report = reports[-1]
                print(
                    f"{report.verdict:8}{report.seconds:6.1f} s  exit {report.exit_code}  {loss}",
                    flush=True,
                )
        kinds = [
            (t, c, s)
            for c in ("run-batch", "generate")
            for t in ("zmq", "mpi")
            for s in (signal.SIGINT, signal.SIGTERM)
            if (t, c) != ("mpi", "generate")
        ]
        for index in range(options.signals):
            if time.monotonic() < end:
                stops.append(campaign.stop(*kinds[index % len(kinds)]))
                print(stops[-1], flush=True)
    counts = Counter(report.verdict for report in reports)
    print(
        f"{len(reports)} losses: "
        + ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    )
    if options.out is not None:
        rows = [{**asdict(report), "verdict": report.verdict} for report in reports]
        for row in rows:
            if row["verdict"] == "right":
                del row["last_words"]
        result = {**provenance(), "counts": counts, "losses": rows, "stops": stops}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if set(counts) - {"right"} or any(
        stop["exit_code"] is None or stop["orphans"] for stop in stops
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
