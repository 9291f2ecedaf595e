"""GPUs, CPUs and NICs by name: vendors' figures with their sources, and our efficiencies."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.json_file import read_object

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 1 << 20


def _within(least: float, most: float, key: str = "", unit: int = 1) -> Any:
    """Return a field with limits far beyond any part that is sold, in units of the file, which may
    have its own name for it, and a unit of its own."""
    return field(metadata={"limits": (least, most), "key": key, "unit": unit})


@dataclass(frozen=True)
class Efficiency:
    """The part of a stated peak that we expect to get, and why. Nothing reaches its datasheet."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Peaks are dense."""

    name: str
    source: str
    fp16_flops_per_s: float = _within(1e9, 1e19)
    bf16_flops_per_s: float | None = _within(1e9, 1e19)
    """None if the GPU has no bfloat16 units."""
    fp8_flops_per_s: float | None = _within(1e9, 1e19)
    """None if the GPU has no FP8 units."""
    memory_bytes: int = _within(1, 1 << 26, "memory_mib", 1 << 20)
    memory_bytes_per_s: float = _within(1e6, 1e16)
    pcie_bytes_per_s: float = _within(1e6, 1e16)
    """To the host, one direction."""
    peer_bytes_per_s: float = _within(1e6, 1e16)
    """To the other GPUs of its node, one direction."""
    power_w: float | None = _within(0.1, 1e6)
    compute_efficiency: Efficiency
    memory_efficiency: Efficiency
    link_efficiency: Efficiency
    memory_usable: Efficiency
    layer_overhead_s: float = _within(1e-9, 1.0)
    """Launches of one layer's kernels, as far as they can't be hidden."""
    all_reduce_s: float = _within(1e-9, 1.0)
    relative_error: float = _within(1e-3, 10.0)

    def flops_per_s(self, dtype: DType) -> float:
        if dtype is DType.FLOAT32:
            raise ConfigError(
                f"dtype=float32 on {self.name}: the data file holds 16-bit matrix peaks only; use "
                "--dtype float16 or bfloat16, or calibrate on the device and pass its profile"
            )
        if dtype is DType.BFLOAT16 and self.bf16_flops_per_s is None:
            words = f"{self.name} has no bfloat16 units; use --dtype float16"
            raise ConfigError(f"dtype=bfloat16: {words}")
        return (dtype is DType.BFLOAT16 and self.bf16_flops_per_s) or self.fp16_flops_per_s

    @property
    def usable_memory_bytes(self) -> float:
        return self.memory_bytes * self.memory_usable.value


class SocketAsGpu(Gpu):
    """What an S-worker computes on without a GPU. It widens float16 weights to float32."""

    def flops_per_s(self, dtype: DType) -> float:
        bf16 = self.bf16_flops_per_s if dtype is DType.BFLOAT16 else None
        return bf16 or self.fp16_flops_per_s


@dataclass(frozen=True, kw_only=True)
class Cpu:
    name: str
    source: str
    cores: int = _within(1, 65536)
    base_ghz: float = _within(0.1, 100.0)
    isa: str
    fp32_flops_per_cycle: int = _within(1, 65536)
    bf16_flops_per_cycle: float | None = _within(1, 65536)
    """Operations of its dot products (avx512_bf16, AMX). None if bfloat16 is widened to float32."""
    memory_channels: int = _within(1, 1024)
    transfers_per_s: float = _within(1e6, 1e12)
    """Transfers of one channel of 8 bytes."""
    memory_bytes: int = _within(1, 65536, "memory_gib", 1 << 30)
    memory_source: str
    sockets_per_host: int = _within(1, 1024)
    power_w: float | None = _within(0.1, 1e6)
    read_efficiency: Efficiency
    attention_efficiency: Efficiency
    compute_efficiency: Efficiency
    matrix_efficiency: Efficiency
    memory_usable: Efficiency
    call_s: float = _within(1e-9, 1.0)
    """What one ``Attend`` costs beside the bytes: receive, look up, start the threads, answer."""
    relative_error: float = _within(1e-3, 10.0)

    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By KV dtype: parts of the FMA peak, by query heads a KV head, and their ``source``."""

    def attention_peak(self, kv_dtype: str, group: int) -> Efficiency:
        """Return the part of the FMA peak that attention reaches where arithmetic binds. Of the
        measured groups (query heads a KV head) the nearest one up to ``group`` counts."""
        is_16_bit = kv_dtype in (DType.FLOAT16.value, DType.BFLOAT16.value)
        row = dict(self.kernels.get("16-bit" if is_16_bit else kv_dtype, {}))
        if not row:
            return self.compute_efficiency
        source, groups = str(row.pop("source")), sorted(map(int, row))
        near = max((each for each in groups if each <= group), default=groups[0])
        return Efficiency(row[str(near)], source)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_channels * 8 * self.transfers_per_s

    @property
    def fp32_flops_per_s(self) -> float:
        """The stated peak: cores x base clock x flops a cycle."""
        return self.cores * self.base_ghz * 1e9 * self.fp32_flops_per_cycle

    def as_gpu(self, memory_bytes: int | None = None) -> Gpu:
        """Return what the S-worker computes on where there is no GPU: this socket."""
        fp32, bf16 = self.fp32_flops_per_s, self.bf16_flops_per_cycle
        return SocketAsGpu(
            name=f"{self.name} (no GPU)",
            source=self.source,
            fp16_flops_per_s=fp32,
            bf16_flops_per_s=bf16 and fp32 / self.fp32_flops_per_cycle * bf16,
            fp8_flops_per_s=None,
            memory_bytes=memory_bytes or self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            pcie_bytes_per_s=self.memory_bytes_per_s,
            peer_bytes_per_s=self.memory_bytes_per_s,
            power_w=self.power_w,
            compute_efficiency=self.matrix_efficiency,
            memory_efficiency=self.read_efficiency,
            link_efficiency=self.read_efficiency,
            memory_usable=self.memory_usable,
            layer_overhead_s=10 * self.call_s,
            all_reduce_s=self.call_s,
            relative_error=self.relative_error,
        )


@dataclass(frozen=True, kw_only=True)
class Nic:
    name: str
    source: str
    line_bits_per_s: float = _within(1e6, 1e15)
    """Each way, both at once."""
    round_trip_s: float = _within(1e-9, 10.0)
    round_trip_source: str
    message_s: float = _within(1e-9, 1.0)
    """What one message out and its answer cost the S-worker's thread, the bytes aside."""
    message_source: str
    line_efficiency: Efficiency
    relative_error: float = _within(1e-3, 10.0)

    @property
    def bytes_per_s(self) -> float:
        return self.line_bits_per_s / 8 * self.line_efficiency.value


parse_toml: Callable[[str], dict[str, Any]] = tomllib.loads
"""Raises ValueError if a text isn't TOML."""


class Hardware:
    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = tables

    @classmethod
    def load(cls, more: Path | None = None) -> Hardware:
        """Read the file that comes with the package, and ``more``, a user's file. A part of a known
        name there changes the fields that it has; ``like`` names the part that has all others.

        Raises:
            ConfigError: If the user's file can't be read, or a field makes no sense.
        """
        shipped = resources.files("cost_model").joinpath("hardware.toml").read_text("utf-8")
        hardware = cls(parse_toml(shipped))
        return hardware if more is None else hardware._with(more)

    def _with(self, path: Path) -> Hardware:
        def refuse(why: str) -> ConfigError:
            return ConfigError(Given("hardware", str(path)), f": {why}")

        tree = read_object(path, most_bytes=MAX_BYTES, refuse=refuse, parse=parse_toml)
        tables = {kind: dict(rows) for kind, rows in self._tables.items()}
        for kind, rows in tree.items():
            if kind not in _KINDS or not isinstance(rows, dict):
                raise refuse(f"[{kind}] is not one of [gpu.NAME], [cpu.NAME] and [nic.NAME]")
            for name, row in rows.items():
                try:
                    tables[kind][name] = self._row(kind, name, row)
                    self.part(kind, name, tables[kind][name])
                except ConfigError as error:
                    raise refuse(f"[{kind}.{name}]: {error.message}") from None
        return Hardware(tables)

    def _row(self, kind: str, name: str, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise ConfigError("it must be a table of fields")
        rows, row = self._tables[kind], dict(row)
        base = rows.get(name, {})
        if "like" in row:
            base = rows[self._find(kind, str(row.pop("like")))]
            base = {field: value for field, value in base.items() if field != "aliases"}
        known = {field for each in rows.values() for field in each}
        unknown = sorted(set(row) - known - set(self._tables[f"{kind}_defaults"]))
        if unknown:
            raise ConfigError(f"{unknown[0]} is not known; there are {', '.join(sorted(known))}")
        return {"source": "given by --hardware", **base, **row}

    gpus = cached_property[dict[str, Gpu]](lambda self: self._parts("gpu"))
    cpus = cached_property[dict[str, Cpu]](lambda self: self._parts("cpu"))
    nics = cached_property[dict[str, Nic]](lambda self: self._parts("nic"))

    def gpu(self, name: str) -> Gpu:
        return self.gpus[self._find("gpu", name)]

    def printed_gpu(self, name: str) -> Gpu | None:
        """Look up a driver's name such as "NVIDIA H100 80GB HBM3", also without its last words.
        None if it is unknown."""
        words = name.split()
        for count in range(len(words), 0, -1):
            with contextlib.suppress(ConfigError):
                return self.gpu(" ".join(words[:count]))
        return None

    def cpu(self, name: str) -> Cpu:
        return self.cpus[self._find("cpu", name)]

    def nic(self, name: str) -> Nic:
        return self.nics[self._find("nic", name)]

    def faster_nic(self, nic: Nic) -> Nic | None:
        """Return the next faster port of the same kind (Ethernet, InfiniBand). None at the top."""
        family = _nic_family(nic)
        known = sorted(self.nics.values(), key=lambda other: other.line_bits_per_s)
        faster = (other for other in known if other.line_bits_per_s > nic.line_bits_per_s)
        return next((other for other in faster if _nic_family(other) == family), None)

    def _parts(self, kind: str) -> dict[str, Any]:
        rows = self._tables[kind].items()
        return {name: self.part(kind, name, row) for name, row in rows}

    def part(self, kind: str, name: str, row: Mapping[str, Any]) -> Any:
        part = _read(kind, name, {**self._tables[f"{kind}_defaults"], **row})
        if kind == "cpu" and "compute_efficiency" not in row:
            return replace(part, kernels=self._tables["attention"].get(part.isa, {}))
        return part

    def _find(self, kind: str, name: str) -> str:
        names = {
            alias: own
            for own, row in self._tables[kind].items()
            for alias in (own, *row.get("aliases", ()))
        }
        families = {own: _plain(row.get("family", "")) for own, row in self._tables[kind].items()}
        family = [own for own, named in families.items() if named and named == _plain(name)]
        if family:
            why = f" names a family, whose parts differ: give one of {', '.join(family)}"
            raise ConfigError(Given(kind, name), why, code=f"unknown_{kind}")
        described = f", or a description such as {CPU_SYNTAX!r}" if kind == "cpu" else ""
        return find_name(name, names, option=kind, also=described)


GIB_PER_CHANNEL = 32
"""Memory that is assumed if a description has none: one DIMM."""
CPU_SYNTAX = "12xDDR5-4800, 64 cores, 2.4 GHz, avx512"
"""A CPU in words, where its name is not known."""
_MOST_LISTED = 40


def find_name(name: str, known: Mapping[str, str], *, option: str, also: str = "") -> str:
    """Look a name up, whatever its capitals, spaces and dashes. ``known`` has all spellings, and
    ``also`` what else may be given."""
    plain = {_plain(spelling): own for spelling, own in known.items()}
    key = _plain(name)
    if key in plain:
        return plain[key]
    near = difflib.get_close_matches(key, plain, n=3, cutoff=0.5)
    suggestions = dict.fromkeys(plain[match] for match in near)
    hint = f"Did you mean {' or '.join(suggestions)}? " if suggestions else ""
    names = list(dict.fromkeys(known.values()))
    listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
    why = f"is not known. {hint}Known: {listed}; or give the path of a file{also}"
    raise ConfigError(Given(option, name), f" {why}", code=f"unknown_{option}")


def _nic_family(nic: Nic) -> str:
    return next((kind for kind in ("GbE", "EFA") if kind in nic.name), "InfiniBand")


_NOISE = re.compile(
    r"\((r|tm)\)|\bcpu @.*|\b\d+-core processor.*|\b(nvidia|amd|intel|cpu|tesla|infiniband)\b"
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", _NOISE.sub("", name.lower()))


def _read_field(field: Field[Any], key: str, row: Mapping[str, Any]) -> Any:
    if field.type == "str":
        return str(row[key])
    if field.type == "float | None" and key not in row:
        return None
    value, is_whole = row[key], field.type == "int"
    least, most = field.metadata.get("limits", (0.001, 0.999))
    fits = type(value) in (int, float) and least <= value <= most
    if not fits or (is_whole and value != int(value)):
        words = f"{'whole ' if is_whole else ''}number from {least:.9g} to {most:.9g}"
        raise ConfigError(f"{key} = {value!r} is not a {words}")
    if field.type == "Efficiency":
        return Efficiency(float(value), str(row[f"{key}_source"]))
    return int(value) * field.metadata["unit"] if is_whole else float(value)


def _read(kind: str, name: str, row: Mapping[str, Any]) -> Any:
    keys = {
        each: each.metadata.get("key") or each.name
        for each in fields(_KINDS[kind])
        if each.name != "name" and each.default_factory is MISSING
    }
    missing = [key for each, key in keys.items() if key not in row and "None" not in str(each.type)]
    if missing:
        raise ConfigError(f'{min(missing)} is missing; or say which part it is like: like = "NAME"')
    read = {each.name: _read_field(each, key, row) for each, key in keys.items()}
    return _KINDS[kind](name=name, **read)


_KINDS: dict[str, type[Any]] = {"gpu": Gpu, "cpu": Cpu, "nic": Nic}
_WORDS = {
    "channels": r"(?P<memory_channels>\d+) ?(?:x|ch|channels?(?: of)?) ?(?:[a-z0-9]*ddr\dx?[ -]?)?"
    r"(?P<transfers_per_s>\d{4,5})(?: ?mt/s)?",
    "cores": r"(?P<cores>\d+) ?(?:cores?|c)",
    "GHz": r"(?P<base_ghz>\d+(?:\.\d+)?) ?ghz",
    "instruction set": r"(?P<isa>avx-?2|avx-?512(?:[_-]bf16)?|amx|neon|sve2?)",
    "memory": r"(?P<memory_gib>\d+) ?gi?b",
}
_ISAS: dict[str, dict[str, Any]] = {
    "avx2": {"isa": "avx2", "fp32_flops_per_cycle": 32},
    "avx512": {"isa": "avx512", "fp32_flops_per_cycle": 64},
    "avx512bf16": {"isa": "avx512", "fp32_flops_per_cycle": 64, "bf16_flops_per_cycle": 128},
    "amx": {"isa": "avx512", "fp32_flops_per_cycle": 64, "bf16_flops_per_cycle": 2048},
    "neon": {"isa": "neon", "fp32_flops_per_cycle": 32},
}


def is_described(text: str) -> bool:
    return "," in text or re.search(r"ddr\d|channel", text.lower()) is not None


def described_cpu(text: str, hardware: Hardware) -> Cpu:
    """Read a description: channels by speed, cores, clock and instruction set, in any order. Raises
    ConfigError: If a part is missing, given twice, or not understood."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(Given("cpu", text), f" {why}")

    found: dict[str, str] = {}
    seen: set[str] = set()
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        matches = {kind: re.fullmatch(word, part) for kind, word in _WORDS.items()}
        kind = next((kind for kind, match in matches.items() if match), None)
        if kind is None or kind in seen:
            why = f"gives {kind} twice" if kind else f"has {part!r}, which is not understood"
            raise refuse(f"{why}. Write it as {CPU_SYNTAX!r}")
        seen.add(kind)
        match = matches[kind]
        assert match is not None
        found |= match.groupdict()
    missing = [kind for kind in list(_WORDS)[:4] if kind not in seen]
    if missing:
        remedy = f"Write it as {CPU_SYNTAX!r}, and add 512 GB if the memory is known"
        raise refuse(f"lacks its {' and '.join(missing)}. {remedy}")
    isa = re.sub(r"[-_]", "", found["isa"]).replace("sve2", "neon").replace("sve", "neon")
    channels, memory = int(found["memory_channels"]), found.get("memory_gib")
    assumed = f"assumed: {GIB_PER_CHANNEL} GiB a channel"
    row = {
        "source": "given by --cpu",
        "cores": int(found["cores"]),
        "base_ghz": float(found["base_ghz"]),
        "memory_channels": channels,
        "transfers_per_s": float(found["transfers_per_s"]) * 1e6,
        "memory_gib": int(memory or GIB_PER_CHANNEL * channels),
        "memory_source": "given by --cpu" if memory else assumed,
        "sockets_per_host": 2,
        **_ISAS[isa],
    }
    try:
        cpu: Cpu = hardware.part("cpu", text, row)
        return cpu
    except ConfigError as error:
        raise ConfigError(Given("cpu", text), f": {error.message}") from None
