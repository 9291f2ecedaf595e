"""From a checkpoint to profiles, a plan from them, and its bench: the whole way, on a tiny model.

That predictions are near is for ``benchmarks/sizing.py`` to show on a quiet machine; here the
tolerance is wide open, or shut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from zmq_r_workers import r_workers

from fastdecode.cli.main import main
from fastdecode.core.measurement import (
    DecodePoint,
    Machine,
    NetProfile,
    RProfile,
    SProfile,
    Timing,
    read_profile,
    write_profile,
)
from fastdecode.measure.link import NUM_LAYERS
from sworker.measure import COLD, WARM_UP, measure_s_part


@pytest.fixture(scope="module")
def made(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A model, both profiles, and a plan made from them."""
    model, where = str(tiny_checkpoint("llama")), tmp_path_factory.mktemp("profiles")
    s, r, plan = where / "s.json", where / "r.json", where / "plan"
    common = ["--model", model, "--repeats", "2", "--block-size", "16", "--kv-memory-gb", "0.05"]
    common += ["--status", str(where / "status.json")]
    sizes = ["--batches", "1,8,4", "--prompts", "8,32,4096"]
    assert main(["calibrate", "s", *common, *sizes, "--out", str(s)]) == 0
    sizes = ["--sequences", "1,4", "--contexts", "8,64"]
    assert main(["calibrate", "r", *common, *sizes, "--out", str(r)]) == 0
    question = ["--model", model, "--gpu", str(s), "--cpu", str(r), "--seq-len", "64"]
    question += ["--lanes", "1", "--batch", "8"]
    question += ["--max-sockets", "1"]  # also if a busy machine makes R-parts look slow
    assert main(["size", *question, "--emit", str(plan)]) == 0
    status = json.loads((where / "status.json").read_text())
    assert (status["command"], status["state"]) == ("calibrate r", "ended")
    assert status["model"] == model and status["phase"].startswith("R-part: 1 R-worker(s)")
    return SimpleNamespace(model=model, s=s, r=r, plan=plan / "plan.json", question=question)


def test_profiles_hold_what_was_asked(made: SimpleNamespace) -> None:
    s, r = read_profile(made.s), read_profile(made.r)
    assert isinstance(s, SProfile) and isinstance(r, RProfile)
    assert [point.size for point in s.layer] == [1, 4, 8] == [point.size for point in s.step]
    assert [point.size for point in s.prefill] == [8, 32], (
        "prompts beyond the model's limit are left out"
    )
    assert s.prompt_attention == "r", "on a CPU R-workers attend prompts, and so they did"
    assert s.shape.num_layers == 3 and s.dtype == "float32" and "torch" in s.machine.software
    assert len(r.decode) == 4 and r.memory_bytes == 50_000_000 and "torch" not in r.machine.software


def test_the_first_steps_of_a_cold_worker_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def time_step(worker: Any, batch: int, *_: Any) -> tuple[float, float]:
        ran.append(batch)
        return (20.0 if len(ran) <= COLD else 1.0) * worker.spec.num_layers, 1.0

    monkeypatch.setattr("sworker.measure._time_step", time_step)
    worker: Any = SimpleNamespace(spec=SimpleNamespace(num_layers=2))
    times = measure_s_part(worker, (4, 8), (), repeats=3)
    assert [point.timing.seconds for point in times.layer] == [(1.0,) * 3] * 2
    assert ran == [4] * (COLD + WARM_UP + 3) + [8] * (WARM_UP + 3)


def test_plans_say_that_they_were_measured(
    made: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *made.question, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    sources = {row["name"]: row["provenance"] for row in tree["inputs"]}
    assert sources["T(B)"] == sources["R"] == "measured"
    assert sources["network"] == "datasheet"


def test_dtypes_are_those_that_were_measured(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless they are given. The model's own is float32."""
    s, r = tmp_path / "s.json", tmp_path / "r.json"
    s.write_text(json.dumps({**json.loads(made.s.read_text()), "dtype": "float16"}))
    r.write_text(json.dumps({**json.loads(made.r.read_text()), "kv_dtype": "int8"}))
    profiles = ["--gpu", str(s), "--cpu", str(r), "--seq-len", "64"]
    assert main(["size", made.model, *profiles, "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["question"]
    assert (asked["dtype"], asked["kv_dtype"]) == ("float16", "int8")
    assert main(["size", made.model, *profiles, "--dtype", "float32"]) == 2
    assert "was measured in float16" in capsys.readouterr().err


@pytest.mark.parametrize(("tolerance", "code"), [("1e6", 0), ("1e-9", 1)])
def test_bench_judges_by_the_tolerance(
    made: SimpleNamespace, tolerance: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--plan", str(made.plan), "--model", made.model]
    options += ["--gpu", str(made.s), "--cpu", str(made.r)]
    assert main(["bench", *options, "--steps", "3", "--tolerance", tolerance, "--json"]) == code
    tree = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in tree["quantities"]]
    assert names == ["step_s", "tokens_per_s", "r_part_s", "s_part_s"]
    assert tree["within"] is (code == 0)
    assert 20 <= tree["ran"].pop("context_tokens") <= 60
    assert tree["ran"] == {"batch": 8, "lanes": 1, "r_workers": 1}
    for row in tree["quantities"]:
        assert row["relative_error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_bench_measures_what_it_is_not_given(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status.json"
    plan = ["--plan", str(made.plan), "--model", made.model, "--steps", "2"]
    assert main(["bench", *plan, "--tolerance", "1e6", "--status", str(status)]) == 0
    captured = capsys.readouterr()
    assert main(["top", str(status)]) == 0
    assert "fastdecode bench" in (shown := capsys.readouterr().out) and "running 2 steps" in shown
    assert "predicted" in captured.out and "step_ms" in captured.out
    assert "S-part" in captured.err and "R-part" in captured.err


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (["--plan", "none.json"], {}, "No such file"),
        (["--steps", "0"], {}, "--steps"),
        (["--tolerance", "-1"], {}, "--tolerance"),
        (["--gpu", "R"], {}, "profile of another kind"),
        (["--cpu", "none.json"], {}, "No such file"),
        ([], {"format": "x"}, "isn't a plan"),
        ([], {"plan": None}, "infeasible"),
        ([], {"plan": {"batch": -1}}, "Expected `int` >= 1 - at"),
        ([], {"question": {}}, "missing required field `model`"),
    ],
)
def test_bench_refuses_bad_options_and_plans(
    made: SimpleNamespace, tmp_path: Path, words: list[str], change: dict[str, object],
    message: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(made.plan.read_text()), **change}))
    options = ["--plan", str(path), "--model", made.model]
    assert main(["bench", *options, *[str(made.r) if word == "R" else word for word in words]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["s", "--repeats", "0"], "--repeats"),
        (["r", "--repeats", "0"], "--repeats"),
        (["r", "--r-workers", "0"], "--r-workers"),
        (["r", "--max-memory-gb", "0"], "--max-memory-gb"),
        (["r", "--kv-memory-gb", "-1"], "--kv-memory-gb"),
        (["r", "--kv-dtype", "int3"], "--kv-dtype int3"),
        (["s", "--device", "abacus"], "device"),
    ],
)
def test_calibrate_usage(
    made: SimpleNamespace,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    assert main(["calibrate", words[0], "--model", made.model, "--out", str(out), *words[1:]]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_the_way_to_an_r_worker_at_an_address(made: SimpleNamespace, tmp_path: Path) -> None:
    """Twice: it waits for its job afterwards."""
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    out = tmp_path / "net.json"
    with r_workers("*") as (_, (address,)):
        command = ["calibrate", "net", "--model", made.model, "--out", str(out), "--batches", "1,4"]
        for repeats in (1, 2):
            assert main([*command, "--repeats", str(repeats), "--r-worker", address]) == 0
            profile = read_profile(out)
            assert isinstance(profile, NetProfile) and profile.transport == "ZeroMQ"
            num_trips = repeats * (NUM_LAYERS - 1)
            assert [len(point.timing.seconds) for point in profile.transfer] == [num_trips] * 2


@pytest.mark.parametrize("sizes", ["", "1,x", "0,1", "99999999999"])
def test_bad_size_lists(
    made: SimpleNamespace, sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", "s", "--model", made.model, "--out", "x.json", "--batches", sizes])
    assert caught.value.code == 2 and "whole numbers" in capsys.readouterr().err


def test_calibrate_warns_before_it_writes(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A profile whose times fall as sizes grow."""
    machine = Machine("a CPU", 2, 1 << 30, "cpu", {"numpy": "2"})
    decode = tuple(DecodePoint(n, 64, Timing((1.0 / n,) * 3)) for n in (1, 2, 4))
    odd = RProfile(machine, 4, 2, 16, "float32", 16, 1, 1, 1 << 30, decode, (1e9,))
    monkeypatch.setattr("rworker.measure.measure_r_part", lambda *_: odd)
    out = tmp_path / "none" / "r.json"  # can't be written: what is said was said before
    command = ["calibrate", "r", "--model", str(tiny_checkpoint("llama")), "--out", str(out)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "warning: R-part: times fall as sizes grow" in said
    assert said.index("measure again on an idle machine") < said.index(str(out))


def test_a_measured_cpu_may_have_other_heads_where_the_gpu_attends(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    machine = Machine("a CPU", 2, 1 << 30, "cpu", {"numpy": "2"})
    sizes = ((1, 64), (4, 64), (1, 4096), (4, 4096))
    decode = tuple(DecodePoint(n, c, Timing((1e-5 + n * c * 1e-6,) * 3)) for n, c in sizes)
    out = tmp_path / "r.json"
    write_profile(out, RProfile(machine, 6, 2, 12, "int8", 16, 1, 1, 1 << 30, decode, (1e9,)))
    asked = f"--gpu A100 --cpu {out} --seq-len 512 --dtype bfloat16 --kv-dtype int8".split()
    assert main(["size", str(tiny_checkpoint("llama")), *asked]) == 0, "in FP8, without an R-part"
