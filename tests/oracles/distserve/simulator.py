"""simdistserve's simulation, event for event.

* A prefill instance's first stage takes all that is queued, as long as the
  prompts fit into its tokens; later stages take a batch as it comes.
* A decode instance takes all that is queued, as long as the contexts stay
  within 50,000 tokens.
* An instance for both prefills first.
* A request runs as many decode iterations as it has output tokens, after the
  one that its prompt gave. Its TPOT is the time from its first token to its end
  over that number.
* It joins the instance with the fewest requests queued, and in prefill.

Events of the same time happen in the order in which they were set.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cost_model.goodput.placements import Degrees
from cost_model.goodput.slo import RequestTimes
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.clock import VirtualClock
from oracles.distserve.profile import Backend, PublishedModel, StageTimes, first_stage_ms

DECODE_MAX_TOKENS = 50_000
BACK_PRESSURE_TOKENS = 9_000_000
"""Of contexts that wait for decoding: with more, an instance for both prefills none."""


@dataclass(eq=False)
class _Request:
    prompt: int
    output: int
    arrived_ms: float
    context: int = 0  # tokens of prompt and output so far, as decoding counts them
    left: int = 0  # decode iterations still to come
    batch: int = -1  # in which it is prefilled
    first_ms: float = 0.0
    ended_ms: float = 0.0


@dataclass(frozen=True)
class _Phases:
    """What a stage does, and for how long."""

    prefill: StageTimes
    prefill_pp: int
    prefill_tokens: int
    decode: StageTimes
    decode_pp: int


class _Stage:
    """One stage of an instance."""

    def __init__(self, clock: VirtualClock, phases: _Phases, is_first: bool, is_last: bool) -> None:
        self._clock = clock
        self._phases = phases
        self._is_first, self._is_last = is_first, is_last
        self.next = self
        self.hand_over: Callable[[_Request], None] | None = None
        """Who decodes; None: this instance."""
        self.prefills: deque[_Request] = deque()
        self.decodes: deque[_Request] = deque()
        self.num_prefilling = 0
        self._is_waiting = True
        self._batches = itertools.count()

    @property
    def num_queued(self) -> int:
        """What a request looks at to choose an instance to prefill it."""
        return self.num_prefilling + len(self.prefills)

    def put(self, queue: deque[_Request], requests: Iterable[_Request]) -> None:
        queue.extend(requests)
        if self._is_waiting:
            self._is_waiting = False
            self._clock.at(self._clock.now, self._go_on)

    def _go_on(self) -> None:
        """Start a batch, or wait."""
        if self.prefills and not self._is_pressed():
            self._prefill()
        elif self.prefills or self.decodes:
            self._decode()
        else:
            self._is_waiting = True

    def _is_pressed(self) -> bool:
        return sum(request.context for request in self.decodes) > BACK_PRESSURE_TOKENS

    def _prefill(self) -> None:
        batch = self._take_prompts()
        num_tokens = sum(request.prompt for request in batch)
        num_squared = sum(request.prompt * request.prompt for request in batch)
        took_ms = self._phases.prefill.prefill_ms(num_tokens, num_squared, self._phases.prefill_pp)
        if self._is_first:
            took_ms += first_stage_ms(num_tokens)
        self.num_prefilling = len(batch)
        self._clock.at(self._clock.now + took_ms, lambda: self._prefilled(batch))

    def _take_prompts(self) -> list[_Request]:
        queue, batch = self.prefills, []
        if not self._is_first:
            number = queue[0].batch
            while queue and queue[0].batch == number:
                batch.append(queue.popleft())
            return batch
        number, room = next(self._batches), self._phases.prefill_tokens
        while queue and queue[0].prompt <= room:
            request = queue.popleft()
            room -= request.prompt
            request.batch = number
            batch.append(request)
        return batch

    def _prefilled(self, batch: list[_Request]) -> None:
        self.num_prefilling = 0
        for request in batch:
            if not self._is_last:
                self.next.put(self.next.prefills, (request,))
                continue
            request.first_ms = self._clock.now
            request.context, request.left = request.prompt, request.output
            if self.hand_over is not None:
                self.hand_over(request)
            else:
                self.next.put(self.next.decodes, (request,))
        self._go_on()

    def _decode(self) -> None:
        queue, batch, room = self.decodes, [], DECODE_MAX_TOKENS
        num_context = 0
        while queue and queue[0].context + 1 <= room:
            request = queue.popleft()
            room -= request.context + 1
            num_context += request.context
            batch.append(request)
        took_ms = self._phases.decode.decode_ms(
            len(batch), num_context + len(batch), self._phases.decode_pp
        )
        if self._is_first:
            took_ms += first_stage_ms(num_context)
        self._clock.at(self._clock.now + took_ms, lambda: self._decoded(batch))

    def _decoded(self, batch: list[_Request]) -> None:
        if self._is_last:
            for request in batch:
                request.context += 1
                request.left -= 1
                if not request.left:
                    request.ended_ms = self._clock.now
            batch = [request for request in batch if request.left]
        if batch:
            self.next.put(self.next.decodes, batch)
        self._go_on()


def simulate_disaggregated(
    requests: Sequence[tuple[float, int, int]],
    model: PublishedModel,
    prefill: Degrees,
    decode: Degrees,
    num_prefill: int = 1,
    num_decode: int = 1,
) -> list[RequestTimes]:
    """Instances for prefill, and others for decode.

    Args:
        requests: seconds of arrival, prompt and output tokens, by arrival.
        num_prefill, num_decode: instances.

    Returns:
        times of each, in the same order.

    Raises:
        ConfigError: the profile can't run this placement, or a request would
            never be run.
    """
    phases = _Phases(
        model.stage(prefill.tp, prefill.pp, "distserve"), prefill.pp,
        model.max_tokens[prefill.tp, prefill.pp],
        model.stage(decode.tp, decode.pp, "distserve"), decode.pp,
    )  # fmt: skip
    clock = VirtualClock()
    prefill_heads = [_instance(clock, phases, prefill.pp) for _ in range(num_prefill)]
    decode_heads = [_instance(clock, phases, decode.pp) for _ in range(num_decode)]

    def hand_over(request: _Request) -> None:
        head = min(decode_heads, key=lambda each: len(each.decodes))
        head.put(head.decodes, (request,))

    for head in prefill_heads:
        last = head
        while last.next is not head:
            last = last.next
        last.hand_over = hand_over
    return _run(clock, requests, prefill_heads, phases)


def simulate_colocated(
    requests: Sequence[tuple[float, int, int]],
    model: PublishedModel,
    degrees: Degrees,
    backend: Backend = "vllm",
    num_instances: int = 1,
) -> list[RequestTimes]:
    """Instances for both, which prefill first. As ``simulate_disaggregated``."""
    stage = model.stage(degrees.tp, degrees.pp, backend)
    max_tokens = model.max_tokens[degrees.tp, degrees.pp]
    phases = _Phases(stage, degrees.pp, max_tokens, stage, degrees.pp)
    clock = VirtualClock()
    heads = [_instance(clock, phases, degrees.pp) for _ in range(num_instances)]
    return _run(clock, requests, heads, phases)


def _instance(clock: VirtualClock, phases: _Phases, num_stages: int) -> _Stage:
    """Its first stage; the last one's next is the first."""
    stages = [
        _Stage(clock, phases, is_first=i == 0, is_last=i == num_stages - 1)
        for i in range(num_stages)
    ]
    for stage, after in itertools.pairwise(stages):
        stage.next = after
    stages[-1].next = stages[0]
    return stages[0]


def _run(
    clock: VirtualClock,
    requests: Sequence[tuple[float, int, int]],
    heads: list[_Stage],
    phases: _Phases,
) -> list[RequestTimes]:
    waiting = [_Request(prompt, output, at_s * 1000) for at_s, prompt, output in requests]
    for request in waiting:
        _check(request, phases.prefill_tokens)
        clock.at(request.arrived_ms, lambda request=request: _arrive(request, heads))  # type: ignore[misc]
    clock.run()
    return [
        RequestTimes(
            request.arrived_ms / 1000,
            (request.first_ms - request.arrived_ms) / 1000,
            (request.ended_ms - request.first_ms) / request.output / 1000,
        )
        for request in waiting
    ]


def _arrive(request: _Request, heads: list[_Stage]) -> None:
    head = min(heads, key=lambda each: each.num_queued)
    head.put(head.prefills, (request,))


def _check(request: _Request, prefill_tokens: int) -> None:
    if not 1 <= request.prompt <= prefill_tokens or request.output < 1:
        raise ConfigError(
            f"a request of {request.prompt} prompt and {request.output} output tokens never runs "
            f"here: prompts have 1 to {prefill_tokens}, outputs at least 1"
        )
    if request.prompt + request.output > DECODE_MAX_TOKENS:
        raise ConfigError(
            f"a request of {request.prompt} prompt and {request.output} output tokens never ends "
            f"here: the published simulator decodes contexts up to {DECODE_MAX_TOKENS}"
        )
