"""Stage times from datasheets and from profiles, and profiles that don't fit the question."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from cost_model.hardware import Hardware
from cost_model.plans.question import Goal, Setup
from cost_model.plans.size import size
from cost_model.predict import SystemTime
from cost_model.shapes import model_named
from cost_model.stages import LinkModel, Provenance, RPartModel, SPartModel
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.measurement import (
    DecodePoint,
    Machine,
    ModelShape,
    NetProfile,
    Point,
    RProfile,
    SProfile,
    Timing,
)

HARDWARE = Hardware.load()
SPEC = model_named("Llama-3 8B")
COSTS = TokenCosts(SPEC, DType.BFLOAT16, "bfloat16")
MACHINE = Machine("Some CPU", 64, 512 << 30, "Some GPU", {})
CALL_S, TOKEN_S, HOST_S = 2e-5, 2e-8, 5e-4


def t_of_b(batch: int) -> float:
    return max(4e-4, 1e-4 + 2e-6 * batch)


def s_profile() -> SProfile:
    layer = tuple(Point(b, Timing((t_of_b(b),) * 3)) for b in (1, 8, 64, 128, 256, 512, 1024))
    head = tuple(Point(b, Timing((1e-3 + 1e-6 * b,))) for b in (1, 64, 1024))
    prompt = tuple(Point(n, Timing((1e-4 * n,))) for n in (16, 256, 2048))
    layers = SPEC.num_layers
    step = tuple(
        Point(b, Timing((HOST_S + layers * t_of_b(b) + 1e-3 + 1e-6 * b,)))
        for b in (1, 64, 256, 512, 1024)
    )
    shape = ModelShape.of(SPEC)
    return SProfile(
        MACHINE, "Llama-3 8B", shape, "bfloat16", 80 << 30, layer, head, step, prompt, "s"
    )


def r_profile(**change: object) -> RProfile:
    points = tuple(
        DecodePoint(n, context, Timing((CALL_S + TOKEN_S * n * context,)))
        for n in (1, 32, 256)
        for context in (64, 1024)
    )
    profile = RProfile(
        MACHINE, 32, 8, 128, "bfloat16", 32, 2, 64, 400 << 30, points, (2.5e11, 2.5e11)
    )
    return structs.replace(profile, **change)


def net_profile() -> NetProfile:
    transfer = tuple(
        Point(n, Timing((1e-5 + n / 5e9,))) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    )
    return NetProfile(MACHINE, "mpi", transfer, Timing((2e-5, 2.2e-5, 2.1e-5)), Timing((4e-6,)))


def measured() -> Setup:
    return Setup(
        SPEC, DType.BFLOAT16, "bfloat16", s_profile(), r_profile(), net_profile(), Workload(0, 1024)
    )


def test_a_gpu_is_a_roofline() -> None:
    gpu = HARDWARE.gpu("A100")
    s = SPartModel.from_gpu(gpu, 1, COSTS)
    floor = COSTS.layer_weight_bytes / (gpu.memory_bytes_per_s * gpu.memory_efficiency.value)
    slope = COSTS.layer_flops(0) / (gpu.bf16_flops_per_s * gpu.compute_efficiency.value)  # type: ignore[operator]
    assert s.layer_s(1) == pytest.approx(floor + gpu.layer_overhead_s, rel=0.01)
    assert s.layer_s(4096) - s.layer_s(2048) == pytest.approx(2048 * slope, rel=1e-6)
    assert s.t_of_b(64) > s.layer_s(64), "the head has its share"
    assert s.prefill_s(0) == 0.0
    assert s.prefill_s(2000) > 2 * s.prefill_s(1000), (
        "attention of a prompt grows faster than its length"
    )


def test_more_gpus_share_but_must_talk() -> None:
    one, two = (SPartModel.from_gpu(HARDWARE.gpu("A100"), n, COSTS) for n in (1, 2))
    assert 0.5 * one.layer_s(1024) < two.layer_s(1024) < one.layer_s(1024)
    assert two.usable_memory_bytes == 2 * one.usable_memory_bytes
    assert two.layer_s(1) > one.layer_s(1) / 2 + 2 * HARDWARE.gpu("A100").all_reduce_s * 0.9


def test_a_cpu_is_bound_by_its_memory_until_heads_share() -> None:
    cpu = HARDWARE.cpu("EPYC 9354")
    per_read = cpu.memory_bytes_per_s * cpu.read_efficiency.value * cpu.attention_efficiency.value
    alone = RPartModel.from_cpu(
        cpu, TokenCosts(model_named("Llama-2 7B"), DType.FLOAT16, "float16")
    )
    assert alone.token_s == pytest.approx(2 * 4096 * 2 / per_read)
    shared = RPartModel.from_cpu(
        cpu, TokenCosts(model_named("Llama-3 70B"), DType.BFLOAT16, "bfloat16")
    )
    assert shared.token_s > 1.2 * 2 * 1024 * 2 / per_read, (
        "eight query heads on each byte: FMA units bind"
    )
    assert shared.read_token_s < shared.token_s


def test_profiles_replace_datasheets() -> None:
    system = measured().system()
    assert {system.s.provenance, system.r.provenance, system.link.provenance} == {
        Provenance.MEASURED
    }
    for batch in (1, 100, 400, 2000):
        assert system.s.layer_s(batch) == pytest.approx(t_of_b(batch), rel=1e-3)
        step_s = HOST_S + SPEC.num_layers * t_of_b(batch) + 1e-3 + 1e-6 * batch
        assert SPEC.num_layers * system.s.t_of_b(batch) == pytest.approx(step_s, rel=0.03)
    assert system.r.sockets_per_host == 2
    assert system.r.r_s(10, 5000) == pytest.approx(CALL_S + 5000 * TOKEN_S, rel=1e-6)
    assert system.r.read_token_s == pytest.approx(COSTS.kv_layer_bytes / 2.5e11)
    assert system.link.bytes_per_s == pytest.approx(5e9, rel=0.01)
    assert system.link.message_s == pytest.approx(4e-6)
    assert system.link.trip_s == pytest.approx(2.1e-5 - 4e-6), "the message is part of it"


def test_a_message_takes_no_longer_than_its_round_trip() -> None:
    link = LinkModel.from_profile(structs.replace(net_profile(), message=Timing((1e-3,))))
    assert (link.trip_s, link.message_s) == (0.0, pytest.approx(2.1e-5))


def test_prompts_that_r_workers_attend_cross_the_link() -> None:
    """What was measured with R-workers in the same process; q, k, v and o of 300 tokens."""
    profile = structs.replace(s_profile(), prompt_attention="r")
    near, far = (SystemTime(replace(measured(), gpu=s).system(), 1) for s in (s_profile(), profile))
    num_bytes = SPEC.num_layers * 300 * (COSTS.out_bytes + COSTS.back_bytes)
    inside = SystemTime(replace(far.system, link=LinkModel.within_process()), 1)
    for num_decoding in (0, 1, 64):
        for prompts in ([(0, 300)], [(50, 100), (0, 200)]):
            alone_s = near.s_part_s(num_decoding, prompts)
            crossed_s = far.s_part_s(num_decoding, prompts) - alone_s
            assert crossed_s == pytest.approx(num_bytes / far.system.link.bytes_per_s)
            assert inside.s_part_s(num_decoding, prompts) == alone_s


def test_plans_end_where_measuring_ended() -> None:
    assert measured().system().s.max_batch == 1024
    sizing = size(replace(measured(), nic=HARDWARE.nic("NDR")), Goal(min_gain=0.001))
    assert sizing.plan is not None and 1000 < sizing.plan.lane_batch <= 1024
    assert sizing.gpu_only is not None and sizing.gpu_only.batch <= 1024
    with pytest.raises(ConfigError, match="measured up to 1024"):
        size(measured(), Goal(batch=1 << 20))


def test_a_plan_from_profiles() -> None:
    sizing = size(measured(), Goal())
    assert sizing.feasible and sizing.plan is not None
    # Datasheets' guesses are 15 to 20 % off; what was measured without noise is not.
    assert sizing.plan.slow.step_s < 1.05 * sizing.plan.expected.step_s
    assert not any("int8" in row.change for row in sizing.what_ifs), "only bfloat16 was measured"


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (lambda: replace(measured(), spec=model_named("Qwen2.5 7B")), "measured for Llama-3 8B"),
        (
            lambda: replace(measured(), gpu=HARDWARE.gpu("A100"), spec=model_named("Llama-2 7B")),
            "32/8 of 128",
        ),
        (lambda: replace(measured(), dtype=DType.FLOAT16), "use dtype='bfloat16'"),
        (lambda: replace(measured(), kv_dtype="float16"), "use kv_dtype='bfloat16'"),
        (lambda: replace(measured(), num_gpus=2), "num_gpus with a measured gpu"),
    ],
)
def test_profiles_of_something_else(setup: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setup().system()  # type: ignore[operator]


def test_links() -> None:
    nic = HARDWARE.nic("100GbE")
    link = LinkModel.from_nic(nic)
    assert link.transfer_s(12.5e9) == pytest.approx(1 / nic.line_efficiency.value)
    assert link.trip_s == nic.round_trip_s
    assert link.message_s == nic.message_s
    inside = LinkModel.within_process()
    assert inside.transfer_s(1e12) == inside.trip_s == inside.message_s == 0.0
