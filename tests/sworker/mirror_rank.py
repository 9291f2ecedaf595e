"""Run by tests as another process: the second of two S-workers, which mirrors the first, once for
each line that it reads: a checkpoint's number, and a place to meet.

Usage: mirror_rank.py DIRECTORY CHECKPOINT ...

Every other checkpoint's steps are padded to buckets, as for CUDA graphs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fastdecode.core.dtype import DType
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import KVSpec
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.paged import PagedKV
from sworker.ranks.group import Ranks
from sworker.ranks.parallel import mirror
from sworker.ranks.sharding import Shard, parallelize, shard_kv
from sworker.swap.swapped import SwappedKV


class KeptHere:
    """See ``sworker.ranks.kv.KVMaker``."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, 16)
        self._kept = shard_kv(kv, spec.attention, shard)

    def cache(self, num_blocks: int) -> PagedKV:
        return PagedKV(*self._kept, num_blocks, torch.device("cpu"))

    def lanes(self, num_blocks: int, num_lanes: int) -> SwappedKV:
        return SwappedKV(*self._kept, num_blocks, num_lanes, torch.device("cpu"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        index, place = map(int, line.split())
        path = sys.argv[2 + index]
        ranks = Ranks.meet(Path(sys.argv[1], str(place)), Shard(1, 2), torch.device("cpu"))
        spec, model = load_model(path, device="cpu", dtype=torch.float32, shard=ranks.shard)
        parallelize(model, ranks.shard, ranks.add_up)
        graphs = StepGraphs(model, ranks.device, capture=False) if index % 2 else None
        if graphs is not None:
            graphs.prepare()
        mirror(spec, model, ranks, graphs, KeptHere(spec, ranks.shard))
        ranks.close()
    # As ranks of a job end too: at an ordinary exit, threads that torch leaves
    # behind abort the process now and then.
    os._exit(0)
