"""Attention over blocks as production runs it, on a GPU: 16 bits on tensor cores, int8 KV, all
head sizes, groups and block sizes, contexts of one token to many pieces, beside float64; and
decode steps as one graph at an 8B model's shapes."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from attention_cases import MOST_OFF, CachedSequences, Case, cases

from fastdecode.core.dtype import DType
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.spec import KVSpec
from sworker.graphs import StepGraphs
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import forward
from sworker.paged import BlockKernels, PagedKV, PagedStep
from sworker.whole import WholeSteps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"
    ),
]
CUDA = torch.device("cuda", 0)
CONTEXTS = (1, 63, 64, 65, 2047, 20_000)
CHUNKS = ((64, 9), (2047, 130), (1, 300), (20_000, 17))
"""Cached tokens, and new ones."""


def of_case(case: Case) -> tuple[torch.dtype, bool, int, int]:
    return case.dtype, case.is_int8, case.head_dim, case.group_size


TABLE = {
    key: list(group) for key, group in groupby(cases((torch.bfloat16, torch.float16)), of_case)
}


@pytest.fixture
def kernels() -> BlockKernels:
    pytest.importorskip("triton")
    from sworker.kernels import paged_triton

    found: BlockKernels = paged_triton
    return found


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_decoded_tokens(key: tuple[torch.dtype, bool, int, int], kernels: BlockKernels) -> None:
    for case in TABLE[key]:
        step = CachedSequences(case, [n - 1 for n in CONTEXTS], [1] * len(CONTEXTS), CUDA, kernels)
        assert step.error(step.decoded()) < MOST_OFF[case.dtype], str(case)


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_later_chunks(key: tuple[torch.dtype, bool, int, int], kernels: BlockKernels) -> None:
    pasts, news = zip(*CHUNKS, strict=True)
    for case in TABLE[key]:
        if case.block_size == 16:  # slots are slots, whatever blocks they are of
            step = CachedSequences(case, pasts, news, CUDA, kernels)
            assert step.error(step.later()) < MOST_OFF[case.dtype], str(case)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [DType.BFLOAT16, DType.INT8], ids=str)
@torch.inference_mode()
def test_a_step_as_one_graph(kv_dtype: DType, kernels: BlockKernels) -> None:
    """bfloat16, 8B's shapes, four layers: as layer by layer, with other lengths than those that
    the graph was captured with, one of them long."""
    spec = read_model_spec(CONFIG, name="8b")
    model = random_model(spec, device=CUDA, dtype=torch.bfloat16)
    fuse(model, CUDA)
    num_rows, most = 64, 4096
    width = most // 64
    kv = KVSpec(4, spec.num_kv_heads, spec.head_dim, kv_dtype, 64)
    caches = [PagedKV(kv, spec.attention, num_rows * width, CUDA, kernels) for _ in range(2)]
    for cache in caches:
        torch.manual_seed(1)
        if cache.scales is None:
            cache.pool.normal_()
        else:
            cache.pool.random_(-127, 128)
            cache.scales.fill_(0.01)
    graphs = StepGraphs(model, CUDA, capture=True)
    whole = WholeSteps(graphs, caches[0], most)
    whole.prepare([num_rows])
    rng = np.random.default_rng(2)
    tables = rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
    for lens in (
        np.full(num_rows, 1000),
        rng.integers(1, 300, num_rows),
        np.array([most] + [9] * 63),
    ):
        step = decode_step(lens.astype(np.int32), tables)
        rows = torch.from_numpy(np.stack((rng.integers(0, spec.vocab_size, num_rows), lens - 1)))
        found = whole.run(0, rows, step).float()
        ids, positions = rows.to(CUDA)
        expected = forward(
            model, ids, positions,
            lambda layer, q, k, v, step=step: caches[1].attend(layer, q, k, v, step),
        ).float()  # fmt: skip
        assert float((found - expected).abs().max() / expected.abs().max()) < 2e-2


def decode_step(lens: np.ndarray, tables: np.ndarray) -> PagedStep:
    last = lens.astype(np.int64) - 1
    slots = tables[np.arange(len(lens)), last // 64].astype(np.int64) * 64 + last % 64
    return PagedStep(
        torch.from_numpy(slots).to(CUDA), torch.from_numpy(tables).to(CUDA),
        torch.from_numpy(lens).to(CUDA), lens, (), slice(len(lens), len(lens)), (),
    )  # fmt: skip
