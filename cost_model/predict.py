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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from cost_model.stages import LinkModel, RPartModel, SPartModel
from cost_model.transport import MPI, Transport
from cost_model.workload import TokenCosts, Workload
from fastdecode.schedule.times import cycle_s

MAX_LANES = 4


@dataclass(frozen=True)
class LaneTimes:
    """One lane's way through one layer, in seconds."""

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

    def cycle_s(self, lanes: int) -> float:
        """All lanes pass one layer once in this time."""
        return cycle_s(lanes, self.s_s, self.r_s, self.trip_s, self.link_s)

    def limit(self, lanes: int) -> str:
        """What sets the cycle; of two that are equal, the first of these."""
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
    """Time of a whole sequence: its prompt, then every output token."""
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
        """The GPUs alone: the R-part is theirs, too, and nothing leaves them. One lane: they
        can't do two things at once."""
        r, s = RPartModel.of_device(self.s, self.costs), replace(self.s, host_link_bytes_per_s=None)
        return replace(self, s=s, r=r, link=LinkModel.within_process(), transport=MPI)

    def scaled(self, sign: int) -> System:
        """Everything slower (+1) or faster (-1) by its own relative error, to
        bound a prediction."""
        s, r, link = self.s.scaled(sign), self.r.scaled(sign), self.link.scaled(sign)
        return replace(self, s=s, r=r, link=link)

    @cached_property
    def prompt_s(self) -> float:
        """Time of one prompt, without what the prefix cache holds of it."""
        workload = self.workload
        whole_s = self.s.prefill_s(workload.prompt_tokens)
        return whole_s - self.s.prefill_s(workload.cached_prompt_tokens)

    def s_s(self, lane_batch: int) -> float:
        """T(B) of one lane, and its share of the prompts of sequences that
        start: each step, one of ``output`` ends."""
        starts = lane_batch / self.workload.output_tokens
        prefill_s = starts * self.prompt_s / self.costs.num_layers
        return self.s.t_of_b(lane_batch) + prefill_s

    def prompt_tokens(self, lane_batch: int) -> float:
        """Prompt tokens that a lane computes in a step, of its starting sequences."""
        computed = self.workload.prompt_tokens - self.workload.cached_prompt_tokens
        return lane_batch / self.workload.output_tokens * computed

    def out_bytes(self, lane_batch: int) -> float:
        """q, k, v of one lane and layer, and k, v of its starting prompts; q
        too, where R-workers attend them."""
        of_prompts = self.costs.out_bytes if self.s.prompts_on_r else self.costs.prompt_out_bytes
        return lane_batch * self.costs.out_bytes + self.prompt_tokens(lane_batch) * of_prompts

    def back_bytes(self, lane_batch: int) -> float:
        """o of one lane and layer, and of its starting prompts where R-workers attend them."""
        of_prompts = self.costs.back_bytes if self.s.prompts_on_r else 0
        return lane_batch * self.costs.back_bytes + self.prompt_tokens(lane_batch) * of_prompts

    def s_link_s(self, num_bytes: float) -> float:
        """Seconds one way through the S-worker's ports, or its PCIe links where
        those are narrower."""
        network_s = self.link.transfer_s(num_bytes) / self.num_nics
        if self.s.host_link_bytes_per_s is None:
            return network_s
        return max(network_s, num_bytes / self.s.host_link_bytes_per_s)

    def r_link_s(self, num_bytes: float, sockets: float) -> float:
        """Seconds one way through the ports of the R-workers' hosts, each of
        which carries its share."""
        hosts = max(1.0, sockets / self.r.sockets_per_host)
        return self.link.transfer_s(num_bytes) / hosts

    def r_s(self, lane_batch: int, sockets: float) -> float:
        """The R-part of one lane and layer. A sequence lives on one R-worker,
        so more sockets than sequences idle."""
        sequences = max(1.0, lane_batch / sockets)
        return self.r.r_s(sequences, sequences * self.attended_tokens)

    def messages_s(self, lane_batch: int, sockets: float) -> float:
        """The S-worker's thread, for one lane and layer: R-workers without a
        sequence of the lane get no message."""
        return self.link.pace * self.link.message_s * min(sockets, lane_batch)

    def way_s(self, num_bytes: float, sockets: float) -> float:
        """Seconds one way between the S-worker and all R-workers: as long as the
        slowest of ports, PCIe and I/O threads needs, which work side by side."""
        links_s = max(self.s_link_s(num_bytes), self.r_link_s(num_bytes, sockets))
        return max(links_s, self.transport.io_s(num_bytes, sockets))

    def lane(self, lane_batch: int, sockets: float) -> LaneTimes:
        return self.lane_over(lane_batch)(sockets)

    def lane_over(self, lane_batch: int) -> Callable[[float], LaneTimes]:
        """``lane`` over sockets: what does not depend on them is computed once."""
        s_s = self.s_s(lane_batch)
        out, back = self.out_bytes(lane_batch), self.back_bytes(lane_batch)

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

    def predict(
        self, lane_batch: int, lanes: int, sockets: int, batch: int | None = None
    ) -> StepPrediction:
        """Predict the steady state of ``lanes`` lanes over ``sockets`` R-workers.

        Args:
            lane_batch: Sequences of the largest lane.
            batch: Sequences of all lanes. None if the lanes are equal.
        """
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
        """Return the time of a prompt and a step for each output token."""
        return self.prompt_s + self.workload.output_tokens * step_s

    def step_limit_s(self, latency_s: float | None, tpot_s: float | None) -> float:
        """The longest step that keeps both promises; not positive if the prompt
        alone breaks the first."""
        limits = [float("inf")]
        if latency_s is not None:
            limits.append((latency_s - self.prompt_s) / self.workload.output_tokens)
        if tpot_s is not None:
            limits.append(tpot_s)
        return min(limits)

    def load_limit_tokens(self, lane_batch: int, sockets: int) -> int:
        """W_lim of the scheduler: the most cached tokens of a lane whose R-part
        takes no longer than its S-part."""
        sequences = max(1.0, lane_batch / sockets)
        room_s = self.s_s(lane_batch) / self.r.pace - self.r.call_s - self.r.sequence_s * sequences
        return max(0, int(sockets * room_s / self.r.token_s)) if self.r.token_s > 0 else 0
