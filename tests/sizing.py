"""Questions to the planner: a model on parts of the catalogue."""

from __future__ import annotations

from typing import Any

from cost_model.hardware import Hardware, described_cpu
from cost_model.plans.question import Setup
from cost_model.shapes import model_named
from cost_model.workload import Workload
from fastdecode.core.dtype import DType

HARDWARE = Hardware.load()


def setup(
    model: str = "Llama-2 7B",
    gpu: str = "A10",
    cpu: str = "EPYC 7452",
    nic: str = "100GbE",
    *,
    prompt: int = 0,
    output: int = 1024,
    kv: str = "float16",
    **more: Any,
) -> Setup:
    """Return a question in float16. ``gpu`` none is a socket of ``cpu``."""
    socket = described_cpu(cpu, HARDWARE) if "," in cpu else HARDWARE.cpu(cpu)
    worker = socket.as_gpu() if gpu == "none" else HARDWARE.gpu(gpu)
    options = {"workload": Workload(prompt, output), "is_without_gpu": gpu == "none", **more}
    return Setup(
        model_named(model), DType.FLOAT16, kv, worker, socket, HARDWARE.nic(nic), **options
    )
