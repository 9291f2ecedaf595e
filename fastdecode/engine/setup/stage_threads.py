"""Stages behind the first as threads of this process (``--pp`` without a launcher)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.spares import SpareHub
from fastdecode.engine.setup.devices import choose_device
from fastdecode.engine.setup.reach import (
    openmp_of,
    own_disk,
    reach_own_device,
    reach_stage_addresses,
)
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.engine.setup.stages import StageSetup
from fastdecode.engine.setup.workers import (
    Reached,
    beside_stages,
    reach_inline,
    reach_threads,
    with_spares,
)
from fastdecode.engine.stages.links import StageLinks
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.stages import stage_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageThread:
    """A stage behind the first, as a thread of this process."""

    setup: StageSetup
    workers: Reached
    links: StageLinks
    num_threads: int
    """Of its S-part on a CPU."""

    def __call__(self) -> None:
        if self.setup.resolved.device.type == "cpu":
            torch.set_num_threads(self.num_threads)
        with contextlib.suppress(FastDecodeError):  # the first stage has been told
            self.setup.run(self.workers, self.links)


class ThreadStages:
    """The stages behind the first as threads of this process, the first one's
    hub connected to them. They load their layers at once.

    Args:
        setups: of those stages.
        hub: the first stage's; its R-workers are connected.
        num_threads: CPU threads of each S-part.
        beside: other engines, whose R-workers read from these; None: there are none.
    """

    def __init__(
        self,
        setups: Seq[StageSetup],
        hub: InprocHub[Any, Any],
        num_threads: int,
        beside: Colocation | None = None,
    ) -> None:
        self._timeout_s = setups[0].resolved.config.cluster.worker_timeout_s
        hubs: list[InprocHub[Any, Any]] = [hub, *(InprocHub() for _ in setups)]
        workers = [_reach_own(x, hubs[x.number], num_threads, beside) for x in setups]
        self.addresses = {
            setup.number: each.addresses for setup, each in zip(setups, workers, strict=True)
        }
        """What R-workers of each stage are called; see ``Reached.addresses``."""
        ends: list[dict[int, Any]] = [{} for _ in hubs]
        pairs = [(0, setup.number) for setup in setups]
        pairs += [(setup.before, setup.number) for setup in setups if setup.before]
        for one, other in pairs:
            names = stage_name(one), stage_name(other)
            ends[one][other], ends[other][one] = connect(hubs[one], names[0], hubs[other], names[1])
        self.links = StageLinks(ends[0], is_asked=False)
        """The first stage's."""
        links = [StageLinks(each, is_asked=True) for each in ends]
        self._threads = [
            threading.Thread(
                target=StageThread(
                    setup,
                    connected(reached, hubs[setup.number], links[setup.number]),
                    links[setup.number],
                    num_threads,
                ),
                name=setup.name,
                daemon=True,
            )
            for setup, reached in zip(setups, workers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let them end, and wait for that; it is said of one that doesn't."""
        self.links.shut_down()
        end_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                logger.error("%s has not ended within %g s", thread.name, self._timeout_s)


def connected(workers: Reached, hub: InprocHub[Any, Any], links: StageLinks) -> Reached:
    """The R-workers of a stage that is a thread, and the other stages."""
    own = workers.hub.whole if isinstance(workers.hub, SpareHub) else workers.hub
    if own is hub:
        return replace(workers, stages=links)
    return beside_stages(workers, hub, links, lambda lost, timeout_s: None)


def _reach_own(
    setup: StageSetup,
    hub: InprocHub[Any, Any],
    num_threads: int,
    beside: Colocation | None,
) -> Reached:
    """Reach the R-workers of a stage that is a thread, and whose S-part has ``num_threads``.
    ``beside``: see ``ThreadStages``."""
    resolved = setup.resolved
    if resolved.transport == "local":
        return reach_own_device(resolved, beside, setup.number)
    if resolved.transport == "zmq":
        return reach_stage_addresses(resolved, setup.number)
    if resolved.transport == "inline":
        return reach_inline(
            kv_bytes=resolved.kv_bytes,
            num_threads=resolved.r_threads,
            openmp_library=openmp_of(resolved, num_threads),
            disk=own_disk(resolved.config),
            stage=setup.number,
        )
    num_spares = resolved.config.cluster.spare_r_workers
    num_engines = 1 if beside is None else beside.num_engines
    workers = reach_threads(
        resolved.config.r_part.r_workers + num_spares,
        kv_bytes=resolved.kv_bytes,
        num_threads=resolved.r_threads,
        disk=own_disk(resolved.config, num_engines),
        hub=hub,
        stage=setup.number,
        beside=beside,
    )
    return with_spares(workers, num_spares)


def later_setups(
    checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig
) -> list[StageSetup]:
    """Of the stages behind the first, each on a device of its own where there
    are several in this process."""
    asked = resolved.config.s_part.device
    return [
        StageSetup(checkpoint, spec, replace(resolved, device=choose_device(asked, number)), number)
        for number in range(1, resolved.config.s_part.pp)
    ]
