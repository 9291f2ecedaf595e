"""S-workers that act as one (``--tp``): how the ranks of an MPI job find each other, and what all
but the first of them do.

Ranks 0 to tp - 1 of the job are the S-workers, the others R-workers; with pipeline stages ranks 0
to tp - 1 are the first stage's, the next tp the second's, and so on. S-workers of one stage share
a host: they exchange partial sums twice a layer.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.s_part import SPart
from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec
from fastdecode.engine.setup.resolve import ResolvedConfig, kept_by_rank, resolve_for_this_host
from fastdecode.engine.setup.s_worker import load_stage, prepare
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.ranks import StageRanks, launched_size, local_rank
from fastdecode.wire.stages import Meeting
from fastdecode.wire.transport import CLOSED
from sworker.dtypes import torch_dtype
from sworker.failures import typed_start
from sworker.paged import PagedKV
from sworker.ranks.group import JOINING_TIMEOUT_S, Ranks
from sworker.ranks.parallel import mirror
from sworker.ranks.sharding import Shard
from sworker.swap.swapped import SwappedKV

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiJob


def check_launched(s_part: SPart, *, has_r_workers: bool = True) -> None:
    """Raise ConfigError if S-workers shall act as one and no MPI launcher started this process.
    ``has_r_workers``: False if the devices keep K and V."""
    if s_part.tp == 1 or launched_size() is not None:
        return
    stages = f" --pp {s_part.pp}" if s_part.pp > 1 else ""
    command = f"mpirun -n {s_part.tp * s_part.pp} fastdecode generate --tp {s_part.tp}{stages} ..."
    if s_part.prompt_pp:
        command = f"fastdecode launch -- generate --tp {s_part.tp}{stages} --prompt-pp ..."
    elif has_r_workers:
        command += " : -n 2 fastdecode r-worker"
    raise ConfigError(
        Given("tp", s_part.tp), f" needs an MPI launcher: {command}", code="no_mpi_launcher"
    )


def meet_ranks(resolved: ResolvedConfig) -> Ranks:
    """Return this rank's part of a stage's S-workers, connected with the others.

    Raises:
        ConfigError: If no MPI launcher started this, or too few ranks, or on several hosts.
        WorkerError: If the others haven't come, or have ended.
    """
    s_part, roles = resolved.config.s_part, resolved.ranks
    check_launched(s_part)
    job = mpi_job.join(min_ranks=roles.num_s_ranks)
    if job.size < roles.num_s_ranks:
        raise ConfigError(
            Given("tp", s_part.tp),
            f" needs {roles.num_s_ranks} MPI ranks, and R-workers beside: {job.size} were started",
        )
    leader = roles.leader(roles.stage(job.rank))
    members = range(leader, leader + s_part.tp)
    with mpi_job.watch_joining(members), _meeting_place(job, members) as place:
        shard = Shard(roles.place(job.rank), s_part.tp, s_part.ep)
        patience_s = resolved.config.cluster.worker_timeout_s  # in the middle of a step
        return Ranks.meet(place, shard, resolved.device, patience_s=patience_s)


def resolve_rank(config: EngineConfig, spec: ModelSpec) -> ResolvedConfig:
    """Resolve for one of an engine's S-workers, where all ranks of the job are that engine's. A
    rank takes the GPU of its place among the host's S-workers, counted from the one that was asked
    for, as far as the launcher tells it."""
    s_part = config.s_part
    place = StageRanks(s_part.pp, s_part.tp).place(mpi_job.join().rank)
    number = place if s_part.pp == 1 else max(place, local_rank())
    return resolve_for_this_host(config, spec, rank=number)


def mirror_leader(
    config: EngineConfig, resolve: Callable[[EngineConfig, ModelSpec], ResolvedConfig]
) -> None:
    """Be one of the S-workers that act as one with the first: load a part of the model, and serve
    until the first lets it go.

    Raises:
        ConfigError, ModelError: If rank 0 raises it.
        WorkerError: If another rank is lost.
    """
    checkpoint = open_checkpoint(config.model, config.s_part.load_format)
    planned = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    resolved = resolve(config, planned)
    stage = resolved.ranks.stage(mpi_job.join().rank)
    ranks = meet_ranks(resolved)
    with typed_start():
        spec, model = load_stage(checkpoint, resolved, stage, ranks)
        make_kv = None
        if resolved.transport == "local":
            ranks.agree(resolved.memory.kv_bytes)
            make_kv = _KeptByRank(stage_spec(planned, resolved.layers[stage]), resolved, ranks)
        step_graphs = prepare(model, resolved, ranks)
    mirror(spec, model, ranks, step_graphs, make_kv)
    ranks.close()


class _KeptByRank:
    """Makes KV caches on this rank's device, as ``sworker.ranks.kv.KVMaker`` does."""

    def __init__(self, spec: ModelSpec, resolved: ResolvedConfig, ranks: Ranks) -> None:
        self._kv, self._attention = kept_by_rank(spec, resolved, ranks.shard.rank)
        self._device, self._dtype = ranks.device, torch_dtype(resolved.activation_dtype)
        self._most_tokens = resolved.stored_tokens

    def cache(self, num_blocks: int) -> PagedKV:
        return PagedKV(self._kv, self._attention, num_blocks, self._device, dtype=self._dtype)

    def lanes(self, num_blocks: int, num_lanes: int) -> SwappedKV:
        return SwappedKV(
            self._kv, self._attention, num_blocks, num_lanes, self._device,
            most_tokens=self._most_tokens, dtype=self._dtype,
        )  # fmt: skip


@contextlib.contextmanager
def _meeting_place(job: MpiJob, members: range) -> Iterator[Path]:
    """Yield a path that all of these ranks know, in a directory of this user's alone, which is
    removed when they have met."""
    from fastdecode.wire.mpi.hub import MEETING_LINE, MpiHub

    leader, tp = members[0], len(members)
    leads = job.rank == leader
    hub: MpiHub[Meeting, Meeting] = MpiHub(job, frozenset({Meeting}))
    fresh = tempfile.TemporaryDirectory(prefix="fastdecode-") if leads else contextlib.nullcontext()
    with contextlib.closing(hub), fresh as directory:
        for rank in members[1:] if leads else (leader,):
            hub.connect(rank, f"rank {rank}", line=MEETING_LINE)
        try:
            if not leads:
                hub.connections[0].send(Meeting(job.host))
            texts = [each.receive(JOINING_TIMEOUT_S).text for each in hub.connections]
            place = texts[0]
            if leads:
                place = f"{directory}/ranks" if {*texts} == {job.host} else ""
                for each in hub.connections:
                    each.send(Meeting(place))
        except WorkerError as error:
            code = "tp_rank_lost" if error.code == CLOSED else "tp_connect_failed"
            raise WorkerError(
                f"the S-workers of tp={tp} can't meet: {error.message}. It has other options, or "
                f"was started as an R-worker: ranks {leader} to {members[-1]} must be S-workers",
                code=code,
            ) from None
        if not place:
            raise ConfigError(
                f"the {tp} S-workers of tp={tp} are on several hosts: place ranks {leader} to "
                f"{members[-1]} on one host"
            )
        yield Path(place)
