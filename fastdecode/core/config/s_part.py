"""Options of the S-part."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastdecode.core.config.options import check_options, option
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given

MAX_TP = 64
MAX_PP = 32
CUDA_GRAPHS = ("auto", "on", "off")
LOAD_FORMATS = ("safetensors", "random")


@dataclass(frozen=True)
class SPart:
    """The S-part: every layer that has weights. None, and auto, mean "decide for me"."""

    dtype: str = option(
        "auto",
        "dtype of weights and activations: float32, bfloat16, float16; auto: the checkpoint's",
        metavar="DTYPE",
        common=True,
    )
    load_format: str = option(
        "safetensors",
        "where weights come from: safetensors (the model directory's files), or random (made on "
        "the device by a fixed seed: the directory needs only config.json; for measurements)",
        choices=LOAD_FORMATS,
        metavar="FORMAT",
    )
    device: str = option(
        "auto",
        "where the S-part runs: cpu, cuda, cuda:1, ...; auto: cuda if torch sees a GPU, else cpu",
        metavar="DEVICE",
        common=True,
    )
    cuda_graphs: str = option(
        "auto",
        "capture S-steps as CUDA graphs: on, off; auto: on a CUDA device, with one S-worker",
        choices=CUDA_GRAPHS,
        metavar="MODE",
    )
    tp: int = option(
        1,
        "tensor parallelism: S-workers that share every layer, the first ranks of an MPI job",
        low=1,
        high=MAX_TP,
        common=True,
    )
    ep: int = option(
        1,
        "expert parallelism: into how many parts the S-workers of --tp divide the experts of a "
        "mixture, whole ones; 1: each has a share of every expert",
        low=1,
        high=MAX_TP,
    )
    pp: int = option(
        1,
        "pipeline stages: S-workers with some of the layers each, and R-workers of their own",
        low=1,
        high=MAX_PP,
        common=True,
    )
    pp_layers: str | None = option(
        None,
        "layers of each stage, as N,N,...; default: balanced by the weights that a step reads",
        metavar="N,N,...",
    )
    prompt_pp: int = option(
        0,
        "stages of an instance that runs prompts (--instances prefill,decode, if none are given); "
        "one with the stages of --pp fetches their keys and values. With 0, those of --pp run both",
        low=0,
        high=MAX_PP,
    )
    gpu_memory_fraction: float = option(
        0.9,
        "share of a GPU's memory that may be in use, other processes included",
        low=0.01,
        high=1.0,
        metavar="F",
    )
    max_model_len: int | None = option(
        None,
        "most tokens of prompt and completion together; default: the model's limit",
        low=1,
        high=1 << 30,
        common=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.dtype != "auto":
            DType.parse(self.dtype, or_auto=True)
        if self.tp % self.ep:
            raise ConfigError(
                Given("ep", self.ep),
                " must divide the number of S-workers that act as one: choose ",
                Given("tp", self.ep),
                " or a multiple of it",
            )
        if self.pp_layers is not None:
            self._check_layers(self.pp_layers)

    def _check_layers(self, told: str) -> None:
        if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", told):
            raise ConfigError(
                Given("pp_layers", told), " is not numbers from 1 on, one a stage, as in 10,12,12"
            )
        if len(told.split(",")) != self.pp:
            raise ConfigError(
                Given("pp_layers", told), " is not one number a stage: there are ",
                Given("pp", self.pp), " stages",
            )  # fmt: skip

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """Of each stage; None: decide for me."""
        return None if self.pp_layers is None else tuple(map(int, self.pp_layers.split(",")))
