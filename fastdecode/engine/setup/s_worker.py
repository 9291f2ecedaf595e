"""The S-worker as it was configured: kernels put on the model, CUDA graphs, and
its part of several."""

from __future__ import annotations

import contextlib
import gc
import logging
import os

import torch

from fastdecode.core.host.cpus import available_cores
from fastdecode.core.host.openmp import is_spinning_chosen, spins_long, spins_on
from fastdecode.core.host.waits import shorten_sleeps, switch_threads_sooner
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.engine.setup.scheduling import lane_graphs
from fastdecode.engine.setup.transport import shares_thread
from sworker.device import feed_gpu
from sworker.dtypes import torch_dtype
from sworker.graphs import StepGraphs
from sworker.kernels.fused import call_layers, fuse
from sworker.kernels.packing import pack, widen
from sworker.kernels.threads import IdleThreads, openmp_library, watch_idle_threads
from sworker.load.weights import load_model
from sworker.model.skeleton import Model
from sworker.ranks.group import Ranks
from sworker.ranks.parallel import ParallelSWorker
from sworker.ranks.sharding import parallelize
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


def load_stage(
    checkpoint: Checkpoint, resolved: ResolvedConfig, stage: int, ranks: Ranks | None
) -> tuple[ModelSpec, Model]:
    """Load a stage's layers; of several S-workers that act as one, this one's share."""
    return load_model(
        checkpoint,
        device=resolved.device if ranks is None else ranks.device,
        dtype=torch_dtype(resolved.dtype),
        kv_dtype=resolved.kv_dtype,
        max_model_len=resolved.config.s_part.max_model_len,
        shard=None if ranks is None else ranks.shard,
        layers=resolved.layers[stage],
        with_embedding=not stage,
        with_head=not stage,
    )


def make_s_worker(
    spec: ModelSpec, model: Model, resolved: ResolvedConfig, ranks: Ranks | None = None
) -> SWorker:
    graphs = prepare(model, resolved, ranks)
    if ranks is not None:
        return ParallelSWorker(spec, model, ranks, graphs, resolved.lanes.most)
    idle_threads = watch(resolved.device, computes_alone=shares_thread(resolved.config))
    return SWorker(
        spec, model, resolved.device, graphs, num_lanes=resolved.lanes.most,
        idle_threads=idle_threads,
    )  # fmt: skip


def watch(device: torch.device, *, computes_alone: bool) -> IdleThreads | None:
    """What watches the threads that compute for this one, on a CPU; None: there are none,
    the user has said how long they spin, or they spin for a moment only, beside R-workers
    elsewhere."""
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1 or is_spinning_chosen(os.environ):
        return None
    if not computes_alone and not spins_long(os.environ):
        return None
    idle_threads = watch_idle_threads(openmp_library(), num_threads, available_cores())
    if idle_threads is None and spins_on(os.environ):
        logger.warning(
            "torch was imported before fastdecode, so its idle threads spin for milliseconds: "
            "beside other work on these cores this is several times slower. Import fastdecode "
            "first, or set OMP_WAIT_POLICY=passive"
        )
    return idle_threads


def prepare(model: Model, resolved: ResolvedConfig, ranks: Ranks | None) -> StepGraphs | None:
    """Put kernels on a loaded model, and make it this rank's part of several,
    each of which does the same. Returns its CUDA graphs, if they were chosen."""
    device = resolved.device if ranks is None else ranks.device
    feed_gpu(device)
    shorten_sleeps()
    if device.type == "cuda":
        switch_threads_sooner()
    if device.type == "cpu":
        widen(model)
    fuse(model, device)
    if ranks is not None:
        parallelize(model, ranks.shard, ranks.add_up)
    if device.type == "cpu":
        pack(model)
        call_layers(model)
    return step_graphs(model, resolved, ranks)


def step_graphs(
    model: Model, resolved: ResolvedConfig, ranks: Ranks | None = None
) -> StepGraphs | None:
    """What runs the model's small S-steps as CUDA graphs, if that was chosen.
    Several S-workers pad to the same buckets, whatever each one's GPU has room
    for: they add up rows of one shape."""
    num_lanes, max_graphs = resolved.lanes.most, resolved.max_graphs
    if ranks is not None:
        num_lanes, max_graphs = ranks.agree(num_lanes, max_graphs)
    if not max_graphs:
        return None
    lanes = lane_graphs(resolved.config, len(model.layers), num_lanes)
    graphs = StepGraphs(model, resolved.device, capture=True, lanes=lanes, max_graphs=max_graphs)
    gc.collect()  # what is left of an engine before this one: its graphs and weights
    with contextlib.nullcontext() if ranks is None else ranks.peers.exchanging():
        graphs.prepare()
    return graphs
