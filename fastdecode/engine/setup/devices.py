"""The S-part's device: which one it is, what is free there, and whether CUDA graphs run on it."""

from __future__ import annotations

import torch

from fastdecode.core.config.s_part import SPart
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.host.machine import free_memory_bytes
from fastdecode.engine.setup.memory import NODE_BYTES, OLD_NODE_BYTES, FreeMemory

_R550 = 12_040
"""The driver's version, as CUDA counts: 12.4."""


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device of one of the S-workers that act as one: GPUs are counted from the one that is
    named.

    Args:
        name: cpu, cuda, cuda:N, or auto: cuda if torch sees a GPU here, else cpu.

    Raises:
        ConfigError: it is none of these, or isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            Given("device", name), " is not a torch device: use cpu, cuda, cuda:N or auto"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(Given("device", name), ": the S-part runs on cpu or cuda")
    if device.type == "cpu":
        return device
    index = (device.index or 0) + rank
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank and count == 1:
        index = device.index or 0  # the launcher shows every rank a GPU of its own
    if index >= count:
        of_rank = f" of S-worker {rank}" if rank else ""
        raise ConfigError(
            Given("device", name),
            f": GPU {index}{of_rank} does not exist: torch sees {count} CUDA devices. Use ",
            Given("device", "cpu"),
            ", or check the driver and that torch was built for CUDA",
        )
    return torch.device("cuda", index)


def free_memory(device: torch.device) -> FreeMemory:
    """What this process may still take of this host and of a device."""
    if device.type != "cuda":
        return FreeMemory(free_memory_bytes())
    free, total = torch.cuda.mem_get_info(device)
    # What an engine before this one has given back, torch keeps for the next.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    name = torch.cuda.get_device_name(device)
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: _R550)()
    node_bytes = NODE_BYTES if version >= _R550 else OLD_NODE_BYTES
    return FreeMemory(free_memory_bytes(), free + kept, total, node_bytes, name)


def describe_device(device: torch.device, free: FreeMemory, asked: str = "") -> str:
    """Where the S-part runs and the memory that was free there, for people.
    ``asked``: for which device."""
    if device.type != "cuda" or free.device_bytes is None:
        by = "--device auto: torch sees no GPU; " if asked == "auto" else ""
        return f"the CPU ({by}{free.host_bytes / 1e9:.1f} GB of memory free)"
    by = "--device auto: " if asked == "auto" else ""
    of_total = f"{free.device_bytes / 1e9:.1f} of {free.device_total_bytes / 1e9:.1f} GB free"
    return f"{free.device_name or torch.cuda.get_device_name(device)} ({by}{device}, {of_total})"


def uses_graphs(s_part: SPart, device: torch.device) -> bool:
    """Whether S-steps run as CUDA graphs.

    Raises:
        ConfigError: they are asked for on something else than a CUDA device.
    """
    if s_part.cuda_graphs == "on" and device.type != "cuda":
        raise ConfigError(
            Given("cuda_graphs", "on"),
            " needs a CUDA device, not ",
            Given("device", device.type),
            ": use auto",
        )
    # Between GPUs a graph holds collectives too, which has been run on no GPU
    # yet: only if it is asked for.
    return device.type == "cuda" and (
        s_part.cuda_graphs == "on" or (s_part.cuda_graphs == "auto" and s_part.tp == 1)
    )
