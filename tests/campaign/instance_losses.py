"""Processes of a cluster of instances that are killed or stopped at random moments.

    python tests/campaign/instance_losses.py --each 20 --minutes 30 \\
        --out benchmarks/results/campaign_instances.json

Two prefill and two decode instances, and in turn one process of each kind is
hurt: a prefill instance, a decode instance, the controller; and of another
cluster, whose instances have R-workers at addresses, an R-worker of either role.
Moments are random within a phase: behind the nth token that was told, or the
nth prompt that began to be fetched, at a pace that makes a fetch last. Whoever
was killed is started again at its address, whoever was stopped goes on, and has
to be taken in again.

Answers, greedy and sampled, are held against those of one engine. Counted are
runs that **hung**, in which a request was **lost**, or tokens were **changed** or
told twice, and after which something was **kept** that nobody wants.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from checkpoints import save_checkpoint  # noqa: E402
from inherited_signals import hear_interrupts  # noqa: E402
from instance_processes import PATHS, SILENCE_S  # noqa: E402
from instance_runs import OPTIONS  # noqa: E402
from news import NewsLLM  # noqa: E402
from provenance import provenance  # noqa: E402
from small_clusters import KINDS, Cluster  # noqa: E402

from fastdecode import LLM, SamplingParams  # noqa: E402
from fastdecode.core.delta import OutputFold  # noqa: E402
from fastdecode.core.errors import FastDecodeError  # noqa: E402
from fastdecode.core.sequence import PromptRequest  # noqa: E402

LIMIT_S = 90.0
NUM_REQUESTS = 12
TROUBLES = ("SIGKILL", "SIGSTOP")
PHASES = ("tokens", "fetching")


@dataclass(frozen=True)
class Blow:
    kind: str
    trouble: str
    phase: str
    after: int
    """Tokens told, or fetches begun."""


@dataclass(frozen=True)
class Report:
    blow: Blow
    verdict: str
    seconds: float
    num_moved: int
    num_failed_fetches: int
    what: str = ""


def asked() -> list[PromptRequest]:
    chance = random.Random(5)
    return [
        PromptRequest(
            str(i),
            [chance.randrange(5, 200) for _ in range(20 + 9 * i)],
            SamplingParams(
                temperature=i % 2, seed=i, max_tokens=20 + 3 * i, ignore_eos=True, n=1 + i % 3 // 2
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


class Watch:
    """Runs all requests, and has something done at a moment."""

    def __init__(self, llm: LLM, blow: Blow | None, act: Callable[[], None]) -> None:
        self._llm, self._blow, self._act = llm, blow, act
        self.has_acted = False
        self._num_tokens = 0
        for each in llm._running.engine.remote:
            each.submit = self._counted(each.submit)  # type: ignore[method-assign]
        self._num_fetches = 0

    def _counted(self, submit: Any) -> Any:
        def counting(request: Any, *, every_step: bool) -> None:
            submit(request, every_step=every_step)
            self._num_fetches += bool(request.sources)
            self._look("fetching", self._num_fetches)

        return counting

    def _look(self, phase: str, count: int) -> None:
        blow = self._blow
        if blow is not None and not self.has_acted and blow.phase == phase and count >= blow.after:
            self.has_acted = True
            self._act()

    def run(self) -> dict[str, Any]:
        """What each request came to. Raises AssertionError: it hangs."""
        requests = asked()
        folds = {x.request_id: OutputFold(x.request_id, None, (), x.params.n) for x in requests}
        outputs: dict[str, Any] = {}
        end_s = time.monotonic() + LIMIT_S

        def tick() -> None:
            assert time.monotonic() < end_s, "hung"

        for delta in self._llm.deltas(requests, tick):
            self._num_tokens += len(delta.token_ids)
            self._look("tokens", self._num_tokens)
            output = folds[delta.request_id].add(delta)
            if output is not None:
                outputs[delta.request_id] = output
        return outputs


def tokens(outputs: dict[str, Any]) -> dict[str, Any]:
    return {i: [each.token_ids for each in x.completions] for i, x in outputs.items()}


class Campaign:
    """Strikes, and says what became of it."""

    def __init__(self, directory: Path) -> None:
        save_checkpoint(directory, "llama", {}, None)
        self.model = str(directory)
        with LLM(self.model, **OPTIONS) as one:
            self.expected = tokens({o.request_id: o for o in one.stream(asked())})

    def strike(self, cluster: Cluster, blow: Blow, chance: random.Random) -> Report:
        started = time.monotonic()
        if blow.kind == "controller":
            return self._strike_controller(cluster, blow, started)
        member = chance.choice(cluster.members[blow.kind])
        moved, failed, what, verdict = 0, 0, "", "right"
        try:
            with cluster.controller() as llm:
                watch = Watch(llm, blow, lambda: member.hurt(blow.trouble))
                outputs = watch.run()
                verdict, what = self._verdict(outputs), self._errors(outputs)
                verdict = verdict if watch.has_acted else "too late"
                moved, failed = llm.stats.num_moved, llm.stats.num_failed_fetches
        except (AssertionError, FastDecodeError) as error:
            verdict, what = "hung" if str(error) == "hung" else "lost", str(error)
        finally:
            member.mend(blow.trouble)
            self._begin_the_fallen(cluster)
        seconds = time.monotonic() - started
        kept = self._kept(cluster)
        verdict, what = ("kept", kept) if kept and verdict == "right" else (verdict, what)
        return Report(blow, verdict, seconds, moved, failed, what)

    def _strike_controller(self, cluster: Cluster, blow: Blow, started: float) -> Report:
        """Another process that does the same as this one would."""
        words = [sys.executable, __file__, "--as-controller", json.dumps(
            {"model": self.model, "addresses": cluster.addresses, "blow": asdict(blow)}
        )]  # fmt: skip
        lost = subprocess.Popen(words, env={**os.environ, **PATHS}, stdout=subprocess.PIPE)
        try:
            assert lost.stdout is not None
            line = lost.stdout.readline()
            verdict = "right" if line.startswith(b"now") else "too late"
            if verdict == "right":
                lost.send_signal(getattr(signal, blow.trouble))
            what = self._kept(cluster)
        finally:
            lost.kill()
            lost.wait()
        verdict = "kept" if what and verdict == "right" else verdict
        return Report(blow, verdict, time.monotonic() - started, 0, 0, what)

    def _begin_the_fallen(self, cluster: Cluster) -> None:
        """Instances that have ended since all of their R-workers were lost."""
        for member in cluster.instances:
            if member.is_over():
                member.mend("SIGKILL")

    def _verdict(self, outputs: dict[str, Any]) -> str:
        if len(outputs) < NUM_REQUESTS or any(x.error is not None for x in outputs.values()):
            return "lost"
        return "right" if tokens(outputs) == self.expected else "changed"

    def _errors(self, outputs: dict[str, Any]) -> str:
        return "; ".join(str(x.error) for x in outputs.values() if x.error is not None)[:300]

    def _kept(self, cluster: Cluster) -> str:
        """What is left once all are there again, though nobody wants it; and
        whether they do what they should."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            try:
                with cluster.controller() as llm:
                    left = self._left(llm, end_s)
                    return left or ("" if self._verdict(Watch(llm, None, lambda: None).run())
                                    == "right" else "then answers aren't right")  # fmt: skip
            except FastDecodeError as error:
                if time.monotonic() > end_s:
                    return str(error)

    def _left(self, llm: NewsLLM, end_s: float) -> str:
        running = llm._running

        def lost() -> list[str]:
            return [x.name for x in running.engine.remote if x.broken is not None]

        def used() -> list[int]:
            return [
                -1 if x is None else sum(r.kv_blocks_used for r in x.r_workers)
                for x in (each.figures() for each in running.engine.remote)
            ]

        if llm.until(lambda: not lost() and not any(used()), max(0.0, end_s - time.monotonic())):
            return ""
        return f"lost: {lost()}; blocks used: {used()}"


def blows(each: int, chance: random.Random, kinds: tuple[str, ...]) -> list[Blow]:
    """So many of each kind and trouble, in a random order."""
    chosen = []
    for kind, trouble, number in itertools.product(kinds, TROUBLES, range(each)):
        phase = PHASES[number % 2]
        most = NUM_REQUESTS - 2 if phase == "fetching" else 300
        chosen.append(Blow(kind, trouble, phase, chance.randint(1, most)))
    return chance.sample(chosen, len(chosen))


def be_controller(what: dict[str, Any]) -> None:
    """Run all requests, and say when the moment has come."""
    addresses = what["addresses"]
    with LLM(what["model"], instances=addresses, worker_silence_s=SILENCE_S) as llm:
        Watch(llm, Blow(**what["blow"]), lambda: print("now", flush=True)).run()


def run(options: argparse.Namespace) -> None:
    end_s, chance = time.monotonic() + 60 * options.minutes, random.Random(options.seed)
    reports: list[Report] = []
    before = json.loads(options.out.read_text())["runs"] if _is_there(options.out) else []
    with tempfile.TemporaryDirectory(prefix="fd") as name:
        campaign = Campaign(Path(name))
        for with_r_workers in (False, True):
            kinds = tuple(k for k in KINDS if ("R-worker" in k) is with_r_workers)
            kinds = tuple(kind for kind in kinds if kind.startswith(options.of))
            share_s = (
                end_s if with_r_workers or options.of else time.monotonic() + 36 * options.minutes
            )
            if not kinds:
                continue
            with contextlib.closing(Cluster(campaign.model, with_r_workers=with_r_workers)) as all_:
                for blow in blows(options.each, chance, kinds):
                    if time.monotonic() > share_s:
                        break
                    reports.append(campaign.strike(all_, blow, chance))
                    print(reports[-1], flush=True)
                    if options.out is not None:
                        mine = {**provenance(), "seed": options.seed, **_told(reports)}
                        told = json.dumps({"runs": [*before, mine]}, indent=1)
                        options.out.write_text(told + "\n")
    print(json.dumps(_told(reports)["counts"], indent=1))


def _is_there(path: Path | None) -> bool:
    return path is not None and path.exists()


def _told(reports: list[Report]) -> dict[str, Any]:
    counts = Counter((x.blow.kind, x.blow.trouble, x.verdict) for x in reports)
    return {
        "counts": {", ".join(key): count for key, count in sorted(counts.items())},
        "moved": sum(x.num_moved for x in reports),
        "failed_fetches": sum(x.num_failed_fetches for x in reports),
        "blows": [asdict(x) for x in reports],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=20, help="of each kind and trouble")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--of", default="", help="kinds of process that begin so")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-controller", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_controller:
        be_controller(json.loads(options.as_controller))
    else:
        hear_interrupts()
        run(options)


if __name__ == "__main__":
    main()
