"""What a planner asks: a model, hardware, a workload, and promises to keep. Checked once, here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from cost_model.hardware import Cpu, Gpu, Nic, parse_toml
from cost_model.numbers import number_within, whole_number
from cost_model.plans.constraints import MAX_SOCKETS, Promises
from cost_model.predict import MAX_LANES, System
from cost_model.stages import LinkModel, RPartModel, SPartModel
from cost_model.transport import MPI, Transport
from cost_model.workload import FP8, TokenCosts, WeightBytes, Workload
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object
from fastdecode.core.measurement import NetProfile, RProfile, SProfile
from fastdecode.core.model.spec import ModelSpec

MAX_GPUS = 1024
MAX_NICS = 64
MAX_BATCH = 1 << 20
MAX_REQUESTS = 10**12
MAX_SECONDS = 30 * 24 * 3600.0
MAX_PRICES_BYTES = 1 << 20

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
    num_gpus: int = 1
    num_nics: int = 1
    transport: Transport = MPI
    memory_bytes_per_socket: int | None = None
    """None: what the data file installs in this CPU, or what the profile says."""
    keeps_quantised: bool = False
    """Weights stay in memory as the checkpoint holds them, which FastDecode doesn't do yet."""
    has_ends: bool = True
    """Embedding and head are there; False: a pipeline's stage after the first."""
    is_fp8: bool = False
    """Weights of layers take a byte, and the GPU computes in FP8 where it can."""
    is_without_gpu: bool = False
    """The S-worker is a socket, too: ``gpu`` is what its CPU computes."""

    def __post_init__(self) -> None:
        whole_number("gpus", self.num_gpus, 1, MAX_GPUS)
        whole_number("nics", self.num_nics, 1, MAX_NICS)
        if self.spec.num_q_heads % self.num_gpus:
            raise ConfigError(
                f"--gpus {self.num_gpus}: the {self.spec.num_q_heads} query heads of "
                f"{self.spec.name} can't be split evenly over them; try "
                f"{' or '.join(str(n) for n in split_counts(self.spec, self.num_gpus)[:2])}"
            )
        if isinstance(self.gpu, SProfile) and self.num_gpus != 1:
            raise ConfigError(
                "--gpus with a measured --gpu profile: the profile is of all the GPUs it was "
                "measured on"
            )
        if self.memory_bytes_per_socket is not None:
            number_within("dram_gb", self.memory_bytes_per_socket / 1e9, 0.25, 65536)
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
        """The same GPUs with weights and KV cache in FP8, as engines that keep all on the GPU
        serve it; those without FP8 units compute in 16 bits."""
        gpu = self.gpu
        if isinstance(gpu, Gpu) and gpu.fp8_flops_per_s is not None:
            fp8 = gpu.fp8_flops_per_s
            gpu = replace(gpu, fp16_flops_per_s=fp8, bf16_flops_per_s=fp8)
        return replace(self, gpu=gpu, kv_dtype=FP8, is_fp8=True)

    def system(self) -> System:
        """Raises ConfigError where a profile doesn't fit the model."""
        costs = self.costs
        gpu, cpu, nic = self.gpu, self.cpu, self.nic
        s = (
            SPartModel.from_gpu(gpu, self.num_gpus, costs)
            if isinstance(gpu, Gpu)
            else SPartModel.from_profile(gpu, costs)
        )
        r = (
            RPartModel.from_cpu(cpu, costs, self.memory_bytes_per_socket)
            if isinstance(cpu, Cpu)
            else RPartModel.from_profile(cpu, costs)
        )
        return System(
            s=s.without_gpu(r, costs) if self.is_without_gpu else s,
            r=r,
            link=LinkModel.from_nic(nic) if isinstance(nic, Nic) else LinkModel.from_profile(nic),
            num_nics=self.num_nics,
            transport=self.transport,
            costs=costs,
            workload=self.workload,
        )


@dataclass(frozen=True)
class Goal:
    """What to hold, and how to choose among what holds."""

    latency_s: float | None = None
    """Of a whole sequence."""
    tpot_s: float | None = None
    headroom: float = 0.10
    """The R-part may take this much longer than predicted before the GPU waits."""
    survive: int = 0
    """R-workers that may be lost and everything still holds."""
    replicas: int = 0
    """Copies of every R-worker's KV cache, kept by another: 0 or 1."""
    batch: int | None = None
    """Sequences at once; None: chosen."""
    lanes: int | None = None
    """None: chosen."""
    max_sockets: int | None = None
    users: int | None = None
    """People who ask again ``think_s`` after each answer; the batch follows from them."""
    think_s: float = 0.0
    requests: int | None = None
    """That are to be done, for the hours, energy and money of the job."""
    min_gain: float | None = None
    """The batch is the smallest to which no other adds more than this part of tokens a second;
    None: a tenth, or a hundredth of sockets that there are anyway (``max_sockets``)."""

    def __post_init__(self) -> None:
        for name, seconds in (("latency", self.latency_s), ("tpot", self.tpot_s)):
            if seconds is not None:
                number_within(name, seconds, 1e-6, MAX_SECONDS, "number of seconds")
        number_within("think_time", self.think_s, 0.0, MAX_SECONDS, "number of seconds")
        number_within("headroom", self.headroom, 0.0, 10.0)
        if self.min_gain is not None:
            number_within("min_gain", self.min_gain, 1e-3, 10.0)
        whole_number("survive", self.survive, 0, MAX_SOCKETS)
        whole_number("replicas", self.replicas, 0, 1)
        for name, count, most in (
            ("batch", self.batch, MAX_BATCH),
            ("lanes", self.lanes, MAX_LANES),
            ("max_sockets", self.max_sockets, MAX_SOCKETS),
            ("requests", self.requests, MAX_REQUESTS),
            ("users", self.users, MAX_BATCH),
        ):
            if count is not None:
                whole_number(name, count, 1, most)
        if self.batch is not None and self.lanes is not None and self.batch < self.lanes:
            raise ConfigError(f"--batch {self.batch} can't be split into {self.lanes} lanes")
        if self.users is not None and self.batch is not None:
            raise ConfigError("--users says how many sequences run at once. Remove --batch")
        if self.think_s and self.users is None:
            raise ConfigError("--think-time is what users take between requests. Give --users N")
        if self.max_sockets is not None and self.survive >= self.max_sockets:
            raise ConfigError(
                f"--survive {self.survive} leaves none of --max-sockets {self.max_sockets}"
            )

    @property
    def gain(self) -> float:
        """``min_gain``, or its default."""
        if self.min_gain is not None:
            return self.min_gain
        return 0.10 if self.max_sockets is None else 0.01

    def promises(self, system: System) -> Promises:
        step_limit_s = system.step_limit_s(self.latency_s, self.tpot_s)
        return Promises(step_limit_s, self.headroom, self.replicas)


@dataclass(frozen=True)
class Prices:
    """Money an hour, by hardware name. ``default`` stands for every other name."""

    currency: str
    gpu_per_hour: Mapping[str, float]
    socket_per_hour: Mapping[str, float]

    def gpu(self, name: str) -> float:
        return _price(self.gpu_per_hour, name, "gpu_per_hour")

    def socket(self, name: str) -> float:
        return _price(self.socket_per_hour, name, "socket_per_hour")

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Raises ConfigError if the file is missing, broken, or holds anything
        but prices above 0."""
        tree = read_object(
            path,
            most_bytes=MAX_PRICES_BYTES,
            refuse=lambda why: ConfigError(f"--prices {path} (TOML, or JSON by its suffix): {why}"),
            parse=json.loads if path.suffix == ".json" else parse_toml,
        )
        if set(tree) - {"currency", "gpu_per_hour", "socket_per_hour"}:
            raise ConfigError(
                f'--prices {path} may hold "currency", "gpu_per_hour" and "socket_per_hour" only'
            )
        currency = tree.get("currency", "USD")
        if not isinstance(currency, str) or not 0 < len(currency) <= 8:
            raise ConfigError(f'--prices {path}: "currency" must be a short string')
        return cls(
            currency,
            *(_read_prices(path, tree, name) for name in ("gpu_per_hour", "socket_per_hour")),
        )


def split_counts(spec: ModelSpec, more_than: int) -> list[int]:
    """Numbers of GPUs beyond ``more_than`` over which the heads split evenly."""
    return [
        n
        for n in range(more_than + 1, min(spec.num_q_heads, MAX_GPUS) + 1)
        if spec.num_q_heads % n == 0
    ]


def _read_prices(path: Path, tree: Mapping[str, Any], name: str) -> dict[str, float]:
    table = tree.get(name)
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            f'--prices {path}: "{name}" must be a table of prices by hardware name, or "default"'
        )
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise ConfigError(
                f"--prices {path}: {name}.{key} = {value!r} is not a price an hour above 0 and "
                "below 1e6"
            )
    return {str(key): float(value) for key, value in table.items()}


def _price(table: Mapping[str, float], name: str, kind: str) -> float:
    if name in table:
        return table[name]
    if "default" in table:
        return table["default"]
    raise ConfigError(f'--prices has no {kind} for {name!r} and no "default"')
