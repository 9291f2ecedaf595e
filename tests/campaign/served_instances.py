"""A server before instances at addresses, under load, whose peers lie, die and stop.

    python tests/campaign/served_instances.py --minutes 20 \\
        --out benchmarks/results/campaign_served_instances.json

Two prefill and two decode instances. Two of them have one R-worker each, at an
address; the two others have R-workers of their own, and stand behind a liar
(``tests/lying_instance.py``). In a random order each lie is told once for either
role, and instances, their only R-workers and the server itself are killed and
stopped, at a random moment of what clients ask.

Each answer is held against one engine's. Counted are requests that **hung**, were
**lost** or **changed**; moments at which ``/health`` was **untrue**: not 200 though
some instance could run everything, not degraded though an instance or its R-worker
was gone, or degraded when all were back; and KV blocks that were **kept**.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from asking import Answer, ask  # noqa: E402
from checkpoints import save_checkpoint  # noqa: E402
from inherited_signals import hear_interrupts  # noqa: E402
from instance_processes import ENGINE, SILENCE_S, instance  # noqa: E402
from instance_runs import OPTIONS  # noqa: E402
from lying_instance import LIES, ONLY_PREFILL, LyingInstance  # noqa: E402
from provenance import provenance  # noqa: E402
from server_process import FASTDECODE, Server, serving  # noqa: E402
from small_clusters import SLOW, Member, _r_worker, _without  # noqa: E402

from fastdecode import LLM, SamplingParams  # noqa: E402
from fastdecode.core.sequence import PromptRequest  # noqa: E402

LIMIT_S = 90.0
NUM_CLIENTS = 4
AFTER_TOKENS = 400
"""A blow comes when at most so many tokens have been told."""
ROLES = ("prefill", "decode")
TROUBLES = ("SIGKILL", "SIGSTOP")
_HEALTH_EVERY_S = 0.1
_LIES_WITHIN_S = 5.0


@dataclass(frozen=True)
class Blow:
    kind: str
    """A role's instance, its only R-worker, or the server."""
    trouble: str
    """A signal, or a lie."""
    after: int
    """Tokens told."""


@dataclass
class Report:
    blow: Blow
    seconds: float
    became: dict[str, int]
    """What requests came to, how often."""
    untrue: list[str] = field(default_factory=list)
    was_degraded: bool = False
    was_struck: bool = True
    """A lie may find nothing that it could be told of, before all is over."""

    @property
    def verdict(self) -> str:
        bad = [what for what in ("hung", "lost", "changed") if self.became.get(what)]
        if bad or self.untrue:
            return bad[0] if bad else "untrue"
        return "right" if self.was_struck else "too late"


def lines() -> list[dict[str, Any]]:
    chance = random.Random(8)
    return [
        {
            "id": str(i),
            "prompt_token_ids": [chance.randrange(5, 200) for _ in range(20 + 9 * i)],
            "max_tokens": 40 + 5 * i,
            "ignore_eos": True,
            "temperature": i % 2,
            "seed": i,
        }
        for i in range(12)
    ]


def answers_of(model: str) -> dict[str, list[int]]:
    """One engine's."""
    names = ("max_tokens", "ignore_eos", "temperature", "seed")
    requests = [
        PromptRequest(
            line["id"], line["prompt_token_ids"], SamplingParams(**{x: line[x] for x in names})
        )
        for line in lines()
    ]
    with LLM(model, **OPTIONS) as one:
        return {o.request_id: list(o.completions[0].token_ids) for o in one.stream(requests)}


class Health(threading.Thread):
    """Asks for it all the time."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.untrue: list[str] = []
        self.was_degraded = False

    def run(self) -> None:
        while not self._over.wait(_HEALTH_EVERY_S):
            try:
                status, _, raw = self._server.ask("GET", "/health", timeout_s=LIMIT_S)
            except OSError as error:
                self.untrue.append(f"/health: {type(error).__name__}: {error}")
                return
            self.was_degraded |= b"degraded" in raw
            if status != 200:
                self.untrue.append(f"/health says {status} {raw.decode()}")

    def end(self) -> None:
        self._over.set()
        self.join(LIMIT_S)


class Campaign:
    """Instances, a server before them, and blows on them."""

    def __init__(self, directory: Path) -> None:
        save_checkpoint(directory, "llama", {}, None)
        self._model = str(directory)
        self._expected = answers_of(self._model)
        self._stack = contextlib.ExitStack()
        self._members: dict[str, Member] = {}
        self._liars: dict[str, LyingInstance] = {}
        for role in ROLES:
            self._begin(role)
        self._server_stack = self._stack.enter_context(contextlib.ExitStack())
        self._serve()

    def _begin(self, role: str) -> None:
        r_worker = self._member(f"{role}'s only R-worker", _r_worker)
        few = tuple(_without(ENGINE, "--r-threads", "--kv-memory-gb"))
        words = (*SLOW, "--r-worker", r_worker.address)
        self._member(role, lambda port: instance(self._model, role, *words, port=port, engine=few))
        behind = self._member(
            f"{role} behind a liar", lambda port: instance(self._model, role, *SLOW, port=port)
        )
        liar = LyingInstance(behind.address, None, SILENCE_S)
        liar.start()
        self._stack.callback(liar.end)
        self._liars[role] = liar

    def _member(self, kind: str, start: Any) -> Member:
        member = self._members[kind] = Member(start)
        self._stack.callback(member.close)
        member.wait()
        return member

    def _serve(self) -> None:
        every = [self._members[role].address for role in ROLES]
        every += [liar.address for liar in self._liars.values()]
        command = [*FASTDECODE, "serve", self._model, "--port", "0"]
        command += ["--instances", ",".join(every)]
        command += ["--worker-silence-s", str(SILENCE_S), "--worker-timeout-s", "10"]
        self.server: Server = self._server_stack.enter_context(serving(command))

    def close(self) -> None:
        self._stack.close()

    def strike(self, blow: Blow) -> Report:
        began = time.monotonic()
        report = Report(blow, 0.0, {})
        health = Health(self.server)
        is_over = threading.Event()
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            base = self.server.status()["generation_tokens"]
            futures = [
                clients.submit(ask, self.server.port, line, i % 3 != 0, is_over)
                for i, line in enumerate(lines())
            ]
            self.server.wait_until(
                lambda: self.server.status()["generation_tokens"] - base >= blow.after, LIMIT_S
            )
            health.start()
            try:
                self._hurt(blow, report)
                wait(futures, LIMIT_S)
            finally:
                is_over.set()
        if blow.kind == "server":
            self._mend_server(blow)
        else:
            self._mend(blow, report, health)
        health.end()
        report.was_degraded = health.was_degraded
        report.untrue += [] if blow.kind == "server" else health.untrue[:5]
        report.became = dict(Counter(self._judged(i, x, blow) for i, x in enumerate(futures)))
        self._check_free(report)
        report.seconds = time.monotonic() - began
        return report

    def _hurt(self, blow: Blow, report: Report) -> None:
        if blow.kind == "server":
            process = self.server.process("engine")
            process.send_signal(signal.Signals[blow.trouble])
        elif blow.trouble in TROUBLES:
            self._members[blow.kind].hurt(blow.trouble)
            self._until(lambda: "degraded" in self.server.get("/health"), "never degraded", report)
        else:
            liar = self._liars[blow.kind.removesuffix(" that lies")]
            liar.lie(blow.trouble)
            report.was_struck = liar.has_lied.wait(_LIES_WITHIN_S)
            liar.lie(None)

    def _mend(self, blow: Blow, report: Report, health: Health) -> None:
        """All are back, and health says so."""
        if blow.trouble in TROUBLES:
            self._members[blow.kind].mend(blow.trouble)
        is_whole = lambda: self.server.get("/health") == {"status": "ok"}  # noqa: E731
        self._until(is_whole, "degraded for ever", report)

    def _mend_server(self, blow: Blow) -> None:
        if blow.trouble == "SIGSTOP":
            self.server.process("engine").send_signal(signal.SIGCONT)
            self.server.wait_until_ready()
            return
        self._server_stack.close()
        self._serve()

    def _until(self, condition: Any, otherwise: str, report: Report) -> None:
        try:
            self.server.wait_until(condition, LIMIT_S)
        except AssertionError:
            report.untrue.append(otherwise)

    def _check_free(self, report: Report) -> None:
        try:
            self.server.wait_until_idle()
        except AssertionError:
            report.untrue.append(f"kept: {self.server.status()}"[:2000])

    def _judged(self, number: int, asked: Future[Answer], blow: Blow) -> str:
        if not asked.done():
            return "hung"
        answer, expected = asked.result(), self._expected[str(number)]
        if answer.token_ids != expected[: len(answer.token_ids)]:
            return "changed"
        if answer.is_whole:
            return "right" if answer.token_ids == expected else "changed"
        if answer.error == "timeout":
            return "hung"
        if blow == Blow("server", "SIGKILL", blow.after):
            return "in part" if answer.token_ids else "refused"
        print(f"request {number}: {answer.error}", flush=True)
        return "lost"


def blows(each: int, chance: random.Random) -> list[Blow]:
    """Each lie for either role, so many of each kind and signal, and some of the
    server's, in a random order."""

    def after() -> int:
        return chance.randint(1, AFTER_TOKENS)

    chosen = [
        Blow(f"{role} that lies", lie, after())
        for lie, role in itertools.product(LIES, ROLES)
        if role == "prefill" or lie not in ONLY_PREFILL
    ]
    kinds = (*ROLES, *(f"{role}'s only R-worker" for role in ROLES))
    chosen += [
        Blow(kind, trouble, after())
        for kind, trouble, _ in itertools.product(kinds, TROUBLES, range(each))
    ]
    chosen += [Blow("server", "SIGKILL", after()) for _ in range(each)]
    return chance.sample(chosen, len(chosen))


def told(reports: list[Report]) -> dict[str, Any]:
    requests: Counter[str] = Counter()
    for report in reports:
        requests.update(report.became)
    kinds = Counter((x.blow.kind, x.verdict) for x in reports)
    return {
        "num_blows": sum(report.was_struck for report in reports),
        "counts": {", ".join(key): count for key, count in sorted(kinds.items())},
        "requests": dict(requests),
        "untrue": [what for report in reports for what in report.untrue],
        "blows": [{**asdict(x), "verdict": x.verdict} for x in reports],
    }


def run(options: argparse.Namespace) -> None:
    end_s, chance = time.monotonic() + 60 * options.minutes, random.Random(options.seed)
    reports: list[Report] = []
    out: Path | None = options.out
    before = json.loads(out.read_text())["runs"] if out is not None and out.exists() else []
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="fd"))
        campaign = stack.enter_context(contextlib.closing(Campaign(Path(name))))
        chosen = [blow for blow in blows(options.each, chance) if options.of in blow.kind]
        for blow in chosen:
            if time.monotonic() > end_s:
                break
            reports.append(campaign.strike(blow))
            print(reports[-1], flush=True)
            if out is not None:
                mine = {**provenance(), "seed": options.seed, **told(reports)}
                out.write_text(json.dumps({"runs": [*before, mine]}, indent=1) + "\n")
    shown = told(reports)
    del shown["blows"]
    print(json.dumps(shown, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="of each kind and signal")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--of", default="", help="kinds with this in them")
    parser.add_argument("--out", type=Path)
    hear_interrupts()
    run(parser.parse_args())


if __name__ == "__main__":
    main()
