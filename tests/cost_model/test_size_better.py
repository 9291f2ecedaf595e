"""Better hardware never gives a worse answer: random questions, each asked again with one thing
faster, larger or more of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.hardware import Hardware
from cost_model.plans.question import Goal, Setup
from cost_model.plans.search import Search
from cost_model.plans.size import Sizing, size, what_if
from cost_model.shapes import model_named
from cost_model.workload import Workload
from examples import examples
from fastdecode.core.dtype import DType

HARDWARE = Hardware.load()
MODELS = ("Llama-2 7B", "Llama-2 13B", "Llama-3 8B", "Qwen2.5 7B", "Qwen3 30B-A3B", "Llama-3 70B")
ROUNDING = 1e-9

setups = st.builds(
    lambda model, kv, gpu, cpu, nic, prompt, output: Setup(
        model_named(model), DType.FLOAT16, kv, gpu, cpu, nic, Workload(prompt, output)
    ),
    st.sampled_from(MODELS),
    st.sampled_from(("float16", "int8")),
    st.sampled_from(list(HARDWARE.gpus.values())),
    st.sampled_from(list(HARDWARE.cpus.values())),
    st.sampled_from(list(HARDWARE.nics.values())),
    st.integers(0, 1024),
    st.integers(1, 1024),
)
goals = st.builds(
    lambda sockets, tpot_s, batch: Goal(max_sockets=sockets, tpot_s=tpot_s, batch=batch),
    st.none() | st.integers(1, 64),
    st.none() | st.floats(0.02, 0.5),
    st.none() | st.integers(1, 2000),
)


def _more(part: str, *names: str, shorter: bool = False) -> Callable[[Setup, float], Setup]:
    """Return a change that multiplies fields of a part by a factor, or divides them."""

    def change(setup: Setup, factor: float) -> Setup:
        old, by = getattr(setup, part), 1 / factor if shorter else factor
        fields = {name: type(getattr(old, name))(getattr(old, name) * by) for name in names}
        return replace(setup, **{part: replace(old, **fields)})

    return change


BETTER: dict[str, Callable[[Setup, float], Setup]] = {
    "GPU compute": _more("gpu", "fp16_flops_per_s"),
    "GPU bandwidth": _more("gpu", "memory_bytes_per_s"),
    "GPU memory": _more("gpu", "memory_bytes"),
    "PCIe": _more("gpu", "pcie_bytes_per_s"),
    "CPU bandwidth": _more("cpu", "transfers_per_s"),
    "CPU clock": _more("cpu", "base_ghz"),
    "CPU memory": _more("cpu", "memory_bytes"),
    "NIC": _more("nic", "line_bits_per_s"),
    "latency": _more("nic", "round_trip_s", "message_s", shorter=True),
    "ports": lambda setup, factor: replace(setup, num_nics=setup.num_nics + int(factor)),
    "sockets": lambda setup, factor: setup,
}


@settings(max_examples=examples(2000, share=40), deadline=None)
@given(setups, goals, st.sampled_from(sorted(BETTER)), st.floats(1.01, 8.0))
def test_a_better_machine_never_gives_less(
    setup: Setup, goal: Goal, what: str, factor: float
) -> None:
    if what == "sockets" and goal.max_sockets is not None:
        more = replace(goal, max_sockets=goal.max_sockets + int(factor))
    else:
        more = goal
    worse, better = size(setup, goal), size(BETTER[what](setup, factor), more)
    # What the hardware can give never falls, and the plan gives all but a stated part of it.
    assert better.most_tokens_per_s >= worse.most_tokens_per_s * (1 - ROUNDING)
    for sizing in (worse, better):
        if sizing.feasible:
            assert sizing.plan is not None
            plan_tokens = sizing.plan.expected.tokens_per_s
            assert plan_tokens >= sizing.most_tokens_per_s / (1 + goal.gain) * (1 - ROUNDING)
        else:
            assert sizing.nearest and sizing.most_tokens_per_s == 0
    assert better.feasible or not worse.feasible
    _check_headline(worse, better, goal)


def _check_headline(worse: Sizing, better: Sizing, goal: Goal) -> None:
    """What all placements give falls by no more than the plan's gain that is left out. The
    headline itself is the GPU alone where offloading is not worth it."""
    if worse.headline is None or not worse.feasible:
        return
    assert better.headline is not None and better.plan is not None and worse.plan is not None
    least = worse.headline.tokens_per_s / (1 + goal.gain) * (1 - ROUNDING)
    most = max(each.tokens_per_s for each in better.headlines)
    assert most >= least
    assert better.verdict is not None
    assert better.verdict.offload is (better.headline.kv_placement != "gpu")
    if better.verdict.offload:
        assert better.headline.tokens_per_s >= least / 1.02
    if goal.max_sockets is None and goal.batch is None:
        fewer = better.plan.sockets < worse.plan.sockets or better.plan.batch < worse.plan.batch
        assert fewer or most >= 0.99 * worse.headline.tokens_per_s


@settings(max_examples=examples(400, share=40), deadline=None)
@given(setups, goals, st.sampled_from(sorted(BETTER)), st.floats(1.01, 8.0))
def test_better_machine_needs_no_more_sockets_for_the_same_plan(
    setup: Setup, goal: Goal, what: str, factor: float
) -> None:
    sizing = size(setup, goal, HARDWARE)
    plan = sizing.plan
    if plan is None or not sizing.feasible:
        return
    search = Search(sizing.system, goal)
    row = what_if(search, plan, what, BETTER[what](setup, factor), plan.lanes)
    rows = [row, *(each for each in sizing.what_ifs if each.change.startswith("NIC"))]
    for each in rows:
        assert each.sockets is not None and each.sockets <= plan.sockets, each
        assert each.tokens_per_s is not None and each.tpot_s is not None
        assert each.tokens_per_s >= plan.expected.tokens_per_s * (1 - ROUNDING)
        assert each.tpot_s <= plan.expected.tpot_s * (1 + ROUNDING)
    for each in sizing.what_ifs:
        if goal.max_sockets is not None and each.sockets is not None:
            assert each.sockets <= goal.max_sockets
