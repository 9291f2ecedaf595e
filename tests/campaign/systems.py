"""Whole systems and servers, disturbed at random moments of conversations.

Each system is one configuration: of an engine in this process, or of a server, which may be an
MPI job or stand before instances at addresses. A blow comes a random while after a
round of turns began. An R-worker or an instance at an address is killed, and another starts at its
address. Or the device that keeps KV fails, a turn is cancelled, a rank is killed, or the server's
HTTP process or engine is killed, which ends the server.

Turns, greedy and sampled, must equal those of an undisturbed float32 engine without caches, stages
or replicas. Of a server that ends, a turn is right or an error.
Counted are turns that **failed** or were **changed**, rounds that **hung**, KV blocks that are
**kept** afterwards though no request wants them, and **orphans**, processes that a server leaves.
"""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jobs import LIMIT_S, R_WORKER, SHAPE, SILENCE_S, Rack
from mpi_launch import FASTDECODE, mpirun
from random_llama import llama_config, write_checkpoint
from server_process import Server, serving
from system_talks import NUM_CONVERSATIONS, LocalTalks, ServedTalks, Talks, Turns

from fastdecode import LLM
from fastdecode.schedule.hybrid.forecast import Costs, Course, Known, Layout
from fastdecode.schedule.times import MeasuredTimes
from sworker.paged import PagedKV

BLOWS_AN_ENGINE = 4  # R-workers that are lost again and again are asked back ever less often
COMMON: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_num_sequences": 8, "device": "cpu",
}  # fmt: skip
BAD = ("hung", "failed", "changed", "kept", "orphans", "other exit code")
DEADLY = {"HTTP process": 5, "engine": -signal.SIGKILL}
"""Blows that end a server, and its exit code."""


@dataclass(frozen=True)
class System:
    """One configuration, and what befalls it."""

    options: dict[str, Any]
    blow: str = "R-worker"  # what is struck: see ``Disturbed.strike``
    num_r_workers: int = 3  # at addresses; 0: the device keeps KV
    is_on_disk: bool = False  # R-workers keep blocks on disk, and have memory for few
    blows_an_engine: int = BLOWS_AN_ENGINE
    num_ranks: int = 0  # of the MPI job that serves; 0: no such job
    is_served: bool = False  # behind a server, of one process or an MPI job
    instances: tuple[str, ...] = ()  # roles of instances at addresses, in place of R-workers


_ON_DEVICE: dict[str, Any] = {
    "kv_placement": "gpu", "kv_memory_gb": 0.006, "prefix_cache": "on", "cache_memory_gb": 0.05,
}  # fmt: skip
SYSTEMS: dict[str, System] = {
    "DejaVu": System(
        {"pp": 2, "prompt_pp": 1, "replicas": 1, "kv_memory_gb": 0.02, "r_threads": 1},
        "rank", num_r_workers=0, blows_an_engine=1, num_ranks=9, is_served=True,
    ),
    "DejaVu on devices": System(
        {"pp": 3, "kv_placement": "swap", "replicas": 1, "kv_memory_gb": 0.006},
        "device", num_r_workers=0, blows_an_engine=1,
    ),
    "Pensieve + DejaVu": System({"prefix_cache": "on", "replicas": 1}, is_on_disk=True),
    "Pensieve + DejaVu on two devices": System(
        {**_ON_DEVICE, "pp": 2, "replicas": 1}, "device", num_r_workers=0, blows_an_engine=1
    ),
    "Pensieve on two devices": System(
        {**_ON_DEVICE, "pp": 2}, "turn", num_r_workers=0, blows_an_engine=20
    ),
    "Pensieve with tensor parallelism": System(
        {**_ON_DEVICE, "tp": 2}, "turn", num_r_workers=0, blows_an_engine=20,
        num_ranks=2, is_served=True,
    ),
    "DistServe": System(
        {"instances": "prefill:1:tp=2,decode:1:tp=2", "kv_memory_gb": 0.02, "r_threads": 1},
        "rank", num_r_workers=0, blows_an_engine=1, num_ranks=7, is_served=True,
    ),
    "server, hybrid, cache, replicas": System(
        {"kv_placement": "hybrid", "device_kv_gb": 0.001,
         "prefix_cache": "on", "replicas": 1},
        is_served=True,
    ),
    "hybrid, cache, replicas": System(
        {"kv_placement": "hybrid", "device_kv_gb": 0.001, "prefix_cache": "on", "replicas": 1}
    ),
    "FastDecode's schedule on prompt stages": System(
        {"prompt_pp": 1, "schedule": "stabilized", "kv_memory_gb": 0.02, "r_threads": 1},
        "rank", num_r_workers=0, blows_an_engine=1, num_ranks=6, is_served=True,
    ),
    "server, R-workers": System({}, is_served=True),
    "server, engine killed": System({}, "engine", blows_an_engine=1, is_served=True),
    "server, HTTP process killed": System({}, "HTTP process", blows_an_engine=1, is_served=True),
    "server, instances": System(
        {}, "instance", is_served=True, instances=("prefill", "prefill", "decode", "decode")
    ),
    "server, instances, engine killed": System(
        {}, "engine", blows_an_engine=1, is_served=True, instances=("prefill", "decode")
    ),
}  # fmt: skip


class Device:
    """The devices that keep KV in this process, of which the next to attend may fail."""

    def __init__(self) -> None:
        self.fails = False
        attend = PagedKV.attend

        def fail_or_attend(cache: PagedKV, *args: Any) -> torch.Tensor:
            if self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("the device is full")
            return attend(cache, *args)

        PagedKV.attend = fail_or_attend  # type: ignore[method-assign]


@dataclass
class Disturbed:
    """A system that runs."""

    talks: Talks
    rack: Rack
    device: Device
    chance: random.Random
    server: Server | None = None
    num_ranks: int = 0

    def strike(self, blow: str) -> int | None:
        """Strike what ``blow`` names.

        Returns:
            The conversation whose turns count no more. None if none may be disturbed.
        """
        match blow:
            case "R-worker" | "instance":
                self.rack.kill(self.chance.randrange(len(self.rack.workers)))
            case "device":
                self.device.fails = True
            case "turn":
                whose = self.chance.randrange(NUM_CONVERSATIONS)
                self.talks.cancel(whose)
                return whose
            case "rank":  # any but the first, which is the controller
                assert self.server is not None
                self.server.job.rank(self.chance.randrange(1, self.num_ranks)).kill()
            case _:
                assert self.server is not None
                self.server.process(blow.removesuffix(" process").lower()).kill()
        return None


class Systems:
    """Runs them.

    Args:
        directory: for the model, and what R-workers keep on disk.
        chance: the moments' seed.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory = directory
        self._chance = chance
        self._device = Device()
        self._model = directory / "model"
        self._model.mkdir()
        write_checkpoint(self._model, llama_config(**SHAPE, max_position_embeddings=2048), "random")
        with LLM(str(self._model), **COMMON, kv_memory_gb=0.02) as plain:
            self._undisturbed = LocalTalks(plain).talk("plain")

    def run(self, system: System, number: int) -> Counter[str]:
        """Of one system so many blows, with an engine for a few of them each."""
        counts: Counter[str] = Counter()
        while counts["blows"] < number and not counts["hung"]:
            self._run_engine(system, min(system.blows_an_engine, number - counts["blows"]), counts)
        return counts

    def _run_engine(self, system: System, number: int, counts: Counter[str]) -> None:
        with self._rack(system) as rack, self._disturbed(system, rack) as disturbed:
            talks = disturbed.talks
            began_s = time.monotonic()
            self._count(system, talks.talk("quiet"), counts)
            length_s = time.monotonic() - began_s
            for blow in range(number):
                self._strike(system, disturbed, f"b{blow}", length_s, counts)
            if system.blow in DEADLY:
                assert disturbed.server is not None
                outcome = disturbed.server.job.wait(LIMIT_S)
                counts["orphans"] += len(outcome.orphans)
                counts["other exit code"] += outcome.exit_code != DEADLY[system.blow]
                return
            self._count(system, talks.talk("after"), counts)
            counts += talks.counts()
            counts["kept"] += talks.num_kept()

    def _strike(
        self, system: System, disturbed: Disturbed, name: str, length_s: float, counts: Counter[str]
    ) -> None:
        """A round of turns, in the middle of which the blow comes."""
        said: list[Turns] = []
        talk = disturbed.talks.talk
        thread = threading.Thread(target=lambda: said.append(talk(name)), daemon=True)
        thread.start()
        thread.join(self._chance.uniform(0, length_s))
        is_late = not thread.is_alive()
        whose = disturbed.strike(system.blow)
        thread.join(LIMIT_S)
        if not said:
            counts["hung"] += 1
            return
        is_late, self._device.fails = is_late or self._device.fails, False
        is_cut = self._count(system, said[0], counts, whose)
        is_late = is_late or (whose is not None and not is_cut)
        counts["late" if is_late else "blows"] += 1

    @contextlib.contextmanager
    def _disturbed(self, system: System, rack: Rack) -> Iterator[Disturbed]:
        if not system.is_served:
            with self._engine(system, rack) as llm:
                yield Disturbed(LocalTalks(llm), rack, self._device, self._chance)
            return
        ranks = mpirun(system.num_ranks)
        words = [*FASTDECODE, "serve", str(self._model), "--port", "0"]
        given = {**COMMON, **system.options, "worker_silence_s": SILENCE_S}
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        if system.instances:
            words = [*FASTDECODE, "serve", str(self._model), "--port", "0"]
            words += ["--instances", ",".join(rack.addresses), "--worker-silence-s", str(SILENCE_S)]
        else:
            words += rack.options
        with serving([*(ranks if system.num_ranks else []), *words]) as server:
            talks = ServedTalks(server)
            yield Disturbed(talks, rack, self._device, self._chance, server, system.num_ranks)

    @contextlib.contextmanager
    def _rack(self, system: System) -> Iterator[Rack]:
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            command = [*R_WORKER, "--kv-memory-gb"]
            if system.is_on_disk:
                command += ["0.006", "--cache-disk", f"{directory}/kept", "--cache-disk-gb", "0.05"]
            else:
                command += ["0.02"]
            engine = [*FASTDECODE, "instance", str(self._model), "--dtype", "float32"]
            engine += ["--r-threads", "1", "--kv-memory-gb", "0.02", "--block-size", "16"]
            engine += ["--worker-silence-s", str(SILENCE_S), "--role"]
            instances = [[*engine, role] for role in system.instances]
            rack = Rack(instances or [command] * system.num_r_workers)
            try:
                yield rack
            finally:
                rack.close()

    def _engine(self, system: System, rack: Rack) -> LLM:
        options = {**COMMON, **system.options, "worker_silence_s": SILENCE_S}
        if rack.addresses:
            options |= {"r_worker_addresses": tuple(rack.addresses)}
        if options.get("kv_placement") != "hybrid":
            return LLM(str(self._model), **options)
        llm = LLM(str(self._model), times=MeasuredTimes(min_observed=1), **options)
        _keep_away(llm)
        return llm

    def _count(
        self, system: System, said: Turns, counts: Counter[str], whose: int | None = None
    ) -> bool:
        """``whose``: a conversation whose turns need not be right. Whether one is not."""
        verdicts = [
            "failed" if one is None else "right" if one == other else "changed"
            for one, other in zip(said, self._undisturbed, strict=True)
        ]
        if system.blow in DEADLY:
            verdicts = ["an error" if each == "failed" else each for each in verdicts]
        for place in range(whose if whose is not None else len(said), len(said), NUM_CONVERSATIONS):
            if verdicts[place] != "right":
                verdicts[place] = "cut short"
        counts.update(verdicts)
        return "cut short" in verdicts


def _keep_away(llm: LLM) -> None:
    """Have what waits go to R-workers, as with many sequences and a real device."""

    def rule(known: Known, now: Course, costs: Costs, error: float) -> Course:
        return Course(Layout.SPLIT, len(known.waiting))

    control = llm._running.engine._lifecycle.scheduler.hybrid
    control._options = replace(control._options, rule=rule)
