"""Configs of models in the styles in which they were published, and how many
parameters they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    name: (each["config"], each["num_parameters"])
    for name, each in json.loads(
        (Path(__file__).parent / "data" / "published_configs.json").read_text()
    ).items()
}
(
    LLAMA2_7B, LLAMA31_8B, MISTRAL_7B, QWEN25_05B, QWEN3_06B, PHI3_MINI, GEMMA2_2B, OPT_350M,
    GPT2, PYTHIA_70M, BLOOM_560M,
) = (config for config, _ in PUBLISHED.values())  # fmt: skip
