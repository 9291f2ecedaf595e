"""Which way every constraint moves: at a given batch and number of lanes, worse
hardware and stricter promises never lower the number of sockets, and more
bandwidth never raises it. None ("no number suffices") is above every number.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.hardware import Cpu, Gpu, Hardware, Nic
from cost_model.plans.constraints import Promises, constraints
from cost_model.plans.question import Goal, Setup
from cost_model.shapes import model_named
from cost_model.workload import Workload
from examples import examples
from fastdecode.core.dtype import DType

HARDWARE = Hardware.load()
MODELS = ("Llama-2 7B", "Llama-2 13B", "Llama-3 8B", "Qwen2.5 7B", "OPT 13B", "Mistral 7B")
NEVER = 10**9

setups = st.builds(
    lambda model, gpu, cpu, nic, prompt, output: Setup(
        model_named(model), DType.FLOAT16, "float16", gpu, cpu, nic, Workload(prompt, output)
    ),
    st.sampled_from(MODELS),
    st.sampled_from([HARDWARE.gpu(name) for name in ("T4", "A10", "L40S", "A100", "H200")]),
    st.sampled_from(list(HARDWARE.cpus.values())),
    st.sampled_from(list(HARDWARE.nics.values())),
    st.integers(0, 512),
    st.integers(1, 1024),
)
plans = st.tuples(st.integers(1, 2048), st.integers(2, 4))
factors = st.floats(1.05, 8.0)


def sockets(setup: Setup, plan: tuple[int, int], goal: Goal | None = None) -> dict[str, int]:
    """Each constraint's sockets, and all of them together; NEVER where no number suffices."""
    goal = goal or Goal()
    system = setup.system()
    promises = Promises(system.step_limit_s(goal.latency_s, goal.tpot_s), goal.headroom)
    lane_batch, lanes = plan
    busy_s = lanes * system.s_s(lane_batch)
    rows = constraints(system, lane_batch, lanes, promises, busy_s)
    needs = {row.name: NEVER if row.min_sockets is None else row.min_sockets for row in rows}
    return {**needs, "all": max(needs.values())}


def never_fewer(base: dict[str, int], worse: dict[str, int]) -> bool:
    return all(worse[name] >= base[name] for name in base)


@settings(max_examples=examples(120), deadline=None)
@given(setups, plans, factors)
def test_a_slower_network(setup: Setup, plan: tuple[int, int], factor: float) -> None:
    assert isinstance(setup.nic, Nic)
    slow = replace(setup.nic, line_bits_per_s=setup.nic.line_bits_per_s / factor)
    late = replace(setup.nic, round_trip_s=setup.nic.round_trip_s * factor)
    base = sockets(setup, plan)
    assert never_fewer(base, sockets(replace(setup, nic=slow), plan))
    assert never_fewer(base, sockets(replace(setup, nic=late), plan))
    assert never_fewer(sockets(replace(setup, num_nics=2), plan), base)


@settings(max_examples=examples(120), deadline=None)
@given(setups, plans, st.floats(1e-3, 10.0), factors)
def test_a_tighter_promise(
    setup: Setup, plan: tuple[int, int], tpot_s: float, factor: float
) -> None:
    loose, tight = Goal(tpot_s=tpot_s), Goal(tpot_s=tpot_s / factor)
    assert never_fewer(sockets(setup, plan, loose), sockets(setup, plan, tight))
    whole, short = Goal(latency_s=1000 * tpot_s), Goal(latency_s=1000 * tpot_s / factor)
    assert never_fewer(sockets(setup, plan, whole), sockets(setup, plan, short))
    assert never_fewer(sockets(setup, plan), sockets(setup, plan, Goal(headroom=0.1 * factor)))


@settings(max_examples=examples(120), deadline=None)
@given(setups, plans, st.integers(1, 512))
def test_longer_sequences(setup: Setup, plan: tuple[int, int], more: int) -> None:
    workload = replace(setup.workload, output_tokens=setup.workload.output_tokens + more)
    base, longer = sockets(setup, plan), sockets(replace(setup, workload=workload), plan)
    # Fewer prompts a step: less k and v on the wire.
    del base["network bytes"], longer["network bytes"]
    if setup.workload.prompt_tokens:
        del base["round trips"], base["all"]
    assert all(longer[name] >= count for name, count in base.items())


@settings(max_examples=examples(120), deadline=None)
@given(setups, plans, factors)
def test_faster_memory(setup: Setup, plan: tuple[int, int], factor: float) -> None:
    assert isinstance(setup.cpu, Cpu)
    faster = replace(setup.cpu, transfers_per_s=setup.cpu.transfers_per_s * factor)
    larger = replace(setup, dram_gb=setup.cpu.memory_bytes * factor / 1e9)
    base = sockets(setup, plan)
    assert never_fewer(sockets(replace(setup, cpu=faster), plan), base)
    assert never_fewer(sockets(larger, plan), base)
    assert never_fewer(sockets(replace(setup, kv_dtype="int8"), plan), base)


@settings(max_examples=examples(120), deadline=None)
@given(setups, plans, factors)
def test_a_slower_gpu(setup: Setup, plan: tuple[int, int], factor: float) -> None:
    """A GPU that takes longer leaves the R-workers more time."""
    assert isinstance(setup.gpu, Gpu)
    slower = replace(
        setup.gpu,
        fp16_flops_per_s=setup.gpu.fp16_flops_per_s / factor,
        memory_bytes_per_s=setup.gpu.memory_bytes_per_s / factor,
    )
    assert never_fewer(sockets(replace(setup, gpu=slower), plan), sockets(setup, plan))
