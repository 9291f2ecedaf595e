"""What "auto" comes to where there are GPUs, which needs none: torch is told that it sees some."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from values import replace

from cost_model.hardware import Hardware
from cost_model.plans.placement import gpu_like
from cost_model.plans.question import Goal, Setup
from cost_model.plans.size import size
from cost_model.shapes import model_named
from cost_model.workload import Workload
from fastdecode import LLM
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.identity import identify
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.engine.setup.devices import describe_device
from fastdecode.engine.setup.memory import FreeMemory
from fastdecode.engine.setup.resolve import PlacementHost, ResolvedConfig, place, resolve
from fastdecode.schedule.lanes import MAX_AUTO_LANES
from fastdecode.wire.codec import MAX_BODY_BYTES
from sworker.graphs import MAX_GRAPHS

GB = 10**9
FREE = FreeMemory(64 * GB, 78 * GB, 80 * GB)
Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def resolved(llama: str) -> Resolve:
    """``resolved(num_gpus, rank, **options)``."""
    spec = open_checkpoint(llama).spec()

    def make(num_gpus: int, rank: int = 0, **options: object) -> ResolvedConfig:
        options = {"kv_placement": "r", **options}
        config = EngineConfig.of(llama, **options)
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=num_gpus > 0),
            mock.patch.object(torch.cuda, "device_count", return_value=num_gpus),
        ):
            return resolve(config, spec, num_cores=16, free=FREE, rank=rank)

    return make


def test_a_prompt_takes_one_step_on_a_gpu_if_it_has_room(resolved: Resolve, llama: str) -> None:
    """What a later chunk sees of the ones before, R-workers would have to attend."""
    assert resolved(1, device="cuda").schedule.batching.prefill_chunk == 2048
    assert (
        resolved(1, device="cuda", max_step_tokens=9000).schedule.batching.prefill_chunk
        == 9000 - 256
    )
    assert resolved(1, device="cuda", prefill_chunk=64).schedule.batching.prefill_chunk == 64
    on_host = resolve(
        EngineConfig.of(llama), open_checkpoint(llama).spec(), num_cores=4, free=FreeMemory(64 * GB)
    )
    assert on_host.schedule.batching.prefill_chunk == 512


def test_every_rank_has_a_gpu_of_its_own(resolved: Resolve) -> None:
    assert resolved(4, device="cuda:1").device == torch.device("cuda", 1)
    assert [resolved(4, rank, device="cuda:1", tp=3).device.index for rank in range(3)] == [1, 2, 3]
    # Where the launcher shows each rank one GPU.
    assert resolved(1, 1, device="cuda", tp=2).device.index == 0
    with pytest.raises(
        ConfigError, match="GPU 2 of S-worker 2 does not exist: torch sees 2 CUDA devices"
    ):
        resolved(2, 2, device="cuda", tp=3)
    with pytest.raises(ConfigError, match="GPU 0 does not exist: torch sees 0"):
        resolved(0, device="cuda")


def test_auto_is_a_gpu_if_there_is_one(resolved: Resolve) -> None:
    assert resolved(0, device="auto").device == torch.device("cpu")
    assert resolved(1, device="auto").device == torch.device("cuda", 0)
    assert [resolved(4, rank, device="auto", tp=2).device.index for rank in range(2)] == [0, 1]
    # What hangs on the device follows.
    assert (resolved(0, device="auto").prompts_on_r, resolved(1, device="auto").prompts_on_r) == (
        True,
        False,
    )
    assert resolved(1, device="auto", cuda_graphs="on").max_graphs == MAX_GRAPHS
    with pytest.raises(ConfigError, match="cuda_graphs='on' needs a CUDA device, not device='cpu'"):
        resolved(0, device="auto", cuda_graphs="on")
    with pytest.raises(
        ConfigError, match="device='gpu' is not a torch device: use cpu, cuda, cuda:N or auto"
    ):
        resolved(1, device="gpu")


def test_devices_are_named_with_their_memory(resolved: Resolve) -> None:
    host, second = resolved(1, device="cpu"), resolved(2, device="cuda:1")
    assert describe_device(host.device, host.free) == "the CPU (64.0 GB of memory free)"
    with mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A10"):
        told = describe_device(second.device, second.free)
    assert told == "NVIDIA A10 (cuda:1, 78.0 of 80.0 GB free)"


def test_the_device_is_named_when_a_model_is_loaded(llama: str) -> None:
    lines: list[str] = []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        LLM(llama, device="auto", kv_memory_gb=0.01, prefix_cache="auto", progress=lines.append),
    ):
        assert re.search(
            r"^loading .* on the CPU \(--device auto: torch sees no GPU; \d+\.\d GB of memory "
            r"free\): weights",
            lines[0],
        ), lines
        assert lines[0].endswith("; prefix cache on"), lines


def test_queries_for_closed_parts_fit_into_a_message(resolved: Resolve) -> None:
    """Even of prompts that were booked in 8 lanes, which have become one,
    beside all that decode."""
    resolved_ = resolved(0, split_tokens=64)
    spec = open_checkpoint(resolved_.config.model).spec().attention[0]
    row_bytes = spec.num_q_heads * spec.head_dim * resolved_.dtype.size_bytes
    assert (
        1024 * row_bytes
        < (MAX_AUTO_LANES + 1) * resolved_.schedule.max_closed_rows * row_bytes
        < MAX_BODY_BYTES
    )


def test_contexts_end_where_kernels_stop_counting(llama: str) -> None:
    spec = replace(open_checkpoint(llama).spec(), max_model_len=1 << 25)
    assert (
        resolve(EngineConfig(llama), spec, num_cores=1, free=FREE).max_model_len
        == MAX_SEQUENCE_TOKENS
        == 1 << 23
    )
    with pytest.raises(ConfigError, match=r"max_model_len=8388609 exceeds the 8388608 tokens"):
        resolve(EngineConfig.of(llama, max_model_len=(1 << 23) + 1), spec, num_cores=1, free=FREE)


def test_which_steps_run_as_graphs(resolved: Resolve) -> None:
    assert (
        resolved(1, device="cuda").max_graphs
        == resolved(1, device="cuda", cuda_graphs="on").max_graphs
        == MAX_GRAPHS
    )
    assert resolved(1, device="cuda", cuda_graphs="off").max_graphs == 0
    assert resolved(2, device="cuda", tp=2).max_graphs == 0  # only if they are asked for
    assert resolved(2, device="cuda", tp=2, cuda_graphs="on").max_graphs == MAX_GRAPHS
    assert resolved(0).max_graphs == 0
    with pytest.raises(ConfigError, match="cuda_graphs='on' needs a CUDA device, not device='cpu'"):
        resolved(0, cuda_graphs="on")


def test_lanes_and_threads_beside_a_gpu(resolved: Resolve) -> None:
    beside, alone = resolved(1, device="cuda", r_workers=2), resolved(0, r_workers=2)
    assert (beside.schedule.num_lanes, beside.lanes.adapt, beside.r_threads) == (2, True, 7)
    assert (alone.schedule.num_lanes, alone.lanes.adapt, alone.r_threads) == (1, False, 8)
    assert not resolved(1, device="cuda", schedule="fixed-f", expected_output_tokens=32).lanes.adapt
    on_gpu = resolved(1, device="cuda", kv_placement="gpu")
    assert (on_gpu.schedule.num_lanes, on_gpu.transport) == (
        1,
        "local",
    ) and on_gpu.memory.kv_bytes > 60 * GB


AT_ADDRESSES: dict[str, Any] = {"r_worker_addresses": ("tcp://10.0.0.1:1",), "key": "k"}


@pytest.mark.parametrize(
    ("num_gpus", "options", "placement"),
    [
        (0, AT_ADDRESSES, "r"),
        (1, {}, "gpu"),
        (1, {"r_workers": 2}, "hybrid"),
        (1, AT_ADDRESSES, "hybrid"),
        # What is for one side, or for R-workers, is what somebody asks for.
        (1, {**AT_ADDRESSES, "lanes": 2}, "r"),
        (1, {**AT_ADDRESSES, "split_tokens": 4096}, "hybrid"),
        (1, {**AT_ADDRESSES, "kv_dtype": "int4"}, "r"),
        (1, {"kv_dtype": "int4"}, "r"),
        (1, {"prompt_attention": "r"}, "r"),
        (2, {**AT_ADDRESSES, "tp": 2}, "r"),
    ],
    ids=str,
)
def test_placement_auto(
    num_gpus: int, options: dict[str, Any], placement: str, resolved: Resolve
) -> None:
    found = resolved(num_gpus, kv_placement="auto", **options)
    assert found.config.r_part.kv_placement == placement


HARDWARE = Hardware.load()
EXAMPLES = {
    "7B on an A10": ("Llama-2 7B", "A10", "EPYC 7452", "100GbE", Workload(0, 1024)),
    "13B on an A100": ("Llama-2 13B", "A100", "EPYC 7763", "100GbE", Workload(0, 1024)),
    "70B on an H200": ("Llama-3 70B", "H200", "EPYC 9654", "200GbE", Workload(1024, 1024)),
}
DRIVER_NAMES = {"A10": "NVIDIA A10", "A100": "NVIDIA A100-SXM4-80GB", "H200": "NVIDIA H200"}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("num_sequences", ["size's", 256])
def test_auto_chooses_what_size_does(name: str, num_sequences: object) -> None:
    """Of its three main examples, with the R-workers that it asks for. Before, auto
    took both sides wherever there were any."""
    model, gpu_name, cpu, nic, workload = EXAMPLES[name]
    spec, gpu = model_named(model), HARDWARE.gpu(gpu_name)
    setup = Setup(
        spec, spec.dtype, spec.dtype.value, gpu, HARDWARE.cpu(cpu), HARDWARE.nic(nic), workload
    )
    sizing = size(setup, Goal())
    assert sizing.plan is not None and sizing.placement == "r"
    most = sizing.plan.batch if num_sequences == "size's" else num_sequences
    addresses = tuple(f"tcp://10.0.0.{i}:1" for i in range(sizing.plan.sockets))
    config = EngineConfig.of(
        "m", r_worker_addresses=addresses, key="k", max_num_sequences=most,
        max_model_len=2048, expected_output_tokens=workload.output_tokens,
        gpu_memory_fraction=0.99, max_step_tokens=1024,
    )  # fmt: skip
    free = FreeMemory(
        900 * GB, gpu.memory_bytes, gpu.memory_bytes, device_name=DRIVER_NAMES[gpu_name]
    )
    placed, why = place(
        config, spec, identify(config, spec), PlacementHost(free, len(addresses), is_here=False)
    )
    assert placed.r_part.kv_placement == sizing.placement
    assert "R-workers" in why and "tokens/s" in why


def test_auto_with_little_to_add_is_both_sides_and_else_the_gpu() -> None:
    """8B on an H200 beside one R-worker, and beside none."""
    spec = model_named("Llama-3 8B")
    free = FreeMemory(900 * GB, 150 * GB, 150 * GB, device_name="NVIDIA H200")
    config = EngineConfig.of("m", max_model_len=4096, max_num_sequences=1024)
    identity = identify(config, spec)

    def placed(num_r_workers: int, *, is_here: bool = False) -> str:
        machine = PlacementHost(free, num_r_workers, is_here=is_here)
        return place(config, spec, identity, machine)[0].r_part.kv_placement

    assert [placed(number) for number in (0, 1)] == ["gpu", "hybrid"]
    assert place(config, spec, identity, None)[0].r_part.kv_placement == "r"


def test_auto_where_not_one_sequence_fits_is_r_workers() -> None:
    spec = model_named("Llama-3 70B")
    free = FreeMemory(900 * GB, 143 * GB, 143 * GB, device_name="NVIDIA H200")
    config = EngineConfig.of("m", max_model_len=4096)
    placed, _ = place(config, spec, identify(config, spec), PlacementHost(free, 4, is_here=False))
    assert placed.r_part.kv_placement == "r"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA B999", None),
    ],
)
def test_gpus_by_the_names_that_drivers_give(name: str, known: str | None) -> None:
    gpu, is_known = gpu_like(name, 10 * GB, 0.9, HARDWARE)
    assert (gpu.name if is_known else None) == known
    assert gpu.usable_memory_bytes == pytest.approx(9 * GB)
    assert gpu_like("NVIDIA B999", 180 * GB, 0.9, HARDWARE)[0].name == "H100-SXM"


def test_where_r_workers_of_this_process_run(resolved: Resolve) -> None:
    def transport(num_gpus: int, **options: Any) -> str:
        return resolved(num_gpus, **options).transport

    assert transport(0) == transport(0, lanes=1) == "inline"
    # Whoever could overlap, or has several R-workers to tell apart, gets threads.
    assert (
        transport(0, lanes=2)
        == transport(0, r_workers=2)
        == transport(1, device="cuda")
        == "inproc"
    )


def test_stages_on_shared_cores_take_turns(resolved: Resolve) -> None:
    """Each with all cores; unless there are lanes for several at once."""
    alone = resolved(0)
    turns, at_once = resolved(0, pp=2), resolved(0, pp=2, lanes=2)
    assert (turns.transport, turns.schedule.num_lanes, turns.stages_at_once) == ("inline", 1, 1)
    assert turns.r_threads == alone.r_threads
    assert (at_once.transport, at_once.schedule.num_lanes, at_once.stages_at_once) == (
        "inline",
        2,
        2,
    )
    assert at_once.r_threads == max(1, alone.r_threads // 2)
    assert resolved(0, pp=2, lanes=3).transport == "inproc"
    on_gpus = resolved(2, pp=2, device="cuda")
    assert on_gpus.schedule.num_lanes == 4 and on_gpus.lanes.adapt


def test_a_load_limit_is_kept_by_one_lane_too(resolved: Resolve) -> None:
    for lanes, mode in ((1, "greedy"), (2, "auto")):
        assert resolved(0, lanes=lanes).schedule.batching.schedule == mode
        assert resolved(0, lanes=lanes, load_limit=100).schedule.batching.schedule == "stabilized"


def test_resolve_stabilizes_lanes_without_forecast_on_request(resolved: Resolve) -> None:
    options = {"kv_placement": "swap", "pp": 3, "pp_layers": "1,1,1", "lanes": 6}
    for schedule, chosen in (("stabilized", "stabilized"), ("auto", "greedy")):
        plan = resolved(1, device="cuda", schedule=schedule, **options)
        assert plan.schedule.batching.schedule == chosen
        assert plan.schedule.num_lanes == options["lanes"]
