"""Every family says what transformers says: logits within 1e-4; and in 16 bits what rounding
explains. Rotary frequencies equal transformers', and their table rounds once.

Batches are ragged; transformers sees each sequence alone, so a token that leaked between sequences
would show."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attention_cases import ReferenceAttention
from checkpoints import FEW_FAMILIES, oracle, prompts

from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from sworker.load.weights import load_model
from sworker.model.rope import RotaryTable, frequencies
from sworker.model.skeleton import forward

NUM_TOKENS = 72
LENGTHS = (5, 23, 1)  # the longest is longer than every window

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_SHORT = [1.0, 1.1, 1.3, 1.8]
_LONG = [1.5, 2.0, 4.0, 9.0]
_LONGROPE = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha-tied-biases": {
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-mqa-linear": {
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "llama-llama3": {"rope_scaling": _LLAMA3},
    "llama-yarn": {"rope_scaling": _YARN},
    "llama-yarn-mscale": {
        "rope_scaling": {
            **_YARN,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
            "beta_fast": 8.0,
        }
    },
    # Decoding runs beyond the original 60 tokens, where the base grows with every token.
    "llama-dynamic": {
        "max_position_embeddings": 60,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "mistral": {},
    "mistral-no-window": {"sliding_window": None, "num_key_value_heads": 3},
    "qwen2": {},
    "qwen2-windows-tied": {
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "qwen3": {},
    "qwen3-layer-types": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_bias": True,
    },
    "phi3": {},
    "phi3-window-partial": {
        "sliding_window": 9,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "phi3-longrope": {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 100},
    "gemma2": {},
    "gemma2-mqa-no-caps": {
        "num_key_value_heads": 1,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "opt": {},
    "opt-post-norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt-bare": {
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "activation_function": "gelu",
    },
    "gpt2": {},
    "gpt2-untied-scaled": {
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
        "n_inner": 100,
    },
    "gpt_neox": {},
    "gpt_neox-serial-odd": {
        "use_parallel_residual": False,
        "rotary_pct": 0.25,
        "hidden_act": "gelu_fast",
        "tie_word_embeddings": True,
    },
    "bloom": {},
    "bloom-untied": {"tie_word_embeddings": False, "n_head": 8},
}
"""By name, which begins with the family's."""


def made(tiny_checkpoint: Callable[..., Path], name: str) -> Path:
    return tiny_checkpoint(name.partition("-")[0], **VARIANTS[name])


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    return made(tiny_checkpoint, request.param)


@torch.inference_mode()
def test_logits_of_a_ragged_batch(checkpoint: Path) -> None:
    spec, model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    texts = prompts((31, 1, 58, 12))
    attend = ReferenceAttention(spec.attention)
    positions = attend.begin_step(range(len(texts)), [len(text) for text in texts])
    x = forward(model, torch.tensor([*chain(*texts)]), positions, attend)
    for text, ours in zip(texts, model.logits(x).split([len(text) for text in texts]), strict=True):
        torch.testing.assert_close(ours, oracle(checkpoint).logits(text), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_greedy_text_beyond_the_length_from_which_its_base_grows(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    checkpoint = made(tiny_checkpoint, "llama-dynamic")
    spec, model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    texts = prompts(LENGTHS, seed=1)
    attend = ReferenceAttention(spec.attention)
    ids = range(len(texts))
    fed, outputs = texts, [list[int]() for _ in texts]
    for _ in range(NUM_TOKENS):
        counts = [len(tokens) for tokens in fed]
        positions = attend.begin_step(ids, counts)
        x = forward(model, torch.tensor([*chain(*fed)]), positions, attend)
        last = torch.tensor(counts).cumsum(0) - 1
        drawn = model.logits(x[last]).argmax(-1).tolist()
        fed = [[token] for token in drawn]
        for output, token in zip(outputs, drawn, strict=True):
            output.append(token)
    for text, output in zip(texts, outputs, strict=True):
        expected, lead = oracle(checkpoint).greedy(text, NUM_TOKENS)
        assert lead > 1e-3, "two tokens are nearly tied: this checkpoint can't judge; draw another"
        assert len(set(expected)) > 8, (
            "the text is nearly constant: this checkpoint can't judge; draw another"
        )
        assert output == expected


@torch.inference_mode()
def test_longrope_beyond_the_original_length(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = made(tiny_checkpoint, "phi3-longrope")
    spec, model = load_model(checkpoint, device="cpu", dtype=torch.float32, max_model_len=300)
    (text,) = prompts((130,))
    attend = ReferenceAttention(spec.attention)
    positions = attend.begin_step([0], [len(text)])
    logits = model.logits(forward(model, torch.tensor(text), positions, attend))
    torch.testing.assert_close(logits, oracle(checkpoint).logits(text), atol=1e-4, rtol=0)


_SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 1, "intermediate_size": 64,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


def _read(scaling: dict[str, Any]) -> ModelSpec:
    return read_model_spec({**_SIZES, "rope_scaling": scaling}, name="demo")


def test_attention_factor_is_transformers() -> None:
    """The one option that no checkpoint of ``test_model_exact.py`` has."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
               "attention_factor": 0.7}  # fmt: skip
    options = {key: value for key, value in _SIZES.items() if key != "architectures"}
    config = transformers.LlamaConfig(**options, rope_scaling=dict(scaling))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = _read(scaling).ropes[0]
    assert rope is not None
    torch.testing.assert_close(
        frequencies(rope, torch.arange(4.0)), theirs.inv_freq, rtol=1e-6, atol=0
    )
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_table_turns_in_float32_and_rounds_once() -> None:
    rope = _read({"rope_type": "default"}).ropes[0]
    assert rope is not None
    table = RotaryTable(rope, 64)
    table.fill(torch.device("cpu"))
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 63], dtype=torch.int32)
    exact = table(x.bfloat16().float(), positions)
    assert torch.equal(table(x.bfloat16(), positions), exact.bfloat16())
    # it only turns
    torch.testing.assert_close(exact.norm(dim=-1), x.bfloat16().float().norm(dim=-1))
    assert torch.equal(exact[0], x.bfloat16().float()[0]), "position 0 doesn't turn"


Make = Callable[..., Path]


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_16_bit_floats(family: str, dtype: torch.dtype, tiny_checkpoint: Make) -> None:
    """Activations stay in the model's dtype, and differ from float32 by no more
    than its rounding explains."""
    path = tiny_checkpoint(family)
    spec, wide = load_model(path, device="cpu", dtype=torch.float32)
    _, narrow = load_model(path, device="cpu", dtype=dtype)
    for parameter, exact in zip(narrow.parameters(), wide.parameters(), strict=True):
        exact.copy_(parameter)  # the weights' own rounding isn't the question
    (text,) = prompts((9,))
    tokens, positions = torch.tensor(text), torch.arange(9, dtype=torch.int32)
    x, y = wide.embed(tokens, positions), narrow.embed(tokens, positions)
    _assert_rounded(y, x, dtype)
    for a, b in zip(wide.layers, narrow.layers, strict=True):
        _, qkv = a.pre_attention(x, None, positions)
        y, narrow_qkv = b.pre_attention(x.to(dtype), None, positions)
        for exact, rounded in zip(qkv, narrow_qkv, strict=True):
            _assert_rounded(rounded, exact, dtype)
        x, y = _sum(a.post_attention(x, qkv[0])), _sum(b.post_attention(y, qkv[0].to(dtype)))
        _assert_rounded(y, x, dtype)
    assert narrow.logits(y).dtype == torch.float32
    assert narrow.logits(y).shape == (9, spec.vocab_size)


def _sum(halves: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """The next layer's input."""
    x, added = halves
    return x if added is None else x + added


def _assert_rounded(rounded: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert rounded.dtype == dtype
    error = (rounded.float() - exact).norm() / exact.norm()
    assert error < 6 * torch.finfo(dtype).eps
