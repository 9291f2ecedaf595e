"""The planner's question: a model, hardware, a workload, and promises to keep. Checked here."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cost_model.hardware import Cpu, Gpu, Nic, parse_toml
from cost_model.predict import MAX_LANES, System
from cost_model.stages import MPI, LinkModel, RPartModel, SPartModel, Transport
from cost_model.workload import FP8, TokenCosts, WeightBytes, Workload
from fastdecode.core.config.options import check_options, duration, option
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.json_file import read_object
from fastdecode.core.measurement import NetProfile, RProfile, SProfile
from fastdecode.core.model.spec import ModelSpec

MAX_GPUS = 1024
MAX_SOCKETS = 100_000
MAX_NICS = 64
MAX_BATCH = 1 << 20
MAX_REQUESTS = 10**12
MAX_SECONDS = 30 * 24 * 3600.0
MAX_PRICES_BYTES = 1 << 20

PriceTable: TypeAlias = Annotated[
    dict[str, Annotated[float, Meta(gt=0, lt=1e6)]], Meta(min_length=1)
]
GpuSource: TypeAlias = Gpu | SProfile
CpuSource: TypeAlias = Cpu | RProfile
NicSource: TypeAlias = Nic | NetProfile


@dataclass(frozen=True)
class Setup:
    spec: ModelSpec
    dtype: DType
    kv_dtype: str
    gpu: GpuSource
    cpu: CpuSource
    nic: NicSource
    workload: Workload
    num_gpus: int = option(1, "GPUs that share every layer", low=1, high=MAX_GPUS, flag="--gpus")
    num_nics: int = option(1, "ports of the S-worker", low=1, high=MAX_NICS, flag="--nics")
    transport: Transport = MPI
    dram_gb: float | None = option(
        None, "memory of a socket; default: the data file's", low=0.25, high=65536, metavar="GB",
        unit="GB",
    )  # fmt: skip
    keeps_quantised: bool = False
    """Weights stay in memory as the checkpoint holds them, which FastDecode doesn't do yet."""
    has_ends: bool = True
    """False for a pipeline's stage after the first, without embedding and head."""
    is_fp8: bool = False
    """Weights of layers take a byte, and the GPU computes in FP8 where it can."""
    is_without_gpu: bool = False
    """The S-worker is a socket, too: ``gpu`` is what its CPU computes."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.spec.num_q_heads % self.num_gpus:
            heads = f"the {self.spec.num_q_heads} query heads of {self.spec.name}"
            few = " or ".join(map(str, split_counts(self.spec, self.num_gpus)[:2]))
            why = f": {heads} can't be split evenly over them; try {few}"
            raise ConfigError(Given("num_gpus", self.num_gpus), why)
        if isinstance(self.gpu, SProfile) and self.num_gpus != 1:
            why = " profile: the profile is of all the GPUs it was measured on"
            raise ConfigError(Given("num_gpus"), " with a measured ", Given("gpu"), why)
        if self.workload.peak_context_tokens > self.spec.max_model_len:
            raise ConfigError(
                f"{self.spec.name} serves at most {self.spec.max_model_len} tokens a sequence; "
                f"prompt and output of {self.workload.peak_context_tokens} are too long for it"
            )

    @property
    def s_part_word(self) -> str:
        """What the S-worker computes on, for people."""
        return "S-worker's CPU" if self.is_without_gpu else "GPU"

    @property
    def costs(self) -> TokenCosts:
        kept = WeightBytes.kept(self.spec, self.dtype) if self.keeps_quantised else None
        if self.is_fp8:
            kept = WeightBytes(1.0, 1.0, self.dtype.size_bytes)
        return TokenCosts(self.spec, self.dtype, self.kv_dtype, kept, self.has_ends)

    def fp8_rival(self) -> Setup:
        """Return the same GPUs with weights and KV in FP8, as engines without offload serve them.
        GPUs without FP8 units compute in 16 bits."""
        gpu, cpu = self.gpu, self.cpu
        if isinstance(cpu, RProfile):  # it fits the plan, which needs no R-part
            cpu = msgspec.structs.replace(cpu, kv_dtype=FP8)
        if isinstance(gpu, Gpu) and gpu.fp8_flops_per_s is not None:
            fp8 = gpu.fp8_flops_per_s
            gpu = replace(gpu, fp16_flops_per_s=fp8, bf16_flops_per_s=fp8)
        return replace(self, gpu=gpu, cpu=cpu, kv_dtype=FP8, is_fp8=True)

    def system(self) -> System:
        """Raises ConfigError where a profile doesn't fit the model."""
        costs = self.costs
        gpu, cpu, nic = self.gpu, self.cpu, self.nic
        if isinstance(gpu, Gpu):
            s = SPartModel.from_gpu(gpu, self.num_gpus, costs)
        else:
            s = SPartModel.from_profile(gpu, costs)
        if isinstance(cpu, Cpu):
            dram_bytes = None if self.dram_gb is None else int(self.dram_gb * 1e9)
            r = RPartModel.from_cpu(cpu, costs, dram_bytes)
        else:
            r = RPartModel.from_profile(cpu, costs)
        if self.is_without_gpu:  # a CPU attends as the R-workers' do
            read = costs.kv_layer_bytes / r.token_s
            s = replace(s, kv_read_bytes_per_s=read, host_link_bytes_per_s=None)
        link = LinkModel.from_nic(nic) if isinstance(nic, Nic) else LinkModel.from_profile(nic)
        return System(s, r, link, self.num_nics, costs, self.workload, self.transport)


def _requests(text: str) -> int:
    """Read ``1000000`` or ``1e6``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value.is_integer() and value <= MAX_REQUESTS):
        limits = f"from 1 to {MAX_REQUESTS}, such as 1000000 or 1e6"
        raise ValueError(f"{text} is not a whole number {limits}")
    return int(value)


@dataclass(frozen=True)
class Goal:
    latency_s: float | None = option(
        None, "most time of a whole sequence: seconds, or like 30s, 800ms", flag="--latency",
        read=duration, low=1e-6, high=MAX_SECONDS, unit="seconds", metavar="S",
    )  # fmt: skip
    tpot_s: float | None = option(
        None, "most time a token: seconds, or like 40ms", flag="--tpot", read=duration, low=1e-6,
        high=MAX_SECONDS, unit="seconds", metavar="S",
    )  # fmt: skip
    headroom: float = option(
        0.10, "the R-part may take this part longer than predicted before the GPU waits", low=0.0,
        high=10.0, metavar="X",
    )  # fmt: skip
    survive: int = option(0, "R-workers that may be lost", low=0, high=MAX_SOCKETS, metavar="K")
    replicas: int = option(
        0, "copies of every R-worker's KV cache that another keeps, 0 or 1", low=0, high=1
    )
    batch: int | None = option(
        None, "sequences at once; default: chosen", low=1, high=MAX_BATCH, metavar="B"
    )
    lanes: int | None = option(
        None, "lanes in flight; default: chosen", low=1, high=MAX_LANES, metavar="K"
    )
    max_sockets: int | None = option(None, "sockets at hand", low=1, high=MAX_SOCKETS, metavar="P")
    users: int | None = option(
        None, "users who wait for an answer, read it, and ask again; they set how many sequences "
        "run at once, instead of --batch", low=1, high=MAX_BATCH,
    )  # fmt: skip
    think_s: float = option(
        0.0, "time from an answer to the user's next request: seconds, or like 30s",
        flag="--think-time", read=duration, low=0.0, high=MAX_SECONDS, unit="seconds", metavar="S",
    )  # fmt: skip
    requests: int | None = option(
        None, "requests of a job: print its hours, energy and money", read=_requests, low=1,
        high=MAX_REQUESTS,
    )  # fmt: skip
    min_gain: float | None = option(
        None, "largest part by which another batch may give more tokens/s than the chosen one "
        "(default: 0.10; with --max-sockets 0.01)", low=1e-3, high=10.0, metavar="X",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        batch, max_sockets = Given("batch", self.batch), Given("max_sockets", self.max_sockets)
        if self.batch is not None and self.lanes is not None and self.batch < self.lanes:
            raise ConfigError(batch, f" can't be split into {self.lanes} lanes")
        if self.users is not None and self.batch is not None:
            words = " says how many sequences run at once. Remove "
            raise ConfigError(Given("users"), words, Given("batch"))
        if self.think_s and self.users is None:
            words = " is what users take between requests. Give "
            raise ConfigError(Given("think_s"), words, Given("users"))
        if self.max_sockets is not None and self.survive >= self.max_sockets:
            raise ConfigError(Given("survive", self.survive), " leaves none of ", max_sockets)

    @property
    def gain(self) -> float:
        if self.min_gain is not None:
            return self.min_gain
        return 0.10 if self.max_sockets is None else 0.01


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Money an hour, by hardware name. ``default`` stands for every other name."""

    gpu_per_hour: PriceTable
    socket_per_hour: PriceTable
    currency: Annotated[str, Meta(min_length=1, max_length=8)] = "USD"

    def of(self, kind: Literal["gpu", "socket"], name: str) -> float:
        """Raises ConfigError: If there is no such price."""
        table = self.gpu_per_hour if kind == "gpu" else self.socket_per_hour
        price = table.get(name, table.get("default"))
        if price is None:
            words = f' has no {kind}_per_hour for {name!r} and no "default"'
            raise ConfigError(Given("prices"), words)
        return price

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Read prices, all above 0. Raises ConfigError: If the file is missing or broken."""

        def refuse(why: str) -> ConfigError:
            return ConfigError(Given("prices", str(path)), f" (TOML, or JSON by its suffix): {why}")

        parse = json.loads if path.suffix == ".json" else parse_toml
        tree = read_object(path, most_bytes=MAX_PRICES_BYTES, refuse=refuse, parse=parse)
        try:
            return msgspec.convert(tree, cls)
        except msgspec.ValidationError as error:
            raise refuse(f"it is not a table of prices an hour by hardware name: {error}") from None


def split_counts(spec: ModelSpec, more_than: int) -> list[int]:
    """Return the numbers of GPUs beyond ``more_than`` over which the heads split evenly."""
    counts = range(more_than + 1, min(spec.num_q_heads, MAX_GPUS) + 1)
    return [count for count in counts if spec.num_q_heads % count == 0]
