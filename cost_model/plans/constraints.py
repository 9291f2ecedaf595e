"""Constraints of a plan, each with the fewest sockets that satisfy it alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.numbers import at_most, smallest, whole
from cost_model.plans.question import MAX_SOCKETS, Goal
from cost_model.predict import System
from cost_model.printing import bytes_text, counted, seconds_text

_FLAT = 4
"""Most sockets that share a host, and so its port."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Constraint:
    name: str
    min_sockets: int | None
    """0 if satisfied without any. None if no number of sockets satisfies it."""
    detail: str
    mend: str


def s_memory_bytes(system: System, lane_batch: int, lanes: int) -> float:
    """Return memory of all GPUs: weights, one lane's activations, every lane's staging of q, k, v,
    o."""
    costs = system.costs
    staging = lanes * lane_batch * (costs.out_bytes + costs.back_bytes)
    return costs.weight_bytes + lane_batch * costs.peak_activation_bytes + staging


def r_memory_bytes(system: System, lane_batch: int, lanes: int) -> float:
    """Return the KV cache of all R-workers, with room for each sequence's end."""
    return lane_batch * lanes * system.workload.peak_context_tokens * system.costs.kv_bytes


def sockets_with_room(system: System, lane_batch: int, lanes: int, replicas: int) -> int:
    """Return the fewest sockets that hold the KV cache and its replicas, which are on others."""
    kv_bytes = r_memory_bytes(system, lane_batch, lanes) * (1 + replicas)
    return max(whole(kv_bytes / system.r.capacity_bytes), 2 * replicas)


def s_worker_fits(system: System, lane_batch: int, lanes: int) -> bool:
    return at_most(s_memory_bytes(system, lane_batch, lanes), system.s.usable_memory_bytes)


def constraints(
    system: System, lane_batch: int, lanes: int, goal: Goal, cycle_s: float
) -> tuple[Constraint, ...]:
    """Return what it takes that ``lanes`` lanes pass a layer every ``cycle_s``, that every promise
    is kept and that everything fits. Each resource serves the lanes in turn."""
    share_s = cycle_s / lanes
    rows = (
        *_stages(system, lane_batch, goal, share_s),
        _round_trips(system, lane_batch, goal, cycle_s),
        *_room_and_latency(system, lane_batch, lanes, goal),
    )
    return (*rows[:-3], _messages(system, lane_batch, rows, share_s), *rows[-3:])


def _stages(system: System, lane_batch: int, goal: Goal, share_s: float) -> tuple[Constraint, ...]:
    """Return stages whose time depends on the number of sockets, each within ``share_s``."""
    load = lane_batch * system.attended_tokens
    token_s, share = system.r.pace * system.r.token_s, seconds_text(share_s)
    slow = 1.0 + goal.headroom
    balance = sockets_for(lambda p: system.r_s(lane_batch, p) * slow, share_s)
    read_s = load * system.r.read_token_s
    out, back = system.way_bytes(lane_batch)
    s_side_s = system.s_link_s(max(out, back))
    network = None
    if at_most(s_side_s, share_s):
        hosts = system.link.transfer_s(max(out, back)) / share_s
        network = whole(hosts * system.r.sockets_per_host) if hosts > 1 else 1
    return (
        *_io_threads(system, lane_batch, share_s),
        Constraint(
            "R-part",
            balance,
            f"{load:,.0f} cached tokens a lane x {seconds_text(token_s)} = "
            f"{seconds_text(load * token_s)} on one socket, to be done in {share}",
            "a larger batch, fewer tokens a sequence, a smaller KV dtype",
        ),
        Constraint(
            "R bandwidth",
            whole(read_s / share_s),
            f"the same tokens at the read ceiling: {seconds_text(read_s)} on one socket",
            "faster memory, a smaller KV dtype",
        ),
        Constraint(
            "network bytes",
            network,
            f"{bytes_text(out)} out and {bytes_text(back)} back a lane and layer: "
            f"{seconds_text(s_side_s)} of {share} on the S-worker's ports",
            "a faster port, more ports",
        ),
    )


def _io_threads(system: System, lane_batch: int, share_s: float) -> tuple[Constraint, ...]:
    """Return the constraint of ZeroMQ's I/O threads, of which each R-worker's connection has
    one."""
    transport = system.transport
    if not transport.is_bounded:
        return ()
    one_s = system.lane(lane_batch, 1).io_s
    threads = whole(one_s / share_s)
    return (
        Constraint(
            "ZeroMQ I/O",
            threads if threads <= transport.num_threads else None,
            f"{seconds_text(one_s)} for one thread of the S-worker to {transport.work} a lane and "
            f"layer at {bytes_text(transport.thread_bytes_per_s)}/s, to be done in "
            f"{seconds_text(share_s)} by {counted(transport.num_threads, 'thread')} at most",
            "more --io-threads (a quarter of the host's cores), MPI"
            + (", --key none on a trusted network" if transport.work == "encrypt" else ""),
        ),
    )


def _messages(
    system: System, lane_batch: int, others: tuple[Constraint, ...], share_s: float
) -> Constraint:
    """Check that messages to the sockets that others ask for leave the S-worker's thread time."""
    sockets = max(1, *(row.min_sockets or 0 for row in others))
    messages_s = system.messages_s(lane_batch, sockets)
    return Constraint(
        "messages",
        0 if at_most(messages_s, share_s) else None,
        f"{counted(sockets, 'R-worker')} x "
        f"{seconds_text(system.link.pace * system.link.message_s)} = "
        f"{seconds_text(messages_s)} of {seconds_text(share_s)} for the S-worker's thread",
        "fewer, faster sockets; a larger batch",
    )


def _round_trips(system: System, lane_batch: int, goal: Goal, cycle_s: float) -> Constraint:
    """Check that a lane gets through S-part, network and R-part within a cycle."""
    lane_over = system.lane_over(lane_batch)

    def chain_s(sockets: float) -> float:
        lane = lane_over(sockets)
        return lane.chain_s + lane.r_s * goal.headroom

    lane = lane_over(1)
    s, out, back = (seconds_text(x) for x in (lane.s_s, lane.out_s, lane.back_s))
    return Constraint(
        "round trips",
        sockets_for(chain_s, cycle_s),
        f"S-part {s}, out {out}, back {back}, latency {seconds_text(lane.round_trip_s)}, messages "
        f"and the R-part within {seconds_text(cycle_s)}, in which all lanes pass a layer",
        "a lane more, a larger batch",
    )


def _room_and_latency(
    system: System, lane_batch: int, lanes: int, goal: Goal
) -> tuple[Constraint, ...]:
    kv_bytes = r_memory_bytes(system, lane_batch, lanes) * (1 + goal.replicas)
    copies = ", replicas included" if goal.replicas else ""
    s_bytes = s_memory_bytes(system, lane_batch, lanes)
    limit_s = system.step_limit_s(goal.latency_s, goal.tpot_s)
    cycle_s = system.cycle_over(lane_batch, lanes, goal.headroom)
    if limit_s == math.inf:
        latency = Constraint("latency", 0, "nothing was asked", "")
    else:
        best = seconds_text(system.costs.num_layers * cycle_s(fastest(cycle_s, MAX_SOCKETS)))
        late = "the prompt alone takes too long"
        allowed = f"may take {seconds_text(limit_s)}" if limit_s > 0 else late
        latency = Constraint(
            "latency",
            sockets_for(cycle_s, limit_s / system.costs.num_layers),
            f"a step of {lanes} {'lanes' if lanes > 1 else 'lane'} takes {best} at best; {allowed}",
            "a smaller batch, fewer lanes, a faster GPU"
            if lanes * lane_batch > 1
            else "a faster GPU, or more of them",
        )
    return (
        Constraint(
            "R DRAM capacity",
            sockets_with_room(system, lane_batch, lanes, goal.replicas),
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


def sockets_for(seconds: Callable[[float], float], limit_s: float) -> int | None:
    """Return the fewest sockets with ``seconds(sockets) <= limit_s``. None if there are none."""
    if limit_s <= 0:
        return None
    most = fastest(seconds, MAX_SOCKETS)
    if not at_most(seconds(most), limit_s):
        return None
    return smallest(lambda sockets: at_most(seconds(sockets), limit_s), most)


def fastest(seconds: Callable[[float], float], most: int) -> int:
    """Return the fewest of up to ``most`` sockets with the fewest seconds. ``seconds`` may be flat
    (one host's port), then fall (shared work), then rise (messages)."""
    first = min(most, _FLAT)

    def rises(sockets: int) -> bool:
        return seconds(sockets + 1) >= seconds(sockets) * (1.0 - _ROUNDING)

    lowest = smallest(rises, most, above=first - 1)
    best_s = min(seconds(lowest), *(seconds(few) for few in range(1, first + 1)))
    few = next((n for n in range(1, first + 1) if at_most(seconds(n), best_s)), lowest)
    return min(few, lowest)
