"""A CPU in words, where its name is not known: ``12xDDR5-4800, 64 cores, 2.4 GHz, avx512``."""

from __future__ import annotations

import re
from typing import Any

from cost_model.hardware import CPU_SYNTAX, Cpu, Hardware
from fastdecode.core.errors import ConfigError

GIB_A_CHANNEL = 32
"""Installed if no memory is given: one DIMM."""
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
    """Return True if this is a description rather than a name."""
    return "," in text or re.search(r"ddr\d|channel", text.lower()) is not None


def described_cpu(text: str, hardware: Hardware) -> Cpu:
    """Read a description: channels by speed, cores, clock and instruction set, in any order.

    Raises:
        ConfigError: If a part is missing, given twice, or not understood.
    """
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        kind, match = next(
            ((kind, match) for kind, word in _WORDS.items() if (match := re.fullmatch(word, part))),
            ("", None),
        )
        if match is None or kind in seen:
            why = f"gives {kind} twice" if match else f"has {part!r}, which is not understood"
            raise ConfigError(f"--cpu {text!r} {why}. Write it as {CPU_SYNTAX!r}")
        seen.add(kind)
        found |= match.groupdict()
    missing = [kind for kind in list(_WORDS)[:4] if kind not in seen]
    if missing:
        raise ConfigError(
            f"--cpu {text!r} lacks its {' and '.join(missing)}. Write it as {CPU_SYNTAX!r}, and "
            "add 512 GB if the memory is known"
        )
    isa = re.sub(r"[-_]", "", found.pop("isa")).replace("sve2", "neon").replace("sve", "neon")
    channels, memory = int(found["memory_channels"]), found.pop("memory_gib", None)
    assumed = f"assumed: {GIB_A_CHANNEL} GiB a channel"
    row = {
        "source": "given by --cpu",
        "cores": int(found["cores"]),
        "base_ghz": float(found["base_ghz"]),
        "memory_channels": channels,
        "transfers_per_s": float(found["transfers_per_s"]) * 1e6,
        "memory_gib": int(memory or GIB_A_CHANNEL * channels),
        "memory_source": "given by --cpu" if memory else assumed,
        "sockets_per_host": 2,
        **_ISAS[isa],
    }
    try:
        return hardware.own_cpu(text, row)
    except ConfigError as error:
        raise ConfigError(f"--cpu {text!r}: {error.message}") from None
