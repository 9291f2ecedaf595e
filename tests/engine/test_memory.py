"""The memory plan: what is left for KV, and refusals with numbers, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.model.families import read_model_spec
from fastdecode.engine.setup.memory import (
    CUDA_RESERVE_BYTES,
    GRAPH_BYTES,
    NODE_BYTES,
    OLD_NODE_BYTES,
    FreeMemory,
    KVDemand,
    StepSizes,
    plan_memory,
)
from fastdecode.engine.setup.resolve import ResolvedConfig, resolve
from fastdecode.schedule.lanes import MAX_AUTO_LANES
from sworker.kernels import packing

GB = 10**9
LLAMA_8B = read_model_spec(
    {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    name="llama-8b",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of activations does not depend on the CPU that runs these tests."""
    monkeypatch.setattr(packing, "_has_products", lambda dtype: True)


SIZES = StepSizes(num_lanes=2, step_tokens=2304, logit_rows=128, itemsize=2)
REMOTE = KVDemand(on_device=False, num_caches=0, cache_bytes=None)
THREADS = KVDemand(on_device=False, num_caches=2, cache_bytes=None)
LOCAL = KVDemand(on_device=True, num_caches=1, cache_bytes=None)
H200 = FreeMemory(100 * GB, 140 * GB, 141 * GB)


def test_the_sizes_of_an_8b_model() -> None:
    plan = plan_memory(LLAMA_8B, SIZES, REMOTE, H200, gpu_memory_fraction=0.9)
    assert plan.weights_bytes == pytest.approx(16.06 * GB, rel=0.01)
    assert 0.3 * GB < plan.activation_bytes < 2 * GB
    assert plan.staging_bytes == 2 * 6 * 2304 * 6144 * 2
    assert plan.kv_bytes == 0
    half = plan_memory(
        LLAMA_8B, replace(SIZES, num_shards=2), REMOTE, H200, gpu_memory_fraction=0.9
    )
    assert half.weights_bytes == pytest.approx(plan.weights_bytes / 2, rel=0.01)


def test_kv_on_the_gpu_takes_what_is_left_of_the_fraction() -> None:
    plan = plan_memory(LLAMA_8B, SIZES, LOCAL, H200, gpu_memory_fraction=0.9)
    taken = plan.weights_bytes + plan.activation_bytes + plan.kv_bytes + CUDA_RESERVE_BYTES
    assert taken == int(0.9 * 141 * GB) - 1 * GB  # somebody else has 1 GB
    assert plan.staging_bytes == 0
    smaller = plan_memory(LLAMA_8B, SIZES, LOCAL, H200, gpu_memory_fraction=0.5)
    assert plan.kv_bytes - smaller.kv_bytes == pytest.approx(0.4 * 141 * GB, abs=2)


def test_kv_on_the_host() -> None:
    on_gpu = plan_memory(LLAMA_8B, SIZES, THREADS, H200, gpu_memory_fraction=0.9)
    assert on_gpu.kv_bytes == int((100 * GB - on_gpu.staging_bytes) * 0.5) // 2
    alone = plan_memory(LLAMA_8B, SIZES, THREADS, FreeMemory(40 * GB), gpu_memory_fraction=0.9)
    assert (
        alone.kv_bytes == int((40 * GB - alone.weights_bytes - alone.activation_bytes) * 0.5) // 2
    )


@pytest.mark.parametrize(
    ("kv", "free", "says"),
    [
        (
            REMOTE,
            FreeMemory(8 * GB),
            r"weights 16\.0\d GB.*the host has 8\.00 GB.*max_num_sequences",
        ),
        (
            REMOTE,
            FreeMemory(80 * GB, 15 * GB, 16 * GB),
            r"the GPU \(fraction 0\.9 of 16\.00 GB\) has.*gpu_memory",
        ),
        (
            replace(LOCAL, cache_bytes=120 * GB),
            H200,
            r"KV cache\(s\) of 120\.00 GB.*takes 120\.00 GB, but the GPU",
        ),
        (
            replace(THREADS, cache_bytes=60 * GB),
            H200,
            r"2 KV cache\(s\) of 60\.00 GB.*takes 120\.00 GB, but the host",
        ),
        (
            REMOTE,
            FreeMemory(GB // 10, 140 * GB, 141 * GB),
            "pinned staging memory takes 0.34 GB, but the host",
        ),
    ],
)
def test_refusals_have_numbers(kv: KVDemand, free: FreeMemory, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        plan_memory(LLAMA_8B, SIZES, kv, free, gpu_memory_fraction=0.9)
    assert caught.value.code == "out_of_memory"


SWAPPED = replace(LOCAL, swapped_lanes=4, num_stages=4, stored_bytes=GB // 4)


def test_lanes_that_are_swapped_have_room_on_the_host() -> None:
    """Two lanes' on the device, all lanes' on the host: as much as both have
    room for, beside what steps have stored."""
    plain, ample, short = (
        plan_memory(LLAMA_8B, SIZES, kv, free, gpu_memory_fraction=0.9)
        for kv, free in (
            (LOCAL, H200),
            (SWAPPED, replace(H200, host_bytes=8000 * GB)),
            (SWAPPED, replace(H200, host_bytes=162 * GB)),
        )
    )
    assert ample.kv_bytes == plain.kv_bytes - GB // 4
    assert ample.swapped_bytes == 2 * ample.kv_bytes
    # Half of the host's memory, of which each of four stages has a part.
    assert short.swapped_bytes == pytest.approx(20 * GB, abs=4)
    assert short.kv_bytes == pytest.approx(10 * GB, abs=2)
    assert "all lanes' KV on the host 20.00 GB" in str(short)
    asked = replace(SWAPPED, cache_bytes=21 * GB)
    with pytest.raises(
        ConfigError, match=r"of 42\.00 GB a stage, takes 168\.00 GB, but the host has"
    ):
        plan_memory(
            LLAMA_8B, SIZES, asked, replace(H200, host_bytes=162 * GB), gpu_memory_fraction=0.9
        )


def test_lanes_that_are_swapped_on_a_cpu_share_its_memory() -> None:
    kv = replace(SWAPPED, num_caches=4, stored_bytes=0)
    plan = plan_memory(LLAMA_8B, SIZES, kv, FreeMemory(100 * GB), gpu_memory_fraction=0.9)
    assert plan.swapped_bytes == pytest.approx(2 * plan.kv_bytes, abs=2)
    left = 100 * GB - plan.weights_bytes - plan.activation_bytes
    assert 4 * (plan.kv_bytes + plan.swapped_bytes) == pytest.approx(left / 2, rel=1e-6)


def test_there_is_room_for_what_forks_copy() -> None:
    """Each of a lane's 32 sequences may have to send its own copy of all but
    one of a block's tokens, beside what the step computes."""
    free = FreeMemory(8000 * GB, 140 * GB, 141 * GB)
    asked = {"device": "cuda", "kv_placement": "swap", "pp": 4}
    configs = [
        EngineConfig.of("llama-8b", max_num_sequences=128, block_size=block_size, **asked)
        for block_size in (16, 256)
    ]
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
    ):
        small, large = (resolve(config, LLAMA_8B, num_cores=8, free=free) for config in configs)
    token_bytes = 32 * 2 * 8 * 128 * 2
    assert small.memory.kv_bytes - large.memory.kv_bytes == pytest.approx(
        32 * 240 * token_bytes, abs=4
    )


def test_what_a_user_meets() -> None:
    config = EngineConfig.of("llama-8b", r_workers=2)
    resolved = resolve(config, LLAMA_8B, num_cores=8, free=FreeMemory(40 * GB))
    assert resolved.memory.kv_bytes < 12 * GB
    with pytest.raises(ConfigError, match="llama-8b"):
        resolve(config, LLAMA_8B, num_cores=8, free=FreeMemory(12 * GB))


def test_lanes_that_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that may be added later are planned for; where memory is short there will be fewer."""

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")

    def resolved(device_gb: float, **options: object) -> ResolvedConfig:
        config = EngineConfig.of("llama-8b", **options)
        free = FreeMemory(100 * GB, int(device_gb * GB), int(device_gb * GB))
        return resolve(config, LLAMA_8B, num_cores=8, free=free)

    ample = resolved(141)
    assert (ample.schedule.num_lanes, ample.lanes.most, ample.lanes.adapt) == (
        2,
        MAX_AUTO_LANES,
        True,
    )
    asked = resolved(141, lanes=2)
    assert (asked.lanes.most, asked.lanes.adapt) == (2, False)
    assert ample.memory.staging_bytes == 4 * asked.memory.staging_bytes
    # One lane draws twice as many tokens at once.
    assert ample.memory.activation_bytes > asked.memory.activation_bytes
    most = [resolved(gb / 20, gpu_memory_fraction=1.0).lanes.most for gb in range(400, 369, -1)]
    assert (
        most == sorted(most, reverse=True)
        and most[0] == MAX_AUTO_LANES
        and most[-1] <= 2
        and len(set(most)) > 4
    )
    with pytest.raises(ConfigError, match=r"the GPU .* has"):
        resolved(17)


def test_graphs_are_planned_for() -> None:
    sizes = replace(SIZES, num_graphs=2310, graph_rows=512)
    plain, graphs = (
        plan_memory(LLAMA_8B, one, LOCAL, H200, gpu_memory_fraction=0.9) for one in (SIZES, sizes)
    )
    assert graphs.graph_bytes > 2310 * GRAPH_BYTES and plain.graph_bytes == 0
    assert plain.kv_bytes - graphs.kv_bytes == graphs.graph_bytes
    assert "CUDA graphs 0." in str(graphs) and "CUDA graphs" not in str(plain)


def test_graphs_take_more_with_an_old_driver() -> None:
    """Before R550 each kernel in a graph takes 64 KiB: a whole step of 32 layers 20 MB."""
    sizes = replace(SIZES, num_graphs=35, num_kernels=35 * 32 * 11, graph_rows=512)
    planned = [
        plan_memory(
            LLAMA_8B, sizes, LOCAL, replace(H200, graph_node_bytes=node), gpu_memory_fraction=0.9
        ).graph_bytes
        for node in (0, NODE_BYTES, OLD_NODE_BYTES)
    ]
    assert planned == sorted(planned)
    assert planned[2] - planned[0] == 35 * 32 * 11 * OLD_NODE_BYTES - 35 * GRAPH_BYTES
    assert replace(H200, graph_node_bytes=7).share(2).graph_node_bytes == 7


def test_stages_with_a_gpu_each_have_their_own_weights_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that all stages share has them all."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = EngineConfig.of("m", pp=4, device="cuda", max_model_len=4096)

    def weights_bytes(num_gpus: int) -> int:
        monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
        return resolve(config, LLAMA_8B, num_cores=8, free=H200).memory.weights_bytes

    shared, alone = weights_bytes(1), weights_bytes(4)
    assert shared == pytest.approx(16.06 * GB, rel=0.01)
    assert shared / 5 < alone < shared / 2  # a quarter of the layers, embeddings or the head
