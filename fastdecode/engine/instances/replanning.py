"""Replanning: watch a router's requests, and change the roles of its instances as traffic shifts.

A process of its own finds out which roles would carry more. Nothing waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import IO, Final

from cost_model.goodput.replanning import (
    InstanceProfile,
    InstanceTotals,
    JudgedRoles,
    ReplanTrigger,
    RoleQuestion,
    Roles,
    StepLog,
    TrafficSample,
    TrafficWatch,
    WatchRules,
    from_json,
    to_json,
)
from cost_model.goodput.slo import RequestTimes, Slo
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.host.processes import python_command
from fastdecode.engine.instances.client import EngineClient
from fastdecode.engine.instances.routed import RoutedRequest
from fastdecode.engine.instances.router import Router
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.role_changes import role_changes
from fastdecode.wire.ranks import without_launcher

logger = logging.getLogger(__name__)

ATTAINMENT: Final = 0.9  # share of requests that are to keep the limits
LOOKS_EVERY_S = 1.0
ANSWERS_WITHIN_S: Final = 600.0
_MOST_LENGTHS: Final = 2000  # of a window, that a planner gets
# No other process would end it if this one were killed.
_BOOT = (
    "from fastdecode.core.host.processes import end_with; end_with(int(given), 'the planner'); "
    "from cost_model.goodput.replanning import main; main()"
)
_ORDER: Final = (InstanceRole.PREFILL, InstanceRole.DECODE, InstanceRole.BOTH)
"""As ``Roles`` has them."""


def slo_of(limits: str) -> Slo:
    """Return the SLO that requests are to keep. Raises ConfigError: If it can't be read."""
    return Slo.parse(limits, ATTAINMENT, option="replan_slo")


class Planner:
    """Asks a process of its own, one question at a time. Close it when done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._asked_s = 0.0

    def ask(self, question: RoleQuestion) -> None:
        """Ask, while no other question is open."""
        assert self._process is None
        # Files, not pipes: neither process has to read or write while the other does.
        with tempfile.TemporaryFile() as asked:
            asked.write(to_json(question).encode())
            asked.seek(0)
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115  (until it is read)
            self._asked_s = time.monotonic()
            self._process = subprocess.Popen(
                python_command(_BOOT, os.getpid()),
                stdin=asked,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                env=without_launcher(os.environ),
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        """Return whether a question has been answered, or won't be."""
        if self._process is None:
            return False
        is_late = time.monotonic() - self._asked_s > ANSWERS_WITHIN_S
        return is_late or self._process.poll() is not None

    def take(self) -> JudgedRoles | None:
        """Return the answer once it is over, or None if there is none."""
        assert self._process is not None and self._answer is not None
        try:
            self._answer.seek(0)
            said = self._answer.read().decode()
            return None if self._process.poll() != 0 else from_json(said, JudgedRoles)
        except ValueError:
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        process, self._process = self._process, None
        answer, self._answer = self._answer, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        if answer is not None:
            answer.close()


class Replanner:
    """Watches a router's requests, and changes roles by what they took. Belongs to the router's
    thread. Close it when done. ``token_bytes``: K and V of a token, all layers."""

    def __init__(
        self, limits: str, router: Router, token_bytes: int, tell: Callable[[str], None]
    ) -> None:
        self._router = router
        router.observe = self.observe
        self._watch = TrafficWatch(slo_of(limits), WatchRules(), time.monotonic())
        self._token_bytes = token_bytes
        self._tell = tell
        self._log = StepLog()
        self._planner = Planner()
        self._asked: ReplanTrigger | None = None
        self._due_s = 0.0

    def observe(self, routed: RoutedRequest) -> None:
        """Count a request that arrives, or is over. Of several sequences the longest counts."""
        if routed.num_left:
            self._watch.arrived(routed.arrived_s)
        elif routed.first_s is not None:
            tokens = max(len(said.token_ids) for said in routed.said)
            tpot_s = (routed.last_s - routed.first_s) / (tokens - 1) if tokens > 1 else None
            times = RequestTimes(routed.arrived_s, routed.first_s - routed.arrived_s, tpot_s)
            self._watch.finished(time.monotonic(), (times, routed.job.prompt_tokens, tokens))

    def look(self) -> None:
        """Look at roles if that is due. What goes wrong here ends nothing that runs."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOKS_EVERY_S
        try:
            self._look()
        except Exception:
            logger.exception("roles aren't looked at this time")

    def _look(self) -> None:
        for each in self._router.clients:
            self._log.look(each.name, totals_of(each.stats, self._token_bytes))
        if self._asked is not None:
            if self._planner.is_over:
                self._take(self._asked)
            return
        due = self._watch.due(time.monotonic())
        if due is not None:
            self._ask(due)

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        self._planner.close()

    def _ask(self, due: ReplanTrigger) -> None:
        question = self._question(due)
        if question is None:
            self._watch.put_off()
            return
        try:
            self._planner.ask(question)
        except OSError:
            self._watch.decided(time.monotonic(), due, None)
            raise
        self._asked = due

    def _question(self, due: ReplanTrigger) -> RoleQuestion | None:
        """Return what to ask, or None if too little is known, or there is no choice."""
        measured, present = self._log.measured(), self._present()
        if measured is None or present.num < 2:
            return None
        alive = [each for _, each in self._alive()]
        profile = InstanceProfile(
            measured,
            self._router.batch_tokens,
            min(each.num_tokens for each in alive),
            min(each.max_sequences for each in alive),
        )
        found = due.traffic
        sample = TrafficSample(found.rate.value, found.cv.value, found.lengths[-_MOST_LENGTHS:])
        return RoleQuestion(profile, sample, self._watch.slo, present)

    def _take(self, due: ReplanTrigger) -> None:
        judged, self._asked = self._planner.take(), None
        if judged is not None and judged.present != self._present():
            judged = None  # an instance was lost meanwhile, or changed by hand
        changes = self._watch.decided(time.monotonic(), due, judged)
        if judged is None:
            logger.warning("roles: what others would carry couldn't be found out")
            return
        end = "if another window says so, too, better:" if self._watch.better else ""
        self._tell(_text(due, judged, "changing to" if changes else end))
        if changes:
            self._change(judged.best)

    def _change(self, best: Roles) -> None:
        alive, dispatcher = self._alive(), self._router.dispatcher
        busy = [
            dispatcher.decode[i].num_tokens / dispatcher.decode[i].capacity_tokens
            + dispatcher.prefill[i].num_tokens / dispatcher.prefill[i].batch_tokens
            for i, _ in alive
        ]
        wanted = dict(zip(_ORDER, astuple(best), strict=True))
        for place, role in role_changes([each.role for _, each in alive], wanted, busy).items():
            name = alive[place][1].name
            self._router.set_role(name, role)
            self._tell(f"roles: instance {name} is for {role.value} from now on")

    def _alive(self) -> list[tuple[int, EngineClient]]:
        """Return the instances that are not lost, and their numbers."""
        every = enumerate(self._router.clients)
        return [(i, each) for i, each in every if each.broken is None]

    def _present(self) -> Roles:
        roles = [each.role for _, each in self._alive()]
        return Roles(*(roles.count(role) for role in _ORDER))


def totals_of(stats: EngineStats, token_bytes: int) -> InstanceTotals:
    return InstanceTotals(
        stats.num_steps,
        stats.num_output_tokens,
        stats.load_sum,
        stats.num_prompt_tokens,
        stats.step_s,
        stats.fetched_bytes / token_bytes,
        stats.fetching_s,
    )


def _text(due: ReplanTrigger, judged: JudgedRoles, end: str) -> str:
    """Return what was found, for people."""
    rate = due.traffic.rate.value
    said = (
        f"roles: {due.reason}; {rate:.3g} requests a second come, {judged.present} carry "
        f"{judged.present_goodput:.3g} of them within the SLO; "
    )
    if end:
        return said + f"{end} {judged.best}, which carry {judged.best_goodput:.3g}"
    if judged.best_goodput >= rate:
        return said + "they stay"
    more = f"about {judged.enough} instances would" if judged.enough else "nor would more"
    return said + f"no other roles carry enough, {more}"
