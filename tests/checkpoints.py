"""Small random checkpoints of every model family, and transformers as the oracle of what they say.

Shapes are odd on purpose (head_dim that isn't hidden / heads, one or several KV heads, a prime
vocabulary). Weights are drawn wide enough that greedy text wanders instead of repeating one token,
and that two tokens are never nearly tied."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from examples import TRIES_ALL

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 211
_GQA = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GQA, "head_dim": 12}),
    "mistral": ("MistralConfig", {**_GQA, "head_dim": 20, "sliding_window": 9,
                                  "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {**_GQA}),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 20, "num_key_value_heads": 3}),
    "phi3": ("Phi3Config", {**_GQA}),
    "gemma2": ("Gemma2Config", {**_GQA, "head_dim": 20, "sliding_window": 7,
                                "query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0,
                                "final_logit_softcapping": 8.0}),
    "opt": ("OPTConfig", {"vocab_size": VOCAB, "hidden_size": 48, "ffn_dim": 80,
                          "num_hidden_layers": 3, "num_attention_heads": 6,
                          "max_position_embeddings": 200}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6,
                            "n_positions": 200, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXConfig", {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80,
                                   "num_hidden_layers": 3, "num_attention_heads": 4,
                                   "rotary_pct": 0.5, "max_position_embeddings": 512}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)
FEW_FAMILIES = FAMILIES if TRIES_ALL else ("llama", "gemma2", "bloom")
"""Where another test runs all families nearly the same way: rotary positions and shared KV
heads, windows in every other layer and capped logits, ALiBi."""

# With these seeds the default checkpoints' greedy text wanders, and no two tokens are nearly tied.
_SEEDS = {"mistral": 1, "qwen2": 1, "qwen3": 1, "phi3": 1, "gemma2": 30, "gpt2": 1, "bloom": 3}


def save_checkpoint(
    directory: Path, family: str, overrides: dict[str, Any], seed: int | None = None
) -> None:
    """A random checkpoint in the Hugging Face layout; the same arguments give the same weights."""
    config_class, defaults = _FAMILIES[family]
    # transformers changes the nested dicts that it is given.
    options = json.loads(json.dumps({**defaults, **overrides}))
    config = getattr(transformers, config_class)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(_SEEDS.get(family, 0) if seed is None else seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(family, name, parameter, generator)
    model.save_pretrained(directory)


# Standard deviations, as multiples of 1 / sqrt(row length), by parts of names.
# Sharp attention and loud positions make text depend on all of its past; a
# quiet last matrix keeps the MLP's mean from drowning everything else.
_GAINS = {
    3.0: ("q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "positions", "wpe"),
    1.0: ("embed", "wte", "fc2", "mlp.c_proj", "4h_to_h"),
}


def _draw(family: str, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if parameter.dim() == 1:
        is_norm_weight = name.endswith("weight")
        centre = 1.0 if is_norm_weight and family != "gemma2" else 0.0
        parameter.normal_(centre, 0.3 if is_norm_weight else 0.05, generator=generator)
        return
    gain = next(
        (gain for gain, parts in _GAINS.items() if any(part in name for part in parts)), 1.5
    )
    if family == "gemma2" and "embed" in name:
        gain = 0.2  # its embeddings are multiplied by sqrt(hidden)
    parameter.normal_(0.0, gain / max(parameter.shape[-1], 32) ** 0.5, generator=generator)


@dataclass(frozen=True)
class Oracle:
    """transformers' own model in float32 with its plainest attention, run on
    one sequence at a time, and on each only once."""

    model: Any
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab]"""
        logits: torch.Tensor = self._once(self._logits, tuple(tokens))
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """``num_tokens`` tokens after the prompt, EOS ignored, and the least
        lead of a chosen logit over the next."""
        tokens, lead = self._once(self._greedy, tuple(prompt), num_tokens)
        return list(tokens), lead

    def _once(self, answer: Callable[..., Any], *asked: Any) -> Any:
        key = (answer.__name__, *asked)
        if key not in self.answers:
            self.answers[key] = answer(*asked)
        return self.answers[key]

    @torch.inference_mode()
    def _logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    @torch.inference_mode()
    def _greedy(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], float]:
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, len(prompt) :].tolist()
        top = torch.cat(output.logits).topk(2, dim=-1).values  # [num_tokens, 2]
        return tokens, (top[:, 0] - top[:, 1]).min().item()


@functools.cache
def oracle(directory: Path, dtype: torch.dtype = torch.float32) -> Oracle:
    """The oracle of a checkpoint, which computes in ``dtype``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return Oracle(model.eval())


def prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of these lengths, without the first few ids, which are special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
