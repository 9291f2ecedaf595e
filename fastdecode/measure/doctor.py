"""Checks of a set of hosts, for ``fastdecode doctor``: what it asks of R-workers, and how it
judges the answers. Judging is pure."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final, Literal

from cost_model.printing import seconds_text
from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.host.cpus import BINDING_VARIABLES
from fastdecode.core.host.facts import TF32_SWITCH, HostFacts, forces_tf32
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.measure.link import (
    NeighbourFacts,
    RConnection,
    bytes_exchanged,
    expect,
    measure_link,
)
from fastdecode.wire.messages import REFUSALS, Inspect, Report
from fastdecode.wire.transport import CLOSED
from fastdecode.wire.zmq.hub import io_threads_for
from rworker.binding import parse_cpu_list

ANSWER_TIMEOUT_S: Final = 30.0
SLOW_ROUND_TRIP_S: Final = 1e-3  # of a layer; above it, two lanes wait with most models
SLOW_BYTES_PER_S: Final = 0.5e9
_FASTER: Final = (
    "give R-workers CPUs of their own, and have hosts use the fast network (launch --interface "
    "NET; with --r-worker, its addresses)"
)
_WITH_REMEDY: Final = REFUSALS | {CLOSED, "worker_unreachable"}  # errors that say what to do
_BATCHES: Final = (1, 64)
# A probe with wide queries and one KV head is large on the wire and small in memory.
_PROBE: Final = AttentionSpec(32, 1, 128, scale=1.0)


@dataclass(frozen=True)
class Finding:
    level: Literal["PASS", "WARN", "FAIL"]
    check: str
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding("PASS", check, text)


def warn(check: str, text: str, mend: str) -> Finding:
    return Finding("WARN", check, text, mend)


def fail(check: str, text: str, mend: str = "") -> Finding:
    return Finding("FAIL", check, text, mend)


@dataclass(frozen=True)
class LinkFacts:
    round_trip_s: float
    bytes_per_s: float
    io_bytes_per_s: float | None = None
    """Bytes that a ZeroMQ thread of this process carries per second of its CPU time, both
    directions together. None without such threads."""


@dataclass(frozen=True)
class WorkerFacts:
    """An R-worker, and the error and its code if it did not answer or could not be measured."""

    peer: str
    report: Report | None = None
    link: LinkFacts | None = None
    error: str = ""
    code: str = ""


def examine_all(
    asked: Sequence[RConnection | WorkerFacts], *, repeats: int = 10, clock: Clock = time.monotonic
) -> Iterator[WorkerFacts]:
    """Ask all R-workers at once, then measure one link after the other.

    Each result is yielded as soon as it is known, failures first. R-workers can serve afterwards.
    ``asked`` may hold the facts of R-workers that could not be reached."""
    sent, well = [], []
    for one in asked:
        if isinstance(one, WorkerFacts):
            yield one
            continue
        try:
            one.send(Inspect())
            sent.append(one)
        except FastDecodeError as error:
            yield WorkerFacts(one.peer, error=error.message, code=error.code)
    end_s = clock() + ANSWER_TIMEOUT_S
    for one in sent:
        try:
            well.append((one, expect(one.receive(max(0.0, end_s - clock())), Report)))
        except FastDecodeError as error:
            yield WorkerFacts(one.peer, error=error.message, code=error.code)
    for connection, report in well:
        yield _with_link(connection, report, repeats)


def _with_link(connection: RConnection, report: Report, repeats: int) -> WorkerFacts:
    kv = KVSpec(1, _PROBE.num_kv_heads, _PROBE.head_dim, DType.FLOAT16, 16)
    before_s = _io_cpu_s()
    try:
        times = measure_link(connection, kv, _PROBE, DType.FLOAT16, _BATCHES, repeats=repeats)
    except FastDecodeError as error:
        return WorkerFacts(connection.peer, report, error=error.message, code=error.code)
    large = times.transfer[-1]
    io_s, num_bytes = _io_cpu_s() - before_s, bytes_exchanged(times.transfer, repeats)
    rate = num_bytes / io_s if io_s > 0 else None
    link = LinkFacts(times.round_trip.median_s, large.size / large.timing.median_s, rate)
    return WorkerFacts(connection.peer, report, link)


def _io_cpu_s() -> float:
    """Return the CPU seconds of ZeroMQ's I/O threads so far; 0 where the system has no figure."""
    total_ns = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


@dataclass(frozen=True)
class ModelFacts:
    """Figures of a model in its own dtype."""

    hash: str
    """Name of the model for R-workers that serve one model only."""
    token_bytes: int
    wire_bytes: int
    """Bytes that a token sends to R-workers (q, k, v) and receives (o)."""

    @classmethod
    def read(cls, directory: str) -> ModelFacts:
        """Raises CheckpointError: If the directory has no model."""
        checkpoint = open_checkpoint(directory)
        spec = checkpoint.spec()
        dtype = spec.choose_dtype("auto")
        heads = 2 * spec.num_q_heads + 2 * spec.num_kv_heads
        wire_bytes = spec.num_layers * heads * spec.head_dim * dtype.size_bytes
        return cls(checkpoint.model_hash, spec.kv_spec(dtype).token_bytes, wire_bytes)


def judge(
    here: HostFacts,
    workers: Iterable[WorkerFacts],
    model: ModelFacts | None = None,
    lacks_for_triton: str = "",
    neighbours: Iterable[NeighbourFacts] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    cpu_quota: float | None = None,
) -> Iterator[Finding]:
    """Yield the findings about an S-worker's host and its R-workers, each as soon as possible.

    ``neighbours`` are links from each R-worker to the next, taken after ``workers``. ``cpu_quota``
    is the CPU time per second that this host's control groups allow, if limited.
    """
    if forces_tf32(environment):
        text = (
            f"{TF32_SWITCH}=1 has torch compute float32 products in TF32; the engine undoes it, "
            "other programs here don't"
        )
        yield warn("float32", text, "unset it where results are compared with a CPU's")
    binding = [f"{name}={environment[name]}" for name in BINDING_VARIABLES if environment.get(name)]
    if binding:
        text = f"{', '.join(binding)}: torch's threads are bound to single CPUs, R-workers' are not"
        yield warn("binding", text, "unset it, or nothing else may run on these CPUs")
    if lacks_for_triton:
        text = f"{lacks_for_triton}: on a GPU the S-part runs without its fused kernels"
        yield warn("kernels", text, "install gcc and Python's development headers")
    reports, io_rates = [], []
    for worker in workers:
        if worker.report is not None:
            reports.append(worker.report)
        if worker.error:
            check = "reach" if worker.report is None else "serve"
            text = worker.error if worker.peer in worker.error else f"{worker.peer}: {worker.error}"
            remedy = "" if worker.code in _WITH_REMEDY else "restart it, and see its log"
            yield fail(check, text, remedy)
        elif worker.link is not None:
            yield _link(worker.peer, worker.link)
            if worker.link.io_bytes_per_s is not None:
                io_rates.append(worker.link.io_bytes_per_s)
    if io_rates:
        rate, num_threads = median(io_rates), io_threads_for(len(io_rates), len(here.cpus))
        text = f"{rate / 1e9:.2f} GB/s a thread of this host, {num_threads} of them"
        if model is not None:
            most = rate * num_threads / model.wire_bytes
            text += f": at most {most:,.0f} tokens/s of this model, whatever the GPU"
        yield ok("ZeroMQ I/O", text)
    yield from _versions(here, reports)
    yield from _models(reports, None if model is None else model.hash)
    settings = {report.host.host: report.host.huge_pages for report in reports}
    for host, setting in (settings or {here.host: here.huge_pages}).items():
        if setting == "never":
            text = f"{host}: off; the KV cache is read up to a fifth slower"
            mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            yield warn("huge pages", text, mend)
        else:
            state = setting or "not known here"
            yield ok("huge pages", f"{host}: transparent huge pages are {state}")
    if not reports:
        yield from _host(here, cpu_quota)
    by_host = sorted(reports, key=lambda report: report.host.host)
    hosts = [list(each) for _, each in itertools.groupby(by_host, lambda each: each.host.host)]
    for together in hosts:
        yield from _cores(here, together)
    for together in hosts:
        yield _memory(together)
    for way in neighbours:
        yield _neighbour(way, None if model is None else model.token_bytes)


def _versions(here: HostFacts, reports: Sequence[Report]) -> Iterator[Finding]:
    mend = "install the same version of fastdecode everywhere"
    for report in reports:
        ours, theirs = here.version("fastdecode"), report.host.version("fastdecode")
        if ours != theirs:
            text = f"{report.worker} runs fastdecode {theirs}, we run {ours}"
            yield warn("versions", text, mend)
        for package in ("numpy", "numba", "mpi4py", "pyzmq"):
            mine, other = here.version(package), report.host.version(package)
            if mine and other and mine != other:
                text = f"{report.worker} has {package} {other}, we have {mine}"
                yield warn("versions", text, f"install the same {package} everywhere")
        if here.mpi != report.host.mpi and here.mpi and report.host.mpi:
            text = f"{report.worker} runs {report.host.mpi}, we run {here.mpi}"
            yield fail("versions", text, "use one MPI library for the whole job")
    mpi = f", {here.mpi}" if here.mpi else ""
    text = f"fastdecode {here.version('fastdecode')}, python {here.version('python')}{mpi}"
    asked = f"{len(reports)} R-worker(s) answered" if reports else "no R-worker was asked"
    yield ok("versions", f"{text}; {asked}")


def _models(reports: Sequence[Report], model_hash: str | None) -> Iterator[Finding]:
    kept = {report.worker: report.model_hash for report in reports if report.model_hash}
    if model_hash is None:
        if kept:
            mend = "name the model of the job: --model DIR"
            yield warn("model", "R-workers serve one model each", mend)
        return
    wrong = {worker: hash for worker, hash in kept.items() if hash != model_hash}
    for worker, other in wrong.items():
        text = f"{worker} serves the model {other}, the job's is {model_hash}"
        yield fail("model", text, "start it with another --model-hash, or without")
    if not wrong:
        yield ok("model", f"hash {model_hash}; every R-worker serves it")


def _host(here: HostFacts, cpu_quota: float | None) -> Iterator[Finding]:
    """Yield this host's CPUs and memory, if no R-worker reports its own."""
    nodes = sum(bool(listed) for listed in here.numa_cpus)
    num_cpus = len(here.cpus) or here.num_host_cpus
    text = f"{here.host}: {num_cpus} of {here.num_host_cpus} CPU(s) may be used"
    if cpu_quota is not None:
        text += f", for {cpu_quota:.3g} CPU(s) of time (the control group's quota)"
    yield ok("cores", f"{text}; {nodes} NUMA node(s)" if nodes else text)
    yield ok("memory", f"{here.host}: {here.free_bytes / 1e9:.3g} GB free")


def _cores(here: HostFacts, together: Sequence[Report]) -> Iterator[Finding]:
    """Yield what R-workers of one host do to each other, and how they are bound."""
    host = together[0].host.host
    cpus = {cpu for report in together for cpu in report.host.cpus}
    num_threads = sum(report.num_threads for report in together)
    beside = " and the S-worker" if host == here.host else ""
    shown = f"{host}: {num_threads} R-worker thread(s){beside} on {len(cpus)} CPU(s)"
    if cpus and num_threads + bool(beside) > len(cpus):
        mend = (
            "fewer --threads (--r-threads), fewer R-workers here, or cores of their own for "
            "the S-worker"
        )
        yield warn("cores", f"{shown}: they take turns", mend)
    else:
        yield ok("cores", shown)
    for report in together:
        own, worker = set(report.host.cpus), report.worker
        if own and report.num_threads > len(own):
            text = f"{worker} has {report.num_threads} threads, but may use {len(own)} CPU(s)"
            mend = "lower --threads, or have the launcher bind it to more (--bind-to none)"
            yield warn("binding", text, mend)
        nodes = [i for i, listed in enumerate(report.host.numa_cpus) if own & _listed(listed)]
        if len(nodes) > 1:
            text = f"{worker} may run on {len(nodes)} NUMA nodes: threads read across sockets"
            mend = "one R-worker a node: fastdecode r-worker --numa-node auto (or N)"
            yield warn("binding", text, mend)
        elif nodes:
            yield ok("binding", f"{worker}: {len(own)} CPU(s) of NUMA node {nodes[0]}")


def _memory(together: Sequence[Report]) -> Finding:
    """Return whether the KV caches of one host fit."""
    planned = sum(report.kv_bytes for report in together)
    free = min(report.host.free_bytes for report in together)
    host = together[0].host.host
    text = f"{host}: {planned / 1e9:.3g} GB for KV caches, {free / 1e9:.3g} GB free"
    if planned > free:
        mend = f"at most {free / len(together) / 1e9:.2g} GB each: --kv-memory-gb"
        return fail("memory", text, mend)
    if planned > 0.9 * free:
        return warn("memory", f"{text}: little is left for others", "a smaller --kv-memory-gb")
    return ok("memory", text)


def _link(peer: str, link: LinkFacts) -> Finding:
    round_trip = seconds_text(link.round_trip_s)
    shown = f"{peer}: round trip {round_trip}, {link.bytes_per_s / 1e9:.2f} GB/s each way"
    if link.round_trip_s > SLOW_ROUND_TRIP_S or link.bytes_per_s < SLOW_BYTES_PER_S:
        return warn("link", f"{shown}: slow", _FASTER)
    return ok("link", shown)


def _neighbour(way: NeighbourFacts, token_bytes: int | None) -> Finding:
    """Return the finding about a link that only replicas need: never a failure."""
    shown = f"{way.peer} to {way.neighbour}"
    if way.error:
        mend = (
            "R-workers have to reach each other at the addresses that the S-worker is given; "
            "without that --replicas protects nothing here"
        )
        return warn("neighbours", f"{shown}: {way.error}", mend)
    if token_bytes is None:
        mib_s = seconds_text((1 << 20) / way.bytes_per_s)
        keeps_up = f"with --replicas 1 each MiB of K and V is there {mib_s} later"
    else:
        rate = f"{way.bytes_per_s / token_bytes:,.0f} tokens a second of its R-worker"
        keeps_up = f"with --replicas 1 a replica keeps up with {rate}, and lags behind beyond"
    text = f"{shown}: {way.bytes_per_s / 1e9:.2f} GB/s; {keeps_up}"
    if way.bytes_per_s < SLOW_BYTES_PER_S:
        return warn("neighbours", f"{text}: slow", _FASTER)
    return ok("neighbours", text)


def _listed(text: str) -> frozenset[int]:
    try:
        return parse_cpu_list(text)
    except ConfigError:
        return frozenset()
