"""How many CPU sockets keep a GPU busy? The same question for several GPUs.

    python examples/sizing.py

The figures come from datasheets (``cost_model/data``), so they are a model's
prediction. ``fastdecode calibrate`` measures your own machines.
"""

from cost_model.hardware import Hardware
from cost_model.plans.question import Goal, Setup
from cost_model.plans.size import Sizing, size
from cost_model.shapes import read_model
from cost_model.workload import Workload

GPUS = ["A10", "L4", "A100-80GB"]


def main() -> None:
    hardware = Hardware.load()
    spec = read_model("llama-2-7b")
    dtype = spec.choose_dtype("auto")
    print(f"{spec.name}, {dtype.value}, 1,024 tokens a sequence, EPYC 7452 sockets")
    print(f"{'GPU':10} {'batch':>6} {'sockets':>8} {'tokens/s':>9} {'GPU alone':>10}")
    for name in GPUS:
        setup = Setup(
            spec=spec,
            dtype=dtype,
            kv_dtype=dtype.value,
            gpu=hardware.gpu(name),
            cpu=hardware.cpu("EPYC 7452"),
            nic=hardware.nic("100GbE"),
            workload=Workload(0, 1024),
        )
        answer = size(setup, Goal())
        print(f"{name:10} {planned(answer)} {alone(answer)}")


def planned(answer: Sizing) -> str:
    """Batch, sockets and tokens/s with R-workers."""
    plan = answer.plan
    if plan is None:
        return f"{'no plan':>25}"
    return f"{plan.batch:6,} {plan.sockets:8} {plan.expected.tokens_per_s:9,.0f}"


def alone(answer: Sizing) -> str:
    """Tokens/s of the GPU without R-workers."""
    rival = answer.gpu_only
    return f"{'no room':>10}" if rival is None else f"{rival.tokens_per_s:10,.0f}"


if __name__ == "__main__":
    main()
