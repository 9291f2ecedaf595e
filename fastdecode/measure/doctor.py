"""Is this set of hosts fit to run a job? What ``fastdecode doctor`` asks of
every R-worker, and how it judges the answers. Judging is pure: facts in,
findings out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final, Literal

from cost_model.quantities import seconds_text
from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.host.cpus import BINDING_VARIABLES
from fastdecode.core.host.facts import TF32_SWITCH, HostFacts, forces_tf32
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.measure.links.neighbours import NeighbourFacts
from fastdecode.wire.measure import RConnection, bytes_exchanged, measure_link
from fastdecode.wire.messages import PROTOCOL_VERSION, Failed, Inspect, Report
from fastdecode.wire.zmq.io_threads import io_cpu_s, io_threads_for

Level = Literal["PASS", "WARN", "FAIL"]

ANSWER_TIMEOUT_S: Final = 30.0
SLOW_ROUND_TRIP_S: Final = 1e-3
"""A layer's round trip above this leaves a pipeline of two lanes waiting with most models."""
SLOW_BYTES_PER_S: Final = 0.5e9
_BATCHES: Final = (1, 64)
# What is sent to measure: wide queries, one KV head, so that it is large on the
# wire and small in memory.
_PROBE: Final = AttentionSpec(32, 1, 128, scale=1.0)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    check: str
    text: str
    mend: str = ""


@dataclass(frozen=True)
class LinkFacts:
    """The way to an R-worker and back, as decode steps see it."""

    round_trip_s: float
    bytes_per_s: float
    io_bytes_per_s: float | None = None
    """That one of this process's ZeroMQ threads carries in a second of its CPU
    time, both directions together; None: no such threads."""


@dataclass(frozen=True)
class WorkerFacts:
    """An R-worker; and what went wrong, if it didn't answer or couldn't be measured."""

    peer: str
    report: Report | None = None
    link: LinkFacts | None = None
    error: str = ""


def examine_all(
    asked: Sequence[RConnection | WorkerFacts],
    *,
    repeats: int = 10,
    clock: Clock = time.monotonic,
) -> Iterator[WorkerFacts]:
    """Ask R-workers about themselves, all at once, and measure the way to one
    after the other. Each is told as it is known, those with which something is
    wrong first. They serve a job afterwards as if nothing had been.

    Args:
        asked: connections, or what is known of who couldn't be reached.
        repeats: of what is measured.
        clock: seconds.
    """
    connections = []
    for one in asked:
        if isinstance(one, WorkerFacts):
            yield one
        else:
            connections.append((one, _send(one, Inspect())))
    end_s, well = clock() + ANSWER_TIMEOUT_S, []
    for connection, failed in connections:
        report = failed or _report(connection, max(0.0, end_s - clock()))
        if isinstance(report, Report):
            well.append((connection, report))
        else:
            yield WorkerFacts(connection.peer, error=report)
    for connection, report in well:
        yield _with_link(connection, report, repeats)


def _send(connection: RConnection, message: Inspect) -> str:
    """Why it couldn't be asked; empty: it was."""
    try:
        connection.send(message)
    except FastDecodeError as error:
        return error.message
    return ""


def _report(connection: RConnection, timeout_s: float) -> Report | str:
    """What an R-worker says of itself, or why it doesn't."""
    try:
        answer = connection.receive(timeout_s)
    except FastDecodeError as error:
        return error.message
    if isinstance(answer, Report):
        return answer
    return answer.message if isinstance(answer, Failed) else f"it answered {type(answer).__name__}"


def _with_link(connection: RConnection, report: Report, repeats: int) -> WorkerFacts:
    kv = KVSpec(1, _PROBE.num_kv_heads, _PROBE.head_dim, DType.FLOAT16, 16)
    before_s = io_cpu_s()
    try:
        times = measure_link(connection, kv, _PROBE, DType.FLOAT16, _BATCHES, repeats=repeats)
    except FastDecodeError as error:
        return WorkerFacts(connection.peer, report, error=error.message)
    large = times.transfer[-1]
    io_s, num_bytes = io_cpu_s() - before_s, bytes_exchanged(times.transfer, repeats)
    rate = num_bytes / io_s if io_s > 0 else None
    link = LinkFacts(times.round_trip.median_s, large.size / large.timing.median_s, rate)
    return WorkerFacts(connection.peer, report, link)


@dataclass(frozen=True)
class ModelFacts:
    """What is to be known of a model, in its own dtype."""

    hash: str
    """What R-workers that are kept for one model know it by."""
    token_bytes: int
    """K and V of a token."""
    wire_bytes: int
    """That a token sends to R-workers (q, k, v) and gets back (o)."""

    @classmethod
    def read(cls, directory: str) -> ModelFacts:
        """Raises CheckpointError: it is no model's directory."""
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
    """Everything that can be said of an S-worker's host and its R-workers, each
    finding as soon as what it is about is known.

    Args:
        here: the S-worker's.
        workers: taken one after the other.
        model: that is to be run; None: not known.
        lacks_for_triton: what keeps the S-worker's fused kernels from being built.
        neighbours: the ways from each R-worker to the next, taken when all of
            those are known.
        environment: variables of the process that would be the S-worker.
        cpu_quota: CPUs' worth of time that this host's control groups leave it, if limited.
    """
    if forces_tf32(environment):
        yield Finding(
            "WARN",
            "float32",
            f"{TF32_SWITCH}=1 has torch compute float32 products in TF32; the engine undoes it, "
            "other programs here don't",
            "unset it where results are compared with a CPU's",
        )
    binding = [f"{name}={environment[name]}" for name in BINDING_VARIABLES if environment.get(name)]
    if binding:
        text = f"{', '.join(binding)}: torch's threads are bound to single CPUs, R-workers' are not"
        yield Finding("WARN", "binding", text, "unset it, or nothing else may run on these CPUs")
    if lacks_for_triton:
        yield Finding(
            "WARN",
            "kernels",
            f"{lacks_for_triton}: on a GPU the S-part runs without its fused kernels",
            "install gcc and Python's development headers",
        )
    reports, io_rates = [], []
    for worker in workers:
        if worker.report is not None:
            reports.append(worker.report)
        if worker.error:
            check = "reach" if worker.report is None else "serve"
            text = f"{worker.peer}: {worker.error}"
            yield Finding("FAIL", check, text, "start it anew, and see its log")
        elif worker.link is not None:
            yield _link(worker.peer, worker.link)
            io_rates += [worker.link.io_bytes_per_s] * (worker.link.io_bytes_per_s is not None)
    yield from _io_threads(here, io_rates, None if model is None else model.wire_bytes)
    yield from _versions(here, reports)
    yield from _models(reports, None if model is None else model.hash)
    yield from _huge_pages(here, reports)
    if not reports:
        yield from _host(here, cpu_quota)
    yield from _cores(here, reports)
    yield from _memory(reports)
    yield from _neighbours(neighbours, None if model is None else model.token_bytes)


def _versions(here: HostFacts, reports: Sequence[Report]) -> Iterator[Finding]:
    mend = "install the same version of fastdecode everywhere"
    for report in reports:
        ours, theirs = here.version("fastdecode"), report.host.version("fastdecode")
        if report.protocol_version != PROTOCOL_VERSION:
            text = (
                f"{report.worker} speaks protocol version {report.protocol_version}, we speak "
                f"{PROTOCOL_VERSION}"
            )
            yield Finding("FAIL", "versions", text, mend)
        elif ours != theirs:
            yield Finding(
                "WARN", "versions", f"{report.worker} runs fastdecode {theirs}, we run {ours}", mend
            )
        for package in ("numpy", "numba", "mpi4py", "pyzmq"):
            mine, other = here.version(package), report.host.version(package)
            if mine and other and mine != other:
                text = f"{report.worker} has {package} {other}, we have {mine}"
                yield Finding("WARN", "versions", text, f"install the same {package} everywhere")
        if here.mpi != report.host.mpi and here.mpi and report.host.mpi:
            text = f"{report.worker} runs {report.host.mpi}, we run {here.mpi}"
            yield Finding("FAIL", "versions", text, "use one MPI library for the whole job")
    mpi = f", {here.mpi}" if here.mpi else ""
    text = f"fastdecode {here.version('fastdecode')}, python {here.version('python')}{mpi}"
    asked = f"{len(reports)} R-worker(s) answered" if reports else "no R-worker was asked"
    yield Finding("PASS", "versions", f"{text}; {asked}")


def _models(reports: Sequence[Report], model_hash: str | None) -> Iterator[Finding]:
    kept = {report.worker: report.model_hash for report in reports if report.model_hash}
    if model_hash is None and kept:
        yield Finding(
            "WARN",
            "model",
            "R-workers are kept for one model each",
            "say which is to be run: --model DIR",
        )
    elif model_hash is not None:
        wrong = {worker: hash for worker, hash in kept.items() if hash != model_hash}
        for worker, other in wrong.items():
            text = f"{worker} is kept for the model {other}, to run is {model_hash}"
            yield Finding("FAIL", "model", text, "start it with another --model-hash, or without")
        if not wrong:
            yield Finding("PASS", "model", f"hash {model_hash}; every R-worker serves it")


def _huge_pages(here: HostFacts, reports: Sequence[Report]) -> Iterator[Finding]:
    settings = {report.host.host: report.host.huge_pages for report in reports} or {
        here.host: here.huge_pages
    }
    for host, setting in settings.items():
        if setting == "never":
            mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            yield Finding(
                "WARN",
                "huge pages",
                f"{host}: off; the KV cache is read up to a fifth slower",
                mend,
            )
        else:
            yield Finding(
                "PASS",
                "huge pages",
                f"{host}: transparent huge pages are {setting or 'not known here'}",
            )


def _host(here: HostFacts, cpu_quota: float | None) -> Iterator[Finding]:
    """This host's CPUs and memory, where no R-worker reports its own."""
    nodes = sum(bool(listed) for listed in here.numa_cpus)
    num_cpus = len(here.cpus) or here.num_host_cpus
    text = f"{here.host}: {num_cpus} of {here.num_host_cpus} CPU(s) may be used"
    if cpu_quota is not None:
        text += f", for {cpu_quota:.3g} CPU(s) of time (the control group's quota)"
    yield Finding("PASS", "cores", f"{text}; {nodes} NUMA node(s)" if nodes else text)
    yield Finding("PASS", "memory", f"{here.host}: {here.free_bytes / 1e9:.3g} GB free")


def _cores(here: HostFacts, reports: Sequence[Report]) -> Iterator[Finding]:
    by_host: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        by_host[report.host.host].append(report)
    for host, together in by_host.items():
        cpus = {cpu for report in together for cpu in report.host.cpus}
        num_threads = sum(report.num_threads for report in together)
        has_s_worker = host == here.host
        wanted = num_threads + has_s_worker
        beside = " and the S-worker" if has_s_worker else ""
        shown = f"{host}: {num_threads} R-worker thread(s){beside} on {len(cpus)} CPU(s)"
        if cpus and wanted > len(cpus):
            mend = (
                "fewer --threads (--r-threads), fewer R-workers here, or cores of their own for "
                "the S-worker"
            )
            yield Finding("WARN", "cores", f"{shown}: they take turns", mend)
        else:
            yield Finding("PASS", "cores", shown)
        for report in together:
            yield from _binding(report)


def _binding(report: Report) -> Iterator[Finding]:
    host, cpus = report.host, set(report.host.cpus)
    if cpus and report.num_threads > len(cpus):
        text = f"{report.worker} has {report.num_threads} threads, but may use {len(cpus)} CPU(s)"
        yield Finding(
            "WARN",
            "binding",
            text,
            "lower --threads, or have the launcher bind it to more (--bind-to none)",
        )
    nodes = [node for node, listed in enumerate(host.numa_cpus) if cpus & _listed(listed)]
    if len(nodes) > 1:
        text = f"{report.worker} may run on {len(nodes)} NUMA nodes: threads read across sockets"
        yield Finding(
            "WARN",
            "binding",
            text,
            "one R-worker a node: fastdecode r-worker --numa-node auto (or N)",
        )
    elif nodes:
        yield Finding(
            "PASS", "binding", f"{report.worker}: {len(cpus)} CPU(s) of NUMA node {nodes[0]}"
        )


def _memory(reports: Sequence[Report]) -> Iterator[Finding]:
    by_host: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        by_host[report.host.host].append(report)
    for host, together in by_host.items():
        planned = sum(report.kv_bytes for report in together)
        free = min(report.host.free_bytes for report in together)
        shown = f"{host}: {planned / 1e9:.3g} GB for KV caches, {free / 1e9:.3g} GB free"
        if planned > free:
            yield Finding(
                "FAIL",
                "memory",
                shown,
                f"at most {free / len(together) / 1e9:.2g} GB each: --kv-memory-gb",
            )
        elif planned > 0.9 * free:
            yield Finding(
                "WARN",
                "memory",
                f"{shown}: little is left for anything else",
                "a smaller --kv-memory-gb",
            )
        else:
            yield Finding("PASS", "memory", shown)


def _link(peer: str, link: LinkFacts) -> Finding:
    round_trip = seconds_text(link.round_trip_s)
    shown = f"{peer}: round trip {round_trip}, {link.bytes_per_s / 1e9:.2f} GB/s each way"
    if link.round_trip_s > SLOW_ROUND_TRIP_S or link.bytes_per_s < SLOW_BYTES_PER_S:
        mend = (
            "check that the fast network is used (launch --interface NET), and that ranks "
            "don't share CPUs"
        )
        return Finding("WARN", "link", f"{shown}: slow", mend)
    return Finding("PASS", "link", shown)


def _io_threads(
    here: HostFacts, rates: Sequence[float | None], wire_bytes: int | None
) -> Iterator[Finding]:
    """Over ZeroMQ: what this host's I/O threads carry for all R-workers."""
    known = [rate for rate in rates if rate is not None]
    if not known:
        return
    rate, num_threads = median(known), io_threads_for(len(known), len(here.cpus))
    text = f"{rate / 1e9:.2f} GB/s a thread of this host, {num_threads} of them"
    if wire_bytes is not None:
        most = rate * num_threads / wire_bytes
        text += f": at most {most:,.0f} tokens/s of this model, whatever the GPU"
    yield Finding("PASS", "ZeroMQ I/O", text)


def _neighbours(neighbours: Iterable[NeighbourFacts], token_bytes: int | None) -> Iterator[Finding]:
    """Only replicas need these: a way that is missing is a warning."""
    for way in neighbours:
        shown = f"{way.peer} to {way.neighbour}"
        if way.error:
            mend = (
                "R-workers have to reach each other at the addresses that the S-worker is given; "
                "without that --replicas protects nothing here"
            )
            yield Finding("WARN", "neighbours", f"{shown}: {way.error}", mend)
            continue
        text = f"{shown}: {way.bytes_per_s / 1e9:.2f} GB/s{_keeping_up(way, token_bytes)}"
        if way.bytes_per_s < SLOW_BYTES_PER_S:
            mend = "have R-workers named by addresses of the fast network, with CPUs of their own"
            yield Finding("WARN", "neighbours", f"{text}: slow", mend)
        else:
            yield Finding("PASS", "neighbours", text)


def _keeping_up(way: NeighbourFacts, token_bytes: int | None) -> str:
    """What a replica's lag depends on: it grows while more comes than the way carries."""
    if token_bytes is None:
        a_mib_s = (1 << 20) / way.bytes_per_s
        return f"; with --replicas 1 each MiB of K and V is there {seconds_text(a_mib_s)} later"
    return (
        f"; with --replicas 1 a replica keeps up with {way.bytes_per_s / token_bytes:,.0f} tokens "
        "a second of its R-worker, and lags behind beyond"
    )


def _listed(text: str) -> set[int]:
    """``0-3,8`` → the CPUs; nothing for what isn't such a list."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) < 1 << 16:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
