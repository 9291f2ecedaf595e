"""Run by tests as another process: the second of two S-workers, which mirrors
the first, once for each number of a checkpoint that it reads.

Usage: mirror_rank.py DIRECTORY CHECKPOINT ...

Every other checkpoint's steps are padded to buckets, as for CUDA graphs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.ranks.group import Ranks
from sworker.ranks.parallel import mirror
from sworker.ranks.sharding import Shard, parallelize

if __name__ == "__main__":
    torch.set_num_threads(1)
    for index in map(int, sys.stdin):
        path = sys.argv[2 + index]
        ranks = Ranks.meet(Path(sys.argv[1], str(index)), Shard(1, 2), torch.device("cpu"))
        spec, model = load_model(path, device="cpu", dtype=torch.float32, shard=ranks.shard)
        parallelize(model, ranks.shard, ranks.add_up)
        graphs = StepGraphs(model, ranks.device, capture=False) if index % 2 else None
        if graphs is not None:
            graphs.prepare()
        mirror(spec, model, ranks, graphs)
        ranks.close()
    # As ranks of a job end too: at an ordinary exit, threads that torch leaves
    # behind abort the process now and then.
    os._exit(0)
