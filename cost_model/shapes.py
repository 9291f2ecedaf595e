"""Well-known models by name, as the ``config.json`` that their checkpoints
carry, so that nobody needs to have one.

Parameter counts, KV bytes and wire bytes all come from ``read_model_spec``, as
for a model on disk. GPT-3 was never released; its shapes (arXiv 2005.14165,
table 2.1) are written as GPT-2 configs, the 13B one with the 40 heads of 128
that its stated head size implies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_model.hardware import find_name
from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec

MAX_CONFIG_BYTES = 1 << 20


def _llama(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
        **more,
    }


def _llama3(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    more = {
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    return _llama(hidden, mlp, layers, heads, 8, **more)


def _qwen25(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    more = {
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
    }
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return _llama(hidden, mlp, layers, heads, kv_heads, **more) | own


def _mistral() -> dict[str, Any]:
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    return (
        _llama(4096, 14336, 32, 32, 8, max_position_embeddings=32768, torch_dtype="bfloat16") | own
    )


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
        "do_layer_norm_before": True,
        "torch_dtype": "float16",
    }


def _gpt3(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 50257,
        "torch_dtype": "float16",
    }


def _bloom() -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
        "seq_length": 2048,
        "torch_dtype": "bfloat16",
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2 7B": _llama(4096, 11008, 32, 32, 32),
    "Llama-2 13B": _llama(5120, 13824, 40, 40, 40),
    "Llama-2 70B": _llama(8192, 28672, 80, 64, 8),
    "Llama-3 8B": _llama3(4096, 14336, 32, 32),
    "Llama-3 70B": _llama3(8192, 28672, 80, 64),
    "Qwen2.5 7B": _qwen25(3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5 72B": _qwen25(8192, 29568, 80, 64, 8, 152064),
    "Mistral 7B": _mistral(),
    "OPT 13B": _opt(5120, 40, 40),
    "OPT 30B": _opt(7168, 48, 56),
    "OPT 66B": _opt(9216, 64, 72),
    "OPT 175B": _opt(12288, 96, 96),
    "BLOOM 176B": _bloom(),
    "GPT-3 6.7B": _gpt3(4096, 32, 32),
    "GPT-3 13B": _gpt3(5120, 40, 40),
    "GPT-3 175B": _gpt3(12288, 96, 96),
}


def model_named(name: str) -> ModelSpec:
    """The spec of a built-in model.

    Raises:
        ConfigError: there is none of this name; the message suggests the
            nearest.
    """
    known = find_name(name, {own: own for own in CONFIGS}, option="model")
    return read_model_spec(CONFIGS[known], name=known)


def read_model(model: str) -> ModelSpec:
    """The spec of a model directory, a ``config.json`` or a built-in name,
    whichever ``model`` is.

    Raises:
        ConfigError: it is none of these, or the file can't be read.
        ModelError: the config isn't one of a model that we implement.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if path.name == "config.json" or path.suffix == ".json":
            raise ConfigError(f"--model {model}: there is no file {path}", code="unknown_model")
        return model_named(model)
    quantised = path.parent / "hf_quant_config.json"
    return read_model_spec(
        _read(path, model),
        name=path.parent.name or model,
        hf_quant_config=_read(quantised, model) if quantised.is_file() else None,
    )


def _read(file: Path, model: str) -> Mapping[str, object]:
    return read_object(
        file,
        most_bytes=MAX_CONFIG_BYTES,
        refuse=lambda why: ConfigError(f"--model {model}: {file}: {why}"),
    )
