"""Steps in a lane's fixed memory, padded to a bucket: as steps that run as they
are. Units run without capture here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu

from fastdecode.core.config.engine import EngineConfig
from fastdecode.engine.setup import s_worker
from fastdecode.engine.setup.scheduling import lane_graphs
from sworker.graphs import MAX_GRAPH_ROWS, MAX_GRAPHS, Buckets, StepGraphs
from sworker.load.weights import load_model
from sworker.worker import PaddedPass, SWorker

CPU = torch.device("cpu")


@pytest.mark.parametrize(("parts", "count"), [(8, 35), (4, 23), (2, 15), (1, 10)])
def test_buckets(parts: int, count: int) -> None:
    buckets = Buckets(parts=parts)
    sizes = [buckets.of(n) for n in range(1, MAX_GRAPH_ROWS + 1)]
    assert all(n <= size < max(2 * n, n + 8) for n, size in enumerate(sizes, 1))
    assert all(size <= n * (1 + 1 / parts) for n, size in enumerate(sizes, 1) if n > 64)
    assert sizes == sorted(sizes) and [buckets.of(size) for size in sizes] == sizes
    assert (
        buckets.sizes == sorted(set(sizes))
        and len(buckets.sizes) == count
        and max(sizes) == MAX_GRAPH_ROWS
    )


def test_buckets_double_in_two_parts() -> None:
    sizes = Buckets(parts=2).sizes
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


@pytest.mark.parametrize(("num_layers", "num_lanes"), [(32, 8), (80, 8), (80, 4)])
def test_graphs_of_large_models_fit(num_layers: int, num_lanes: int) -> None:
    """Of 80 layers and 8 lanes 6,480 were wanted where 4,096 are allowed: the
    smallest steps had none."""
    lanes = lane_graphs(EngineConfig.of(model="m"), num_layers, num_lanes)
    buckets = Buckets.choose(lanes, MAX_GRAPHS)
    assert buckets.num_graphs(lanes) <= MAX_GRAPHS
    assert buckets.sizes[-1] == MAX_GRAPH_ROWS and buckets.sizes[0] <= 8


@pytest.mark.parametrize(("max_graphs", "captured"), [(4096, 3 * 3 * 4), (5, 5)])
def test_nothing_is_captured_later(
    max_graphs: int, captured: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """As many graphs as are allowed, of all lanes that there may be; the rest
    runs as it is, however often."""
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=2)
    _, model = load_model(checkpoint, device=CPU, dtype=torch.float32)
    gpu = RecordedGpu()
    with gpu:
        graphs = StepGraphs(
            model, CPU, capture=True, num_lanes=3, max_rows=8, max_graphs=max_graphs, gpu=gpu
        )
        graphs.prepare()
        assert graphs.num_graphs == captured
        gpu.calls.clear()
        for _ in range(3):
            for lane in range(4):
                for bucket in graphs.buckets.sizes:
                    graphs.run(lane, 1, bucket)
    assert graphs.num_graphs == captured
    assert gpu.calls["replay"] == 3 * sum(unit == 1 for _, unit, _ in graphs._graphs)


BREAKS: dict[str, Callable[[torch.Tensor, RecordedGpu], object]] = {
    "a number for the host": lambda x, gpu: x[0, 0].item(),
    "as many rows as are greater": lambda x, gpu: x[x > 0],
    "a copy from the host": lambda x, gpu: gpu.upload(torch.zeros(3)),
    "chance": lambda x, gpu: torch.rand_like(x),
    "a wait": lambda x, gpu: gpu.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("what", BREAKS)
@torch.inference_mode()
def test_what_breaks_a_capture_is_refused(what: str) -> None:
    """By the GPU of these tests, as by a real one: units are captured on it."""
    gpu, x = RecordedGpu(), torch.ones(3, 4)
    with gpu, pytest.raises(RuntimeError, match="can't be captured"):
        gpu.capture(lambda: BREAKS[what](x, gpu), None)
    with gpu:
        assert BREAKS[what](x, gpu) is not gpu  # elsewhere it may be done


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "bloom"])
@torch.inference_mode()
def test_units_can_be_captured_and_keep_to_their_memory(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Run twice, a unit reads and writes the same bytes, its own temporaries
    aside; and nothing is collected meanwhile."""
    _, model = load_model(tiny_checkpoint(family), device=CPU, dtype=torch.float32)
    gpu = RecordedGpu()
    with gpu:
        graphs = StepGraphs(model, CPU, capture=True, max_rows=8, gpu=gpu)
        graphs.prepare()
        assert graphs.num_graphs == graphs.num_units * 4
        lane = graphs.buffers(0)
        for unit in range(graphs.num_units):
            memory = [lane.x, lane.o, *(lane.outputs(unit)), lane.token_ids, lane.positions]
            before = [x.data_ptr() for x in memory]
            for _ in range(2):
                graphs.unit(0, unit, 8)
                assert [x.data_ptr() for x in memory] == before
    assert not gpu.collected_while_capturing


def test_what_cannot_be_captured_runs_as_it_is(
    tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, and no more than one attempt."""
    spec, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=torch.float32)
    gpu = RecordedGpu()
    with mock.patch.object(gpu, "capture", side_effect=RuntimeError("no\nreason")) as capture:
        graphs = StepGraphs(model, CPU, capture=True, num_lanes=2, max_rows=8, gpu=gpu)
        graphs.prepare()
        rows = torch.arange(5).repeat(2, 1)
        found, expected = (SWorker(spec, model, CPU, how).begin(rows) for how in (graphs, None))
        for _ in range(3):
            assert found.advance(expected.q) == expected.advance(expected.q)
            torch.testing.assert_close(found.q, expected.q, atol=1e-5, rtol=1e-4)
            expected.q = expected.q.clone()
    assert capture.call_count == 1 and gc.isenabled()
    assert [record.message for record in caplog.records] == [
        "unit 0 of the S-part, of 8 rows, can't be captured as a CUDA graph on cpu: it runs "
        "without, and so does everything that is not captured yet: no"
    ]


@pytest.mark.parametrize("at", ["warm-up", "capture"])
def test_a_kernel_of_triton_that_cannot_be_launched_costs_the_graphs_alone(
    at: str, tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's errors are no RuntimeErrors."""
    _, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=torch.float32)
    kind = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    error = kind("out of resource: shared memory, Required: 151620\nmore")
    gpu = RecordedGpu()
    graphs = StepGraphs(model, CPU, capture=True, max_rows=8, gpu=gpu)
    fails = mock.patch.object(
        *((graphs, "unit") if at == "warm-up" else (gpu, "capture")), side_effect=error
    )
    with fails:
        graphs.prepare()
    assert graphs.num_graphs == 0
    (record,) = caplog.records
    assert record.message.endswith("out of resource: shared memory, Required: 151620")


def test_what_else_fails_at_warm_up_raises(tiny_checkpoint: Callable[..., Path]) -> None:
    """A device that fails, or has no memory: the start has failed."""
    _, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=torch.float32)
    graphs = StepGraphs(model, CPU, capture=True, max_rows=8, gpu=RecordedGpu())
    gone = RuntimeError("CUDA error: device-side assert triggered")
    with mock.patch.object(graphs, "unit", side_effect=gone), pytest.raises(RuntimeError):
        graphs.prepare()


@torch.inference_mode()
def test_two_lanes_of_other_sizes_at_every_step(tiny_checkpoint: Callable[..., Path]) -> None:
    """Lanes keep out of each other's memory, and what a larger step left behind
    is not seen by a smaller one."""
    spec, model = load_model(tiny_checkpoint("gemma2"), device=CPU, dtype=torch.float32)
    plain = SWorker(spec, model, CPU)
    padded = SWorker(spec, model, CPU, StepGraphs(model, CPU, capture=False, max_rows=40))
    rng = np.random.default_rng(3)
    for sizes in ((11, 40), (3, 17), (1, 40), (40, 2), (41, 9)):
        steps = []
        for lane, size in enumerate(sizes):
            rows = torch.from_numpy(rng.integers(0, spec.vocab_size, (2, size)))
            steps.append((plain.begin(rows), padded.begin(rows, lane)))
        assert [isinstance(step, PaddedPass) for _, step in steps] == [size <= 40 for size in sizes]
        goes_on = True
        while goes_on:
            for expected, found in steps:
                for name in ("q", "k", "v"):
                    torch.testing.assert_close(
                        getattr(found, name), getattr(expected, name), atol=1e-5, rtol=1e-4
                    )
            outputs = [torch.randn_like(expected.q) for expected, _ in steps]
            for (expected, found), o in zip(steps, outputs, strict=True):
                goes_on = expected.advance(o)
                assert found.advance(o) == goes_on
        for (expected, found), size in zip(steps, sizes, strict=True):
            rows = np.arange(0, size, 2)
            torch.testing.assert_close(
                found.logits(rows), expected.logits(rows), atol=1e-4, rtol=1e-4
            )


def test_several_s_workers_pad_alike_whatever_their_gpus_have_room_for() -> None:
    config, model = EngineConfig.of(model="m"), mock.Mock(layers=[None] * 4)
    resolved = mock.Mock(device=CPU, max_graphs=4096, lanes=mock.Mock(most=4), config=config)
    ranks = mock.MagicMock(agree=lambda *numbers: [min(n, 2) for n in numbers])
    with mock.patch.object(s_worker, "StepGraphs") as made:
        s_worker.step_graphs(model, resolved)
        s_worker.step_graphs(model, resolved, ranks)
        no_room = s_worker.step_graphs(model, resolved, mock.Mock(agree=lambda *numbers: [2, 0]))
    chosen = [
        (len(call.kwargs["lanes"]), call.kwargs["max_graphs"]) for call in made.call_args_list
    ]
    assert chosen == [(4, 4096), (2, 2)] and no_room is None
