"""GPUs, CPUs and NICs by name, from ``hardware.toml``: vendors' figures with
their sources, and our efficiencies."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import resources
from typing import Any, TypeVar

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1 << 20
GIB = 1 << 30

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Efficiency:
    """The part of a stated peak that we expect to get, and why. Never 1:
    nothing reaches its datasheet."""

    value: float
    source: str

    def __post_init__(self) -> None:
        assert 0.0 < self.value < 1.0, f"an efficiency lies between 0 and 1, got {self.value}"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense."""

    name: str
    source: str
    fp16_flops_per_s: float
    bf16_flops_per_s: float | None
    """None: the GPU has no bfloat16 units."""
    memory_bytes: int
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    """To the host, one direction."""
    peer_bytes_per_s: float
    """To the other GPUs of its node, one direction."""
    power_w: float
    compute_efficiency: Efficiency
    memory_efficiency: Efficiency
    link_efficiency: Efficiency
    memory_usable: Efficiency
    layer_overhead_s: float
    """Launches of one layer's kernels, as far as they can't be hidden."""
    all_reduce_s: float
    """Latency of one all-reduce among the GPUs of a node."""
    relative_error: float

    def flops_per_s(self, dtype: DType) -> float:
        """The dense matrix peak in ``dtype``.

        Raises:
            ConfigError: the GPU doesn't compute in it.
        """
        if dtype is DType.FLOAT32:
            raise ConfigError(
                f"dtype=float32 on {self.name}: the data file holds 16-bit matrix peaks only; use "
                "--dtype float16 or bfloat16, or calibrate on the device and pass its profile"
            )
        if dtype is DType.BFLOAT16 and self.bf16_flops_per_s is None:
            raise ConfigError(
                f"dtype=bfloat16: {self.name} has no bfloat16 units; use --dtype float16"
            )
        return (
            self.bf16_flops_per_s
            if dtype is DType.BFLOAT16 and self.bf16_flops_per_s
            else self.fp16_flops_per_s
        )

    @property
    def usable_memory_bytes(self) -> float:
        return self.memory_bytes * self.memory_usable.value


@dataclass(frozen=True)
class Cpu:
    """One CPU socket with its memory."""

    name: str
    source: str
    cores: int
    base_ghz: float
    fp32_flops_per_cycle: int
    """Of one core."""
    memory_channels: int
    transfers_per_s: float
    """Of one channel of 8 bytes."""
    memory_bytes: int
    """Installed, unless the user says otherwise."""
    memory_source: str
    sockets_per_host: int
    power_w: float
    read_efficiency: Efficiency
    attention_efficiency: Efficiency
    compute_efficiency: Efficiency
    memory_usable: Efficiency
    call_s: float
    """What one ``Attend`` costs beside the bytes: receive, look up, start the threads, answer."""
    relative_error: float

    @property
    def memory_bytes_per_s(self) -> float:
        """The stated bandwidth: channels x 8 bytes x transfers."""
        return self.memory_channels * 8 * self.transfers_per_s

    @property
    def fp32_flops_per_s(self) -> float:
        """The stated peak: cores x base clock x flops a cycle."""
        return self.cores * self.base_ghz * 1e9 * self.fp32_flops_per_cycle


@dataclass(frozen=True)
class Nic:
    """One port."""

    name: str
    source: str
    line_bits_per_s: float
    """Each way, both at once."""
    round_trip_s: float
    round_trip_source: str
    message_s: float
    """What one message out and its answer cost the S-worker's thread, the bytes aside."""
    message_source: str
    line_efficiency: Efficiency
    relative_error: float

    @property
    def bytes_per_s(self) -> float:
        """Payload each way."""
        return self.line_bits_per_s / 8 * self.line_efficiency.value


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError if it isn't TOML."""
    tables: dict[str, Any] = tomllib.loads(text)
    return tables


class Hardware:
    """Everything in one ``hardware.toml``."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = tables

    @classmethod
    def load(cls) -> Hardware:
        """The file that comes with the package."""
        return cls(
            parse_toml(resources.files("cost_model").joinpath("hardware.toml").read_text("utf-8"))
        )

    @cached_property
    def gpus(self) -> dict[str, Gpu]:
        return {name: _gpu(name, row) for name, row in self._rows("gpu")}

    @cached_property
    def cpus(self) -> dict[str, Cpu]:
        return {name: _cpu(name, row) for name, row in self._rows("cpu")}

    @cached_property
    def nics(self) -> dict[str, Nic]:
        return {name: _nic(name, row) for name, row in self._rows("nic")}

    def gpu(self, name: str) -> Gpu:
        """Raises ConfigError with the nearest names if there is none of this name."""
        return self.gpus[self._find("gpu", name)]

    def cpu(self, name: str) -> Cpu:
        """Raises ConfigError with the nearest names if there is none of this name."""
        return self.cpus[self._find("cpu", name)]

    def nic(self, name: str) -> Nic:
        """Raises ConfigError with the nearest names if there is none of this name."""
        return self.nics[self._find("nic", name)]

    def faster_nic(self, nic: Nic) -> Nic | None:
        """The next faster port of the same kind (Ethernet or InfiniBand); None at the top."""
        ethernet = nic.name.endswith("GbE")
        faster = [
            other
            for other in self.nics.values()
            if other.line_bits_per_s > nic.line_bits_per_s
            and other.name.endswith("GbE") == ethernet
        ]
        return min(faster, key=lambda other: other.line_bits_per_s, default=None)

    def _rows(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        defaults = self._tables[f"{kind}_defaults"]
        return [(name, {**defaults, **row}) for name, row in self._tables[kind].items()]

    def _find(self, kind: str, name: str) -> str:
        names = {
            alias: own
            for own, row in self._tables[kind].items()
            for alias in (own, *row.get("aliases", ()))
        }
        return find_name(name, names, option=kind)


_MOST_LISTED = 40


def find_name(name: str, known: Mapping[str, str], *, option: str) -> str:
    """Look a name up, whatever its capitals, spaces and dashes.

    Args:
        known: every accepted spelling, and the name it stands for.
        option: for the message: ``--option``.

    Raises:
        ConfigError: nothing is called so; the message suggests the nearest
            names.
    """
    plain = {_plain(spelling): own for spelling, own in known.items()}
    key = _plain(name)
    if key in plain:
        return plain[key]
    near = difflib.get_close_matches(key, plain, n=3, cutoff=0.5)
    suggestions = dict.fromkeys(plain[match] for match in near)
    hint = f"Did you mean {' or '.join(suggestions)}? " if suggestions else ""
    names = list(dict.fromkeys(known.values()))
    listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
    raise ConfigError(
        f"--{option} {name!r} is not known. {hint}Known: {listed}; or give the path of a file",
        code=f"unknown_{option}",
    )


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9+]", "", name.lower())
    for vendor in ("nvidia", "amd", "intel"):
        plain = plain.removeprefix(vendor)
    return plain


def _efficiency(row: Mapping[str, Any], name: str) -> Efficiency:
    return Efficiency(float(row[name]), str(row[f"{name}_source"]))


def _number(row: Mapping[str, Any], name: str) -> float:
    value = float(row[name])
    assert math.isfinite(value) and value > 0, f"{name}={value} in hardware.toml"
    return value


def _optional(row: Mapping[str, Any], name: str) -> float | None:
    return _number(row, name) if name in row else None


_READERS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "str": lambda row, name: row[name],
    "int": lambda row, name: int(row[name]),
    "float": _number,
    "float | None": _optional,
    "Efficiency": _efficiency,
}
"""How a field is read, by its type."""


def _read(kind: Callable[..., _Kind], name: str, row: Mapping[str, Any], **given: int) -> _Kind:
    """A row of the file: all fields of ``kind`` but its name and what is ``given``."""
    rest = {
        field.name: _READERS[str(field.type)](row, field.name)
        for field in fields(kind)  # type: ignore[arg-type]
        if field.name != "name" and field.name not in given
    }
    return kind(name=name, **given, **rest)


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    return _read(Gpu, name, row, memory_bytes=int(_number(row, "memory_mib")) * MIB)


def _cpu(name: str, row: Mapping[str, Any]) -> Cpu:
    return _read(Cpu, name, row, memory_bytes=int(row["memory_gib"]) * GIB)


def _nic(name: str, row: Mapping[str, Any]) -> Nic:
    return _read(Nic, name, row)
