"""Two S-workers that act as one, in two processes: the logits of one alone, for
every way to lay out weights."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_cases import ReferenceAttention
from checkpoints import prompts
from device_engine import device_engine, run

from fastdecode.core.errors import ConfigError, WorkerError
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.ranks.group import Ranks
from sworker.ranks.parallel import ParallelSWorker
from sworker.ranks.peers import Peers
from sworker.ranks.sharding import Shard, parallelize
from sworker.worker import SWorker

# Fused by kind, by head, transposed; gated or not; tied; biases that may be
# added once only; a vocabulary of 211.
FAMILIES = ("llama", "phi3", "gemma2", "gpt2", "gpt_neox", "bloom")
LENGTHS = (5, 1, 12)
CPU = torch.device("cpu")


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
            lanes.append((worker.begin(torch.from_numpy(np.stack((ids, positions))), lane), attend))
        goes_on = [True, True]
        while any(goes_on):
            for i, (forward, attend) in enumerate(lanes):
                goes_on[i] = forward.advance(attend(forward.layer, forward.q, forward.k, forward.v))
        rows = np.cumsum([len(one) for one in new]) - 1
        found += [
            forward.logits(rows if i == 0 else rows[:0]) for i, (forward, _) in enumerate(lanes)
        ]
        found.append(lanes[1][0].logits(np.arange(len(ids))))  # of prompts, once more
    return found


@torch.inference_mode()
def run_stage(worker: SWorker) -> tuple[torch.Tensor, torch.Tensor]:
    """A step whose rows come from the stage before: what it hands on, and logits
    of what comes home from the stages behind."""
    attend = ReferenceAttention(worker.spec.attention)
    positions = attend.begin_step([0], [3]).numpy()
    x = torch.linspace(-1, 1, 3 * worker.spec.hidden_size).view(3, -1)
    rows = torch.from_numpy(np.stack((positions, positions)))
    forward = worker.begin(rows, x=x)
    goes_on = True
    while goes_on:
        goes_on = forward.advance(attend(forward.layer, forward.q, forward.k, forward.v))
    output = forward.output.clone()
    forward.come_home(output[1:] * 2)
    return output, forward.logits(np.arange(2))


@pytest.fixture(scope="module")
def paths(tiny_checkpoint: Callable[..., Path]) -> list[Path]:
    return [tiny_checkpoint(family) for family in FAMILIES]


@contextlib.contextmanager
def mirroring(directory: Path, paths: list[Path]) -> Iterator[subprocess.Popen[bytes]]:
    """The second S-worker, in a process of its own: it waits for the first in the directory."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("mirror_rank.py")),
        str(directory),
        *map(str, paths),
    ]
    log = (directory / "log").open("wb")
    with (
        log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def meet(
    paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Ranks]]:
    """The first of two S-workers, of the checkpoint of this number."""
    directory = tmp_path_factory.mktemp("ranks")
    with mirroring(directory, paths) as process:
        places = itertools.count()

        def first_of(index: int) -> Ranks:
            mirror(process, index, place := next(places))
            return Ranks.meet(directory / str(place), Shard(0, 2), CPU)

        yield first_of
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0, (directory / "log").read_text()


def mirror(process: subprocess.Popen[bytes], index: int, place: int = 0) -> None:
    """Have the second S-worker take part in the checkpoint of this number."""
    assert process.stdin is not None
    process.stdin.write(b"%d %d\n" % (index, place))
    process.stdin.flush()


@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=FAMILIES)
@torch.inference_mode()
def test_two_ranks_say_what_one_says(
    index: int, paths: list[Path], meet: Callable[[int], Ranks]
) -> None:
    spec, whole = load_model(paths[index], device="cpu", dtype=torch.float32)
    alone = SWorker(spec, whole, CPU)
    expected = [*run_passes(alone), *run_stage(alone)]
    is_padded = index % 2 == 1  # as the other does; padded steps begin as the model does
    ranks = meet(index)
    try:
        _, half = load_model(paths[index], device="cpu", dtype=torch.float32, shard=ranks.shard)
        assert half.embed_tokens.weight.shape[0] == -(-spec.vocab_size // 2)
        assert half.layers[0].mlp.up.weight.shape[0] * 2 == whole.layers[0].mlp.up.weight.shape[0]
        parallelize(half, ranks.shard, ranks.add_up)
        graphs = StepGraphs(half, CPU, capture=False) if is_padded else None
        if graphs is not None:
            graphs.prepare()
        together = ParallelSWorker(spec, half, ranks, graphs)
        found = run_passes(together)
        found += () if is_padded else run_stage(together)
    finally:
        ranks.close()
    for mine, other in zip(found, expected, strict=not is_padded):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("index", [0, 2], ids=["llama", "gemma2"])
def test_two_ranks_swap_their_heads_of_lanes(
    index: int, paths: list[Path], meet: Callable[[int], Ranks]
) -> None:
    """Prompts in chunks, and tokens, of three lanes. Each rank brings and keeps what the
    first one says."""
    lengths, how = (3, 22, 11, 17, 9), {"kv_placement": "swap", "lanes": 3}
    with device_engine(paths[index], None, **how) as alone:
        expected = run(alone, lengths, 6)
    ranks = meet(index)
    try:
        with device_engine(paths[index], None, ranks, **how) as engine:
            assert run(engine, lengths, 6) == expected
    finally:
        ranks.close()


@contextlib.contextmanager
def first_of_two(
    path: Path, directory: Path, patience_s: float = 60.0
) -> Iterator[tuple[ParallelSWorker, subprocess.Popen[bytes]]]:
    """The first of two S-workers, and the process of the other, which needn't end well."""
    with mirroring(directory, [path]) as process:
        mirror(process, 0)
        ranks = Ranks.meet(directory / "0", Shard(0, 2), CPU, patience_s=patience_s)
        try:
            spec, half = load_model(path, device="cpu", dtype=torch.float32, shard=ranks.shard)
            parallelize(half, ranks.shard, ranks.add_up)
            yield ParallelSWorker(spec, half, ranks), process
        finally:
            ranks.close()  # doesn't wait for who hangs
            process.kill()
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.mark.parametrize(
    ("is_killed", "says"),
    [
        (True, "S-worker 1 of 2 has ended"),
        (False, r"S-worker 1 of 2 doesn't go on, or not within 2 s .*: [A-Z].*out"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_in_the_middle_of_a_step(
    is_killed: bool, says: str, paths: list[Path], tmp_path: Path
) -> None:
    """Rank 0 waits for its share of q, k and v, and is told who doesn't give it."""
    with first_of_two(paths[0], tmp_path, 60.0 if is_killed else 2.0) as (worker, process):
        run_passes(worker, passes=1)
        process.send_signal(signal.SIGSTOP)
        if is_killed:
            threading.Timer(0.2, process.kill).start()
        with pytest.raises(WorkerError, match=says) as caught:
            worker.begin(torch.arange(3).repeat(2, 1))
        assert caught.value.code == "tp_rank_lost"
        if is_killed:  # from now on that is known beforehand
            with pytest.raises(WorkerError, match=r"S-worker 1 of 2 has ended\. Without"):
                worker.begin(torch.arange(3).repeat(2, 1))


def test_an_error_of_its_own_is_not_blamed_on_another_rank(
    paths: list[Path], tmp_path: Path
) -> None:
    """It is told as it is; leaving doesn't wait for the other rank, which waits
    for this one's part of the step."""
    with first_of_two(paths[0], tmp_path) as (worker, _):
        with (
            mock.patch.object(worker.model, "logits", side_effect=RuntimeError("shapes differ")),
            pytest.raises(RuntimeError, match=r"^shapes differ$"),
        ):
            run_passes(worker, passes=1)
        # The other rank waits for the rest of that step: another one isn't
        # begun, and nothing makes up for it.
        for _ in range(2):
            with pytest.raises(WorkerError, match="S-worker 0 of 2 failed in an earlier step"):
                worker.begin(torch.arange(3).repeat(2, 1))


def test_collectives_on_a_gpu_are_aborted_when_a_rank_has_ended() -> None:
    """They wouldn't notice. NCCL's part is played: it needs two GPUs."""
    data = mock.Mock()
    peers = Peers(Shard(0, 2), torch.device("cuda", 0), data, patience_s=60)
    ended = threading.Event()
    data._get_backend.return_value.abort.side_effect = ended.set
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peers.watch({1: process.pid})
        peers.check()
        process.kill()
        assert ended.wait(20)
    with pytest.raises(WorkerError, match="S-worker 1 of 2 has ended"):
        peers.check()
    assert peers.stuck is not None
    assert not peers.close()
    assert peers.stuck.finished.is_set()  # this process needn't be ended any more


def test_heads_that_do_not_divide(paths: list[Path]) -> None:
    with pytest.raises(ConfigError, match="tp=4 doesn't divide the 2 KV heads"):
        load_model(paths[0], device="cpu", shard=Shard(0, 4))
