"""What a plan must satisfy, one constraint at a time: each with the fewest
sockets that satisfy it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_model.closed_forms import at_most, whole
from cost_model.predict import System
from cost_model.quantities import bytes_text, counted, seconds_text

# The GPU counts as busy if the S-worker's ports, which no socket speeds up,
# leave it idle no longer than this.
BUSY = 0.95


@dataclass(frozen=True)
class Constraint:
    """One line of the answer."""

    name: str
    min_sockets: int | None
    """0: satisfied without any. None: no number of sockets satisfies it."""
    detail: str
    """The numbers behind it, in words."""
    mend: str
    """What else would help."""


@dataclass(frozen=True)
class Promises:
    """What the user asked to hold. Steps of a sequence may take
    ``step_limit_s``; inf if nothing was asked."""

    step_limit_s: float
    headroom: float
    """The R-part must fit even if it takes this much longer than predicted: 0.1 is a tenth."""
    replicas: int = 0
    """Copies of every KV cache beside it, on another R-worker."""


def s_memory_bytes(system: System, lane_batch: int, lanes: int) -> float:
    """GPU memory: weights, one lane's activations and every lane's staging of
    q, k, v, o; all GPUs together."""
    costs = system.costs
    staging = lanes * lane_batch * (costs.out_bytes + costs.back_bytes)
    return costs.weight_bytes + lane_batch * costs.peak_activation_bytes + staging


def r_memory_bytes(system: System, lane_batch: int, lanes: int) -> float:
    """KV cache on all R-workers. Room for a sequence's end is set aside when it starts."""
    return lane_batch * lanes * system.workload.peak_context_tokens * system.costs.kv_bytes


def s_worker_fits(system: System, lane_batch: int, lanes: int) -> bool:
    return at_most(s_memory_bytes(system, lane_batch, lanes), system.s.usable_memory_bytes)


def gpu_busy_constraints(
    system: System, lane_batch: int, lanes: int, promises: Promises
) -> tuple[Constraint, ...]:
    """What it takes that the S-worker never waits, every promise is kept and
    everything fits. Strictest reading: each other stage of a lane must be no
    slower than the lane's S-part."""
    s_s = system.s_s(lane_batch)
    rows = _stage_constraints(system, lane_batch, promises, s_s)
    trips = _round_trips(system, lane_batch, lanes, promises)
    others = _room_and_latency(system, lane_batch, lanes, promises)
    return (*rows, trips, _messages(system, lane_batch, (*rows, trips, *others), s_s), *others)


def best_effort_constraints(
    system: System, lane_batch: int, lanes: int, promises: Promises
) -> tuple[Constraint, ...]:
    """As above, where the S-worker may wait: the pace is that of the slowest
    stage that no socket can speed up."""
    lane = system.lane(lane_batch, sockets=float("inf"))
    ways_s = max(lane.out_s, lane.back_s, lane.io_s)
    pace_s = max(lane.s_s, ways_s, lane.r_s * (1.0 + promises.headroom))
    rows = _stage_constraints(system, lane_batch, promises, pace_s)
    return (*rows, *_room_and_latency(system, lane_batch, lanes, promises))


def _stage_constraints(
    system: System, lane_batch: int, promises: Promises, pace_s: float
) -> tuple[Constraint, ...]:
    """The stages whose time depends on the number of sockets, each within ``pace_s``."""
    load = lane_batch * system.attended_tokens
    token_s, pace = system.r.pace * system.r.token_s, seconds_text(pace_s)
    balance = _sockets_for(lambda p: system.r_s(lane_batch, p) * (1.0 + promises.headroom), pace_s)
    read_s = load * system.r.read_token_s
    out, back = system.out_bytes(lane_batch), float(lane_batch * system.costs.back_bytes)
    s_side_s = system.s_link_s(max(out, back))
    network = None
    if at_most(s_side_s, pace_s / BUSY):
        hosts = system.link.transfer_s(max(out, back)) / pace_s
        network = whole(hosts * system.r.sockets_per_host) if hosts > 1 else 1
    return (
        *_io_threads(system, lane_batch, pace_s),
        Constraint(
            "S-time balance",
            balance,
            f"{load:,.0f} cached tokens a lane x {seconds_text(token_s)} = "
            f"{seconds_text(load * token_s)} on one socket, to be done in {pace}",
            "a larger batch, fewer tokens a sequence, a smaller KV dtype",
        ),
        Constraint(
            "R bandwidth",
            whole(read_s / pace_s),
            f"the same tokens at the read ceiling: {seconds_text(read_s)} on one socket",
            "faster memory, a smaller KV dtype",
        ),
        Constraint(
            "network bytes",
            network,
            f"{bytes_text(out)} out and {bytes_text(back)} back a lane and layer: "
            f"{seconds_text(s_side_s)} of {pace} on the S-worker's ports",
            "a faster port, more ports",
        ),
    )


def _io_threads(system: System, lane_batch: int, pace_s: float) -> tuple[Constraint, ...]:
    """Over ZeroMQ. Connections are dealt out to I/O threads: one R-worker has
    one of them."""
    transport = system.transport
    if not transport.is_bounded:
        return ()
    one_s = system.io_s(lane_batch, 1)
    threads = max(1, whole(one_s * BUSY / pace_s))
    return (
        Constraint(
            "ZeroMQ I/O",
            threads if threads <= transport.num_threads else None,
            f"{seconds_text(one_s)} for one thread of the S-worker to {transport.work} a lane and "
            f"layer at {bytes_text(transport.thread_bytes_per_s)}/s, to be done in "
            f"{seconds_text(pace_s)} by {counted(transport.num_threads, 'thread')} at most",
            "more --io-threads (a quarter of the host's cores), MPI"
            + (", --link-security authenticate" if transport.work == "encrypt" else ""),
        ),
    )


def _messages(
    system: System, lane_batch: int, others: tuple[Constraint, ...], pace_s: float
) -> Constraint:
    """More sockets, more messages: what the other constraints ask for must not
    keep the S-worker's thread too busy."""
    needs = [row.min_sockets for row in others if row.min_sockets is not None]
    sockets = max(1, *needs)
    messages_s = system.messages_s(lane_batch, sockets)
    return Constraint(
        "messages",
        0 if at_most(messages_s, pace_s) else None,
        f"{counted(sockets, 'R-worker')} x "
        f"{seconds_text(system.link.pace * system.link.message_s)} = "
        f"{seconds_text(messages_s)} of {seconds_text(pace_s)} for the S-worker's thread",
        "fewer, faster sockets; a larger batch",
    )


def _round_trips(system: System, lane_batch: int, lanes: int, promises: Promises) -> Constraint:
    """While the other lanes are on the GPU, a lane must get out, through the R-part, and back."""
    if lanes == 1:
        return Constraint(
            "round trips", None, "one lane alone always waits for its R-part", "a second lane"
        )

    def remote_s(sockets: float) -> float:
        lane = system.lane(lane_batch, sockets)
        return lane.remote_s + lane.r_s * promises.headroom

    hidden_s = (lanes - 1) * system.s_s(lane_batch)
    lane = system.lane(lane_batch, 1)
    out, back, trip = (seconds_text(x) for x in (lane.out_s, lane.back_s, lane.round_trip_s))
    return Constraint(
        "round trips",
        _sockets_for(remote_s, hidden_s),
        f"out {out}, back {back}, latency {trip}, messages and the R-part within "
        f"{seconds_text(hidden_s)}, the other lanes' time on the GPU",
        "a lane more, a larger batch",
    )


def _room_and_latency(
    system: System, lane_batch: int, lanes: int, promises: Promises
) -> tuple[Constraint, ...]:
    kv_bytes = r_memory_bytes(system, lane_batch, lanes) * (1 + promises.replicas)
    copies = ", replicas included" if promises.replicas else ""
    s_bytes = s_memory_bytes(system, lane_batch, lanes)
    limit_s = promises.step_limit_s
    cycle_limit_s = limit_s / system.costs.num_layers

    def cycle_s(sockets: float) -> float:
        lane = system.lane(lane_batch, sockets)
        slow_r = lane.r_s * promises.headroom
        return max(lane.cycle_s(lanes), lane.chain_s + slow_r, lanes * (lane.r_s + slow_r))

    if limit_s == float("inf"):
        latency = Constraint("latency", 0, "nothing was asked", "")
    else:
        best = seconds_text(system.costs.num_layers * cycle_s(_fastest(cycle_s)))
        allowed = (
            f"may take {seconds_text(limit_s)}"
            if limit_s > 0
            else "the prompt alone takes too long"
        )
        latency = Constraint(
            "latency",
            _sockets_for(cycle_s, cycle_limit_s),
            f"a step of {lanes} {'lanes' if lanes > 1 else 'lane'} takes {best} at best; {allowed}",
            "a smaller batch, fewer lanes, a faster GPU",
        )
    return (
        Constraint(
            "R DRAM capacity",
            max(whole(kv_bytes / system.r.capacity_bytes), 2 * promises.replicas),
            f"{bytes_text(kv_bytes)} of KV cache{copies}, "
            f"{bytes_text(system.r.capacity_bytes)} usable a socket",
            "more memory, a smaller KV dtype",
        ),
        Constraint(
            "S-worker memory",
            0 if s_worker_fits(system, lane_batch, lanes) else None,
            f"{bytes_text(s_bytes)} of weights and activations, "
            f"{bytes_text(system.s.usable_memory_bytes)} usable",
            "more GPUs, a smaller model"
            + (", 16-bit weights" if system.costs.dtype.size_bytes > 2 else ""),
        ),
        latency,
    )


def _sockets_for(seconds: Callable[[float], float], limit_s: float) -> int | None:
    """The fewest sockets with ``seconds(sockets) <= limit_s``; None if there are none."""
    if limit_s <= 0:
        return None
    low, high = 0, _fastest(seconds)
    if not at_most(seconds(high), limit_s):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at_most(seconds(middle), limit_s) else (middle, high)
    return high


def _fastest(seconds: Callable[[float], float]) -> int:
    """The sockets with the fewest seconds. ``seconds`` falls, then perhaps
    rises (work is shared out, messages add up), and is constant beyond one
    socket a sequence and what the network can use."""
    high = 1
    while seconds(2 * high) < seconds(high):
        high *= 2
    low, high = max(1, high // 2), 2 * high
    while high - low > 2:
        third = (high - low) // 3
        if seconds(low + third) <= seconds(high - third):
            high -= third
        else:
            low += third
    return min(range(low, high + 1), key=seconds)
