"""Train the demo model from nothing on the text that corpus.py makes up, and
export it in Hugging Face layout.

    python examples/model/tokenizer.py --out RUN/tokenizer python
    examples/model/train.py --run RUN --tokenizer RUN/tokenizer --export
    examples/model/checkpoint

Needs torch >= 2.9, transformers, tokenizers, safetensors. About an hour on two
CPU cores. Interrupted runs go on from ``RUN/state.safetensors``: the data of a
step depends on the step's number alone.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import attention
import torch
from corpus import Document, document
from packing import Row, pack
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizer import BOS_ID, EOS_ID, MAX_POSITIONS
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100


@dataclass(frozen=True)
class Stage:
    """A part of the training: documents up to a size, packed into rows of a length."""

    share: float
    max_size: int
    row_tokens: int


STAGES = (Stage(0.25, 1, 256), Stage(0.55, 3, 512), Stage(0.20, 3, 1024))
"""Short texts first: copying is learnt sooner where what is to be copied is near."""

TOKENS_PER_STEP = 4096
RECALL_WEIGHT = 3.0
"""Tokens that can be known from the text weigh more than those the corpus drew at random."""
MUON_LR = 5e-3
ADAM_LR = 3e-3
WARMUP_STEPS = 100


def model_config(vocab_size: int) -> LlamaConfig:
    """2.7 M parameters: 6 layers of 192, 6 query heads on 2 KV heads of 32."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def stage_of(step: int, num_steps: int) -> tuple[int, Stage]:
    """The stage of a step, and the stage's number."""
    done = 0.0
    for number, stage in enumerate(STAGES):
        done += stage.share
        if step < round(done * num_steps):
            return number, stage
    return len(STAGES) - 1, STAGES[-1]


def documents_of(stage_number: int, stage: Stage, step: int) -> Iterator[Document]:
    """Endless training documents that no other step sees."""
    seed, index = stage_number, step * 1_000_000
    while True:
        yield document("train", seed, index, index % (stage.max_size + 1))
        index += 1


def batch_of(tokenizer: Tokenizer, step: int, num_steps: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] and whether each must be recalled [B, T]."""
    number, stage = stage_of(step, num_steps)
    rows: list[Row] = pack(
        tokenizer,
        documents_of(number, stage, step),
        TOKENS_PER_STEP // stage.row_tokens,
        stage.row_tokens,
    )
    return torch.tensor([row.token_ids for row in rows]), torch.tensor(
        [row.recalled for row in rows]
    )


def learning_rate(step: int, num_steps: int) -> float:
    """Share of the peak: linear warm-up, then a cosine down to 2 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices, lr=MUON_LR, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    """Weighted; a scalar with gradient."""
    plain_loss: float
    """Mean nats a token."""
    recall: float
    """Share of recall tokens that are the likeliest token, the text before them given."""


def run_step(model: LlamaForCausalLM, tokens: Tensor, recalled: Tensor) -> StepResult:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [B, T-1, V]
    logits = logits.float().flatten(0, 1)
    targets, marked = tokens[:, 1:].flatten(), recalled[:, 1:].flatten()
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = torch.where(marked, RECALL_WEIGHT, 1.0)
    right = (logits.detach().argmax(-1) == targets)[marked].float().mean().item()
    return StepResult(
        (losses * weights).sum() / weights.sum(), losses.detach().mean().item(), right
    )


def save_state(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    """Weights, optimizer moments and step; written aside and renamed, so that a
    kill leaves the older one whole."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            for name, value in moments.items():
                tensors[f"optimizer.{number}.{index}.{name}"] = torch.as_tensor(value)
    aside = path.with_suffix(".new")
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, aside, metadata={"step": str(step)}
    )
    aside.replace(path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore what ``save_state`` wrote; returns the step to go on with."""
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["step"])
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(file.get_tensor(f"model.{name}"))
        for number, optimizer in enumerate(optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            prefix = f"optimizer.{number}."
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key.startswith(prefix):
                    index, name = key.removeprefix(prefix).split(".")
                    state.setdefault(int(index), {})[name] = file.get_tensor(key)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return step


def export(model: LlamaForCausalLM, tokenizer_directory: Path, directory: Path) -> None:
    """Write the checkpoint in bfloat16, with a config that old and new readers understand."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "hidden_act": "silu", "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "initializer_range": 0.02, "use_cache": True, "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer_directory / name, directory / name)


def train(run: Path, tokenizer: Tokenizer, num_steps: int, save_every_s: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config(tokenizer.get_vocab_size()))
    model.set_attn_implementation(attention.NAME)
    optimizers = make_optimizers(model)
    state_path = run / "state.safetensors"
    first = load_state(state_path, model, optimizers) if state_path.exists() else 0
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, steps {first} to {num_steps}", flush=True)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    saved = reported = time.monotonic()
    window: list[StepResult] = []
    for step in range(first, num_steps):
        result = run_step(model, *batch_of(tokenizer, step, num_steps))
        torch.autograd.backward(result.loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(step, num_steps)
            optimizer.step()
            optimizer.zero_grad()
        window.append(result)
        if (step + 1) % 50 == 0:
            rate = len(window) * TOKENS_PER_STEP / (time.monotonic() - reported)
            loss = sum(r.plain_loss for r in window) / len(window)
            recall = sum(r.recall for r in window) / len(window)
            print(
                f"step {step + 1}  loss {loss:.4f}  recall {recall:.4f}  {rate:.0f} tok/s",
                flush=True,
            )
            reported, window = time.monotonic(), []
        if time.monotonic() - saved > save_every_s:
            save_state(state_path, model, optimizers, step + 1)
            saved = time.monotonic()
    save_state(state_path, model, optimizers, num_steps)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument(
        "--run", type=Path, required=True, help="where the state of the training is kept"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="directory with tokenizer.json"
    )
    parser.add_argument("--export", type=Path, help="write the checkpoint here at the end")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every-s", type=float, default=120.0)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    model = train(options.run, tokenizer, options.steps, options.save_every_s)
    if options.export:
        export(model, options.tokenizer, options.export)


if __name__ == "__main__":
    main()
