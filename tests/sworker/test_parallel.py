"""Two S-workers that act as one, in two processes: the logits of one alone, for every way to lay out weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import prompts

from fastdecode.core.errors import ConfigError
from sworker.model.reference import ReferenceAttention
from sworker.parallel import ParallelSWorker, Ranks
from sworker.sharding import Shard, parallelize
from sworker.weights import load_model
from sworker.worker import SWorker

# Fused by kind, by head, transposed; gated or not; tied; biases that may be added once only; a vocabulary of 211.
FAMILIES = ("llama", "phi3", "gemma2", "gpt2", "gpt_neox", "bloom", "opt")
LENGTHS = (5, 1, 12)


def run_passes(worker: SWorker, passes: int = 2) -> list[torch.Tensor]:
    """Logits of several steps of three sequences, two passes under way at a time."""
    attends = [ReferenceAttention(worker.spec.attention) for _ in range(2)]
    tokens = prompts(LENGTHS, seed=4)
    found = []
    for step in range(passes):
        new = tokens if step == 0 else [[7 + step], [9 + step], [11 + step]]
        ids = np.array([token for one in new for token in one], np.int64)
        lanes = []
        for lane, attend in enumerate(attends):
            positions = attend.begin_step(range(3), [len(one) for one in new]).numpy()
            lanes.append((worker.begin(ids, positions, lane), attend))
        goes_on = [True, True]
        while any(goes_on):
            for i, (forward, attend) in enumerate(lanes):
                goes_on[i] = forward.advance(attend(forward.layer, forward.q, forward.k, forward.v))
        rows = np.cumsum([len(one) for one in new]) - 1
        found += [forward.logits(rows if i == 0 else rows[:0]) for i, (forward, _) in enumerate(lanes)]
    return found


@pytest.fixture(scope="module")
def paths(tiny_checkpoint: Callable[..., Path]) -> list[Path]:
    return [tiny_checkpoint(family) for family in FAMILIES]


@pytest.fixture(scope="module")
def place(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the second S-worker waits for the first."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).with_name("mirror_rank.py")), str(directory), *map(str, paths)]
    log = directory / "log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        yield directory
        try:
            assert process.wait(20) == 0, log.read_text()
        finally:
            process.kill()


@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=FAMILIES)
@torch.inference_mode()
def test_two_ranks_say_what_one_says(index: int, paths: list[Path], place: Path) -> None:
    spec, whole = load_model(paths[index], device="cpu", dtype=torch.float32)
    expected = run_passes(SWorker(spec, whole, torch.device("cpu")))
    ranks = Ranks.meet(place / str(index), Shard(0, 2), torch.device("cpu"))
    try:
        _, half = load_model(paths[index], device="cpu", dtype=torch.float32, shard=ranks.shard)
        assert half.embed_tokens.weight.shape[0] == -(-spec.vocab_size // 2)
        assert half.layers[0].mlp.up.weight.shape[0] * 2 == whole.layers[0].mlp.up.weight.shape[0]
        parallelize(half, ranks.shard, ranks.data)
        found = run_passes(ParallelSWorker(spec, half, ranks))
    finally:
        ranks.close()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_heads_that_do_not_divide(paths: list[Path]) -> None:
    with pytest.raises(ConfigError, match="tp=4 doesn't divide the 2 KV heads"):
        load_model(paths[0], device="cpu", shard=Shard(0, 4))
