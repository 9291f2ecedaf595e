"""One step of the pipeline, predicted: seconds per token, tokens a second, who waits for whom.

A lane's way through one layer is a chain: S-part, q k v out, R-part, o back, the round trip's
latency, and what the S-worker's thread spends on the messages, one to and from each R-worker. Over
ZeroMQ its I/O threads carry what goes out and what comes back (I/O), and each way takes at least
as long as they need for it. With K lanes in flight all lanes pass one layer every ``cycle_s`` of
``fastdecode.schedule.times``: the link is as busy as the busiest of messages, I/O, out and back,
and the trip is messages + out + back + round trip. A step is ``num_layers`` cycles, and gives
every running sequence one token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_model.stages import MPI, LinkModel, Provenance, RPartModel, SPartModel, Transport
from cost_model.workload import TokenCosts, Workload
from fastdecode.schedule.times import Prompts, StepTime, cycle_s

MAX_LANES = 4


@dataclass(frozen=True)
class LaneTimes:
    s_s: float
    """The S-part, the lane's share of prompts included."""
    out_s: float
    r_s: float
    """R-part of the busiest R-worker."""
    back_s: float
    round_trip_s: float
    messages_s: float = 0.0
    """Time of the S-worker's thread, for all R-workers."""
    io_s: float = 0.0
    """Time of the S-worker's I/O threads, out and back."""

    @property
    def link_s(self) -> float:
        return max(self.out_s, self.back_s, self.messages_s, self.io_s)

    @property
    def trip_s(self) -> float:
        return self.messages_s + self.out_s + self.back_s + self.round_trip_s

    @property
    def chain_s(self) -> float:
        return self.s_s + self.trip_s + self.r_s

    def cycle_s(self, lanes: int, headroom: float = 0.0) -> float:
        """Return the time in which all lanes pass one layer, if the R-part takes ``headroom``
        longer than predicted."""
        slow_r_s = self.r_s * headroom
        expected_s = cycle_s(lanes, self.s_s, self.r_s, self.trip_s, self.link_s)
        return max(expected_s, self.chain_s + slow_r_s, lanes * (self.r_s + slow_r_s))

    def limit(self, lanes: int) -> str:
        """Return what sets the cycle. Of two that are equal, the first of these."""
        bounds = {
            "S-part": lanes * self.s_s,
            "R-part": lanes * self.r_s,
            "network": lanes * max(self.out_s, self.back_s),
            "messages": lanes * self.messages_s,
            "ZeroMQ I/O": lanes * self.io_s,
            "round trip": self.chain_s,
        }
        return max(bounds, key=bounds.__getitem__)


@dataclass(frozen=True)
class StepPrediction:
    batch: int
    lanes: int
    sockets: int
    step_s: float
    """One token for every running sequence: the TPOT."""
    tokens_per_s: float
    latency_s: float
    s_utilisation: float
    r_utilisation: float
    network_utilisation: float
    limit: str
    """What sets the pace: S-part, R-part, network, messages, ZeroMQ I/O or round trip."""

    @property
    def tpot_s(self) -> float:
        return self.step_s


@dataclass(frozen=True)
class System:
    """Everything a prediction depends on, but batch, lanes and sockets."""

    s: SPartModel
    r: RPartModel
    link: LinkModel
    num_nics: int
    """Ports of the S-worker; every R-worker host has one."""
    costs: TokenCosts
    workload: Workload
    transport: Transport = MPI

    @cached_property
    def attended_tokens(self) -> float:
        """Keys that a running sequence sees a layer, averaged."""
        return self.workload.attended_tokens(self.costs.spec)

    def on_device(self) -> System:
        """Return the GPUs alone: the R-part is theirs, too. One lane: they can't do two things at
        once."""
        r, s = RPartModel.of_device(self.s, self.costs), replace(self.s, host_link_bytes_per_s=None)
        return replace(self, s=s, r=r, link=LinkModel.within_process(), transport=MPI)

    def scaled(self, sign: int) -> System:
        s, r, link = self.s.scaled(sign), self.r.scaled(sign), self.link.scaled(sign)
        return replace(self, s=s, r=r, link=link)

    @cached_property
    def prompt_s(self) -> float:
        """Time of one prompt, without what the prefix cache holds of it."""
        workload = self.workload
        whole_s = self.s.prefill_s(workload.prompt_tokens)
        return whole_s - self.s.prefill_s(workload.cached_prompt_tokens)

    def s_s(self, lane_batch: int) -> float:
        """Return T(B) of one lane, with the prompts of sequences that start: each step, one of
        ``output`` ends."""
        starts = lane_batch / self.workload.output_tokens
        prefill_s = starts * self.prompt_s / self.costs.num_layers
        return self.s.t_of_b(lane_batch) + prefill_s

    def way_bytes(self, lane_batch: int) -> tuple[float, float]:
        """Return bytes of one lane and layer: q, k, v out and o back, and those of its starting
        prompts. Their q and o stay on the S-worker unless R-workers attend them."""
        costs, workload = self.costs, self.workload
        computed = workload.prompt_tokens - workload.cached_prompt_tokens
        prompt_tokens = lane_batch / workload.output_tokens * computed
        out, back = costs.prompt_out_bytes, 0
        if self.s.prompts_on_r:
            out, back = costs.out_bytes, costs.back_bytes
        return (
            lane_batch * costs.out_bytes + prompt_tokens * out,
            lane_batch * costs.back_bytes + prompt_tokens * back,
        )

    def s_link_s(self, num_bytes: float) -> float:
        """Return seconds one way through the S-worker's ports, or its narrower PCIe links."""
        network_s = self.link.transfer_s(num_bytes) / self.num_nics
        if self.s.host_link_bytes_per_s is None:
            return network_s
        return max(network_s, num_bytes / self.s.host_link_bytes_per_s)

    def r_s(self, lane_batch: int, sockets: float) -> float:
        """Return the R-part of one lane and layer. A sequence lives on one R-worker, so more
        sockets than sequences idle."""
        sequences = max(1.0, lane_batch / sockets)
        return self.r.r_s(sequences, sequences * self.attended_tokens)

    def messages_s(self, lane_batch: int, sockets: float) -> float:
        """Return the time of the S-worker's thread for one lane and layer. R-workers without a
        sequence get no message."""
        return self.link.pace * self.link.message_s * min(sockets, lane_batch)

    def way_s(self, num_bytes: float, sockets: float) -> float:
        """Return seconds one way between the S-worker and all R-workers: of the slowest of ports,
        PCIe and I/O threads, which work side by side."""
        r_hosts = max(1.0, sockets / self.r.sockets_per_host)
        r_links_s = self.link.transfer_s(num_bytes) / r_hosts
        io_s = self.transport.io_s(num_bytes, sockets)
        return max(self.s_link_s(num_bytes), r_links_s, io_s)

    def lane(self, lane_batch: int, sockets: float) -> LaneTimes:
        return self.lane_over(lane_batch)(sockets)

    def lane_over(self, lane_batch: int) -> Callable[[float], LaneTimes]:
        """Return ``lane`` over sockets: what does not depend on them is computed once."""
        s_s, (out, back) = self.s_s(lane_batch), self.way_bytes(lane_batch)

        def on(sockets: float) -> LaneTimes:
            return LaneTimes(
                s_s=s_s,
                out_s=self.way_s(out, sockets),
                r_s=self.r_s(lane_batch, sockets),
                back_s=self.way_s(back, sockets),
                round_trip_s=self.link.trip_s,
                messages_s=self.messages_s(lane_batch, sockets),
                io_s=self.transport.io_s(out + back, sockets),
            )

        return on

    def cycle_over(
        self, lane_batch: int, lanes: int, headroom: float = 0.0
    ) -> Callable[[float], float]:
        lane = self.lane_over(lane_batch)
        return lambda sockets: lane(sockets).cycle_s(lanes, headroom)

    def predict(
        self, lane_batch: int, lanes: int, sockets: int, batch: int | None = None
    ) -> StepPrediction:
        """Predict the steady state of ``lanes`` lanes over ``sockets`` R-workers, the largest of
        ``lane_batch`` sequences. ``batch`` has all sequences, where lanes differ."""
        lane = self.lane(lane_batch, sockets)
        cycle_s = lane.cycle_s(lanes)
        step_s = self.costs.num_layers * cycle_s
        batch = batch or lane_batch * lanes
        return StepPrediction(
            batch=batch,
            lanes=lanes,
            sockets=sockets,
            step_s=step_s,
            tokens_per_s=batch / step_s,
            latency_s=self.latency_s(step_s),
            s_utilisation=lanes * lane.s_s / cycle_s,
            r_utilisation=lanes * lane.r_s / cycle_s,
            network_utilisation=lanes * max(lane.out_s, lane.back_s) / cycle_s,
            limit=lane.limit(lanes),
        )

    def latency_s(self, step_s: float) -> float:
        return self.prompt_s + self.workload.output_tokens * step_s

    def step_limit_s(self, latency_s: float | None, tpot_s: float | None) -> float:
        """Return the longest step that keeps both promises. Not positive if the prompt alone
        breaks the first."""
        limit_s = math.inf if tpot_s is None else tpot_s
        if latency_s is None:
            return limit_s
        return min((latency_s - self.prompt_s) / self.workload.output_tokens, limit_s)

    def load_limit_tokens(self, lane_batch: int, sockets: int) -> int:
        """Return W_lim of the scheduler: the most cached tokens of a lane whose S-part hides its
        R-part."""
        sequences = max(1.0, lane_batch / sockets)
        room_s = self.s_s(lane_batch) / self.r.pace - self.r.call_s - self.r.sequence_s * sequences
        return max(0, int(sockets * room_s / self.r.token_s)) if self.r.token_s > 0 else 0


def machine_times(system: System, sequences: int) -> tuple[float, float]:
    """Return seconds of a microbatch's prompts, and of one token, on the GPUs alone, with all
    layers and K and V in their memory."""
    workload = system.workload
    alone = SystemTime(replace(system.on_device(), workload=Workload(0, 1)), 1)
    load = sequences * workload.mean_context_tokens
    prompt_s = alone.s_part_s(0, [(0, workload.prompt_tokens)] * sequences)
    r_part_s = alone.r_part_s(0, load, sequences)
    return prompt_s, alone.s_part_s(sequences) + r_part_s + alone.trip_s(sequences)


@dataclass(frozen=True)
class SystemTime(StepTime):
    """Step times of an S-worker and equal R-workers, one per socket, which share sequences evenly.
    The prompts of the system's workload are counted in, at their average."""

    system: System
    sockets: float
    transfer_bytes_per_s: float = math.inf
    _lanes: dict[int, LaneTimes] = field(default_factory=dict)

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        if not num_decoding:
            return self._prompts_alone_s(prompts)
        return self._layers * self._lane(num_decoding).s_s + self._prompts_s(prompts)

    def _prompts_s(self, prompts: Prompts) -> float:
        """Return what prompts add to a step, which reads the weights anyway."""
        s = self.system.s
        own_s = sum(s.prefill_s(before + new) - s.prefill_s(before) for before, new in prompts)
        return own_s + self._way_s(sum(new for _, new in prompts))

    def _way_s(self, num_tokens: int) -> float:
        system, costs = self.system, self.system.costs
        if not system.s.prompts_on_r:
            return 0.0
        out_s = system.way_s(num_tokens * costs.out_bytes, self.sockets)
        return self._layers * (out_s + system.way_s(num_tokens * costs.back_bytes, self.sockets))

    def _prompts_alone_s(self, prompts: Prompts) -> float:
        """Return a step of prompts alone. It reads the weights, and sends K and V to the
        R-workers."""
        s, costs = self.system.s, self.system.costs
        total, prompts_s = sum(new for _, new in prompts), self._prompts_s(prompts)
        if s.provenance is Provenance.MEASURED:
            # Each was measured by itself, weights included.
            prompts_s = min(prompts_s, s.prefill_s(total) + self._way_s(total))
        else:
            prompts_s = max(prompts_s, s.pace * self._layers * s.layer_s(total))
            prompts_s += s.pace * s.head_s(len(prompts))
        if s.host_link_bytes_per_s is None:
            return prompts_s
        kv_bytes = self._layers * costs.prompt_out_bytes * total
        return max(prompts_s, kv_bytes / s.host_link_bytes_per_s)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        attended = load_tokens
        if self._windows and num_sequences:
            context = load_tokens / num_sequences
            seen = (
                count * (context if window is None else min(context, window))
                for window, count in self._windows.items()
            )
            attended = num_sequences * (sum(seen) / self._layers)
        return self._layers * self.system.r.r_s(num_sequences, attended)

    def link_s(self, num_tokens: int) -> float:
        return self._layers * self._lane(num_tokens).link_s

    def trip_s(self, num_tokens: int) -> float:
        return self._layers * self._lane(num_tokens).trip_s

    def transfer_s(self, num_tokens: float) -> float:
        return num_tokens * self.system.costs.kv_bytes / self.transfer_bytes_per_s

    @cached_property
    def _layers(self) -> int:
        return self.system.costs.num_layers

    def _lane(self, num_decoding: int) -> LaneTimes:
        if num_decoding not in self._lanes:
            self._lanes[num_decoding] = self.system.lane(num_decoding, self.sockets)
        return self._lanes[num_decoding]

    @cached_property
    def _windows(self) -> Counter[int | None]:
        """How many layers have each window; empty if no layer has one."""
        windows = Counter(each.sliding_window for each in self.system.costs.spec.attention)
        return windows if any(windows) else Counter()
