"""Known architectures that are refused, each with its feature that is missing here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.errors import CheckpointError, UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader


@dataclass(frozen=True)
class Refused:
    """Architectures with one thing that isn't implemented."""

    what: str
    models: str  # their common names
    architectures: tuple[str, ...]


REFUSED = (
    Refused(
        "attention over a compressed latent KV cache (MLA)",
        "DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash, Mistral-4",
        (
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration",
            "Glm4MoeLiteForCausalLM", "Mistral4ForCausalLM", "YoutuForCausalLM",
            "LongcatFlashForCausalLM", "MiniCPM3ForCausalLM",
        ),
    ),
    Refused(
        "MLA with an indexer that chooses the keys (sparse attention)", "DeepSeek-V3.2, GLM-5",
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"),
    ),
    Refused("attention over compressed KV", "DeepSeek-V4", ("DeepseekV4ForCausalLM",)),
    Refused(
        "block-sparse attention", "MiniMax-M3",
        (
            "MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
        ),
    ),
    Refused(
        "recurrent layers (gated delta rule)",
        "Qwen3-Next, Qwen3.5, 3.6, 3.8, Kimi-Linear, Kimi-K3",
        (
            "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "OlmoHybridForCausalLM",
            "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration",
        ),
    ),
    Refused(
        "recurrent layers (Mamba, RWKV, convolutions, linear attention)",
        "Nemotron-H, Nemotron-3, Jamba, Falcon-H1, LFM2, MiniMax-01, Zamba",
        (
            "NemotronHForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM",
            "FalconMambaForCausalLM", "JambaForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM",
            "GraniteMoeHybridForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM",
            "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
            "MiniMaxForCausalLM", "MiniMaxText01ForCausalLM",
        ),
    ),
    Refused(
        "KV heads of two sizes", "Gemma-4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    ),
    Refused(
        "KV that layers share, and inputs of each layer's own", "Gemma-3n",
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    ),
    Refused("keys and values of different sizes", "MiMo-V2-Flash", ("MiMoV2FlashForCausalLM",)),
    Refused(
        "layers that differ in shape (found by a search)", "Llama-3.3-Nemotron-Super",
        ("DeciLMForCausalLM", "NemotronNASForCausalLM"),
    ),
    Refused(
        "cross-attention to images", "Llama-3.2 Vision",
        ("MllamaForConditionalGeneration", "MllamaForCausalLM"),
    ),
    Refused("a router that isn't a function (sparsemixer)", "Phi-3.5-MoE", ("PhimoeForCausalLM",)),
    Refused(
        "an encoder-decoder", "T5, BART, Whisper",
        (
            "T5ForConditionalGeneration", "BartForConditionalGeneration",
            "WhisperForConditionalGeneration",
        ),
    ),
)  # fmt: skip


def refuse_unknown(
    reader: ConfigReader, supported: Sequence[str]
) -> UnsupportedModelError | CheckpointError:
    """Say what the config's architecture is and why it can't run."""
    architectures = reader.strings("architectures")
    found = architectures[0] if architectures else reader.fields.get("model_type")
    if not found:
        return reader.refuse(
            "architectures", None, f"a list that starts with one of {', '.join(supported)}"
        )
    why = next((row.what for row in REFUSED if found in row.architectures), None)
    reason = "" if why is None else f" It has {why}, which isn't implemented."
    return UnsupportedModelError(
        f"{reader.where}: the architecture {found!r} is not supported.{reason} Supported are "
        f"{', '.join(supported)}. Use a checkpoint of one of these."
    )
