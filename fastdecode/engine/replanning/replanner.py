"""Watches a controller's requests, and changes the roles of its instances, or
says which it would change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import astuple

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
)
from cost_model.goodput.slo import RequestTimes
from fastdecode.core.clock import Clock
from fastdecode.core.config.instances import InstanceRole
from fastdecode.engine.instances.controller import Controller
from fastdecode.engine.instances.routed_request import RoutedRequest
from fastdecode.engine.replanning.planner import Planner
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.role_changes import role_changes

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 1.0
_MOST_LENGTHS = 2000  # of a window, that a planner gets


class Replanner:
    """Belongs to the thread that owns the controller. Close it when done.

    Args:
        controller: of the instances.
        watch: decides when to look.
        batch_tokens: of prompts that an instance runs at once.
        token_bytes: K and V of a token, all layers.
        tell: reports what was found, one line at a time.
        clock: seconds.
    """

    def __init__(
        self,
        controller: Controller,
        watch: TrafficWatch,
        *,
        batch_tokens: int,
        token_bytes: int,
        tell: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._controller = controller
        self._watch = watch
        self._batch_tokens = batch_tokens
        self._token_bytes = token_bytes
        self._tell = tell
        self._clock = clock
        self._log = StepLog()
        self._planner = Planner(clock)
        self._asked: ReplanTrigger | None = None

    def arrived(self, routed: RoutedRequest) -> None:
        """See ``RequestObserver``."""
        routed.arrived_s = self._clock()
        self._watch.arrived(routed.arrived_s)

    def told(self, routed: RoutedRequest) -> None:
        """See ``RequestObserver``."""
        if routed.has_said:
            routed.last_s = self._clock()
            routed.first_s = routed.last_s if routed.first_s is None else routed.first_s

    def over(self, routed: RoutedRequest) -> None:
        """See ``RequestObserver``. Of several sequences the longest counts."""
        if routed.arrived_s is None or routed.first_s is None or routed.last_s is None:
            return
        tokens = max(len(said.token_ids) for said in routed.said)
        tpot_s = (routed.last_s - routed.first_s) / (tokens - 1) if tokens > 1 else None
        times = RequestTimes(routed.arrived_s, routed.first_s - routed.arrived_s, tpot_s)
        self._watch.finished(self._clock(), (times, routed.job.prompt_tokens, tokens))

    def look(self) -> None:
        """Now and then. What goes wrong here is no reason to end what runs."""
        try:
            self._look()
        except Exception:
            logger.exception("roles aren't looked at this time")

    def _look(self) -> None:
        for each in self._controller.router.instances:
            self._log.look(each.name, totals_of(each.stats, self._token_bytes))
        if self._asked is not None:
            if self._planner.is_over:
                self._take(self._asked)
            return
        due = self._watch.due(self._clock())
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
            self._watch.decided(self._clock(), due, None)
            raise
        self._asked = due

    def _question(self, due: ReplanTrigger) -> RoleQuestion | None:
        """None: too little is known of the instances, or there is no choice."""
        measured, present = self._log.measured(), self._present()
        if measured is None or present.num < 2:
            return None
        alive = [each for each in self._controller.router.registry.all if each.broken is None]
        profile = InstanceProfile(
            measured,
            self._batch_tokens,
            min(each.num_tokens for each in alive),
            min(each.max_sequences for each in alive),
        )
        found = due.traffic
        sample = TrafficSample(found.rate.value, found.cv.value, found.lengths[-_MOST_LENGTHS:])
        return RoleQuestion(profile, sample, self._watch.slo, present)

    def _take(self, due: ReplanTrigger) -> None:
        judged, self._asked = self._planner.take(), None
        if judged is not None and judged.present != self._present():
            judged = None  # somebody was lost meanwhile, or changed by hand
        changes = self._watch.decided(self._clock(), due, judged)
        if judged is None:
            logger.warning("roles: what others would carry couldn't be found out")
            return
        end = "if another window says so, too, better:" if self._watch.better else ""
        self._tell(_text(due, judged, "changing to" if changes else end))
        if changes:
            self._change(judged.best)

    def _change(self, best: Roles) -> None:
        router = self._controller.router
        places = [i for i, each in enumerate(router.registry.all) if each.broken is None]
        dispatcher = router.dispatcher
        busy = [
            dispatcher.decode[i].num_tokens / dispatcher.decode[i].capacity_tokens
            + dispatcher.prefill[i].num_tokens / dispatcher.prefill[i].batch_tokens
            for i in places
        ]
        wanted = dict(zip(_ORDER, astuple(best), strict=True))
        changes = role_changes([router.registry.roles[i] for i in places], wanted, busy)
        for index, role in changes.items():
            name = router.registry.all[places[index]].name
            self._controller.set_role(name, role)
            self._tell(f"roles: instance {name} is for {role.value} from now on")

    def _present(self) -> Roles:
        router = self._controller.router
        pairs = zip(router.registry.all, router.registry.roles, strict=True)
        roles = [role for each, role in pairs if each.broken is None]
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


_ORDER = (InstanceRole.PREFILL, InstanceRole.DECODE, InstanceRole.BOTH)
"""As ``Roles`` has them."""


def _text(due: ReplanTrigger, judged: JudgedRoles, end: str) -> str:
    """What was found, for people."""
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


class Ticking(threading.Thread):
    """Has a replanner look now and then, by the thread that owns it.

    Args:
        look: has that done; doesn't wait.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__(name="replanning", daemon=True)
        self._look = look
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(LOOKS_EVERY_S):
            self._look()

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        self._is_over.set()
        if self.is_alive():
            self.join()
