"""What a GPU and its host are: used by gpu_first.py. Every fact is asked for by
itself, and one that can't be had costs no other; torch may be missing.

A row is ``{"fact": name, "value": ...}``; with ``note`` where it explains what
would else look like our mistake.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_PACKAGES = (
    "torch", "triton", "numpy", "numba", "psutil", "pyzmq", "mpi4py", "tokenizers", "transformers",
    "pytest",
)  # fmt: skip
_ASKED = (
    "name", "driver_version", "compute_cap", "memory.total", "memory.used", "compute_mode",
    "persistence_mode", "mig.mode.current", "ecc.mode.current", "power.limit", "clocks.max.sm",
    "clocks.max.mem", "pcie.link.gen.max", "pcie.link.width.max", "pci.bus_id",
)  # fmt: skip
_ASKED_UNDER_LOAD = ("pcie.link.gen.current", "pcie.link.width.current", "clocks.sm", "clocks.mem")
_SPEAKING = (
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_DEFAULT_FP_FUSION", "OMP_NUM_THREADS",
)  # fmt: skip
_REGISTERED_BYTES = 256 << 20
_LOAD_S = 1.0


def facts(smoke: bool) -> Iterator[Row]:
    """All facts, those first that need least."""
    for name, ask in (
        ("host", _host),
        ("packages", _packages),
        ("environment", _environment),
        ("ulimit -l", _locked_memory),
        ("compiler", _compiler),
        ("GPU", lambda: _asked(_ASKED)),
        ("confidential computing", _confidential),
        ("NUMA node of the GPU", _numa_node),
        ("torch", _torch),
        ("registered memory", _registration),
        ("under load", _under_load),
    ):
        yield _row(name, ask)


def _row(name: str, ask: Callable[[], Row]) -> Row:
    try:
        return {"fact": name, **ask()}
    except Exception as error:
        return {"fact": name, "value": None, "why": f"{type(error).__name__}: {error}"[:300]}


def _host() -> Row:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"value": f"{platform.platform()}, {cores} cores, {memory / 1e9:.0f} GB",
            "python": platform.python_version()}  # fmt: skip


def _packages() -> Row:
    found, missing = {}, []
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return {"value": found, "missing": missing}


def _environment() -> Row:
    found = {name: os.environ[name] for name in _SPEAKING if name in os.environ}
    tf32 = [name for name in _SPEAKING[:2] if found.get(name, "0") not in ("", "0")]
    note = f"{', '.join(tf32)} makes float32 products TF32: tokens in float32 may differ"
    return {"value": found, **({"note": note} if tf32 else {})}


def _locked_memory() -> Row:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {"value": "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"}


def _compiler() -> Row:
    """Triton builds its launchers with it."""
    found = next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    try:
        from fastdecode.core.host.facts import lacks_for_triton

        lacks = lacks_for_triton()
    except ImportError as error:
        lacks = f"unknown: {error}"
    return {
        "value": found,
        **({"note": f"Triton's kernels can't be built: {lacks}"} if lacks else {}),
    }


def _asked(fields: tuple[str, ...]) -> Row:
    """By nvidia-smi."""
    try:
        values = _values(fields)
    except subprocess.CalledProcessError:  # an old driver doesn't know one of them
        values = {}
        for field in fields:
            with contextlib.suppress(subprocess.CalledProcessError):
                values |= _values((field,))
    exclusive = values.get("compute_mode", "Default") not in ("Default", "[N/A]")
    note = {"note": "only one process at a time gets this GPU"} if exclusive else {}
    return {"value": values, **note}


def _values(fields: tuple[str, ...]) -> dict[str, str]:
    query = f"--query-gpu={','.join(fields)}"
    said = _said("nvidia-smi", query, "--format=csv,noheader", "-i", "0")
    return dict(zip(fields, (value.strip() for value in said.split(",")), strict=True))


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _confidential() -> Row:
    said = _said("nvidia-smi", "conf-compute", "-f")
    note = (
        {"note": "copies to the GPU are encrypted, and slow"}
        if "ON" in said.upper().split()
        else {}
    )
    return {"value": said.splitlines()[-1] if said else "", **note}


def _numa_node() -> Row:
    bus = _said("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", "-i", "0")
    place = Path("/sys/bus/pci/devices", bus.lower()[-12:])
    node, cpus = (Path(place, name).read_text().strip() for name in ("numa_node", "local_cpulist"))
    return {"value": int(node), "cpus": cpus, "own_cpus": sorted(os.sched_getaffinity(0))[:256]}


def _torch() -> Row:
    import torch

    if not torch.cuda.is_available():
        return {"value": f"{torch.__version__}: sees no CUDA device"}
    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    built_for = torch.cuda.get_arch_list()
    found = {"value": f"{torch.__version__}, CUDA {torch.version.cuda}, for {' '.join(built_for)}",
             "multiprocessors": device.multi_processor_count, "free_gb": free / 1e9,
             "total_gb": total / 1e9,
             "shared_memory_kb": getattr(device, "shared_memory_per_block_optin", 0) / 1024,
             }  # fmt: skip
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        found["note"] = "torch before 2.7 launches two kernels more for each graph"
    return found


def _registration() -> Row:
    """The host's memory, made known to CUDA as messages' buffers are."""
    import mmap

    import torch

    if not torch.cuda.is_available():
        return {"value": None, "why": "no CUDA device"}
    torch.cuda.init()
    memory = mmap.mmap(-1, _REGISTERED_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cudart = torch.cuda.cudart()
    started = time.perf_counter()
    error = int(cudart.cudaHostRegister(address, _REGISTERED_BYTES, 1))
    took_s = time.perf_counter() - started
    if error:
        return {"value": f"refused, CUDA error {error}",
                "note": "messages are copied once more on the host"}  # fmt: skip
    host = torch.frombuffer(memory, dtype=torch.uint8)
    is_pinned = host.is_pinned()
    del host
    cudart.cudaHostUnregister(address)
    return {
        "value": f"{_REGISTERED_BYTES >> 20} MiB in {took_s * 1e3:.0f} ms",
        "is_pinned": is_pinned,
    }


def _under_load() -> Row:
    """Links and clocks while something is copied and computed: idle ones are slow."""
    import torch

    if not torch.cuda.is_available():
        return {"value": None, "why": "no CUDA device"}
    ends = threading.Event()

    def work() -> None:
        host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        a = torch.randn(4096, 4096, device="cuda").bfloat16()
        target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        while not ends.is_set():
            target.copy_(host, non_blocking=True)
            a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(_LOAD_S)
    try:
        found = _asked(_ASKED_UNDER_LOAD)
        most = _asked(("pcie.link.gen.max", "pcie.link.width.max"))["value"]
    finally:
        ends.set()
        thread.join(10)
    link = [found["value"].get(name) for name in _ASKED_UNDER_LOAD[:2]]
    if link != list(most.values()):
        found["note"] = f"PCIe runs at generation and width {link}, not {list(most.values())}"
    return found


if __name__ == "__main__":
    for each in facts("--smoke" in sys.argv):
        print(each)
