"""How an R-worker comes to its way of prefetching, and that it uses it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_kernels import BlockLayout, reference
from cpu_kernels.prefetch import DEFAULT_PREFETCH, PREFETCHES, Prefetch, find_prefetch
from cpu_kernels.prefetch_trial import MARGIN, MIN_TURNS, Trial, favour, is_calm, measure_prefetch
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import AttentionSpec
from rworker import prefetching
from rworker.attention import AttentionExecutor
from rworker.instructions import Prepare
from rworker.prefetching import MIN_CACHE_BYTES, PrefetchChoices, kept_trials

LAYOUT = BlockLayout(8, 128, "bfloat16")
THREADS = {"num_threads": 2}


class Measured:
    """A measurement that favours one way."""

    def __init__(self, name: str, *, is_calm: bool = True) -> None:
        self.trial = Trial(find_prefetch(name), {"t0": 21.2, "t1": 25.4}, is_calm)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **options: Any) -> Trial:
        self.calls.append(args)
        return self.trial


def choose(
    choices: PrefetchChoices, layout: BlockLayout = LAYOUT, cache_bytes: int = 1 << 35
) -> str:
    return choices.choose(layout, 32, "bfloat16", cache_bytes, THREADS).name


def test_a_measurement_that_cannot_be_kept_is_not_promised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines: list[str] = []
    choices = PrefetchChoices(tmp_path / "file" / "prefetch", measure=Measured("t1"))
    assert choices.choose(LAYOUT, 32, "bfloat16", 1 << 35, THREADS, lines.append).name == "t1"
    assert lines == ["measuring how to prefetch"]


def test_a_measurement_is_kept_on_disk(tmp_path: Path) -> None:
    measured = Measured("t1")
    lines: list[str] = []
    for _ in range(2):
        choices = PrefetchChoices(tmp_path, measure=measured)
        way = choices.choose(LAYOUT, 32, "bfloat16", 1 << 35, THREADS, lines.append)
        assert way.name == "t1"
    assert lines == ["measuring how to prefetch (kept for the next start)"]
    assert measured.calls == [(LAYOUT, 32, "bfloat16")]
    (kept,) = kept_trials(tmp_path)
    assert kept.text() == (
        "bfloat16 for bfloat16, 32/8 heads of 128, blocks of 64, threads 2: t1 "
        "(GB/s: t0 21.2, t1 25.4)"
    )
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # no lock is left


def test_another_layout_is_measured_by_itself(tmp_path: Path) -> None:
    assert choose(PrefetchChoices(tmp_path, measure=Measured("t1"))) == "t1"
    other = BlockLayout(8, 128, "int8")
    assert choose(PrefetchChoices(tmp_path, measure=Measured("none")), other) == "none"
    assert choose(PrefetchChoices(tmp_path, measure=Measured("none"))) == "t1"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"cpu": 1}', b"\xff"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    choose(PrefetchChoices(tmp_path, measure=Measured("t1")))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert choose(PrefetchChoices(tmp_path, measure=Measured("none"))) == "none"
    assert choose(PrefetchChoices(tmp_path, measure=Measured("t1"))) == "none"


def test_other_versions_measure_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(PrefetchChoices(tmp_path, measure=Measured("t1")))
    monkeypatch.setattr(prefetching, "_versions", lambda: "another")
    assert kept_trials(tmp_path) == []
    assert choose(PrefetchChoices(tmp_path, measure=Measured("none"))) == "none"


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    measured = Measured("t1")
    assert choose(PrefetchChoices(tmp_path / "file" / "x", measure=measured)) == "t1"


def test_small_caches_and_small_blocks_are_not_measured(tmp_path: Path) -> None:
    measured = Measured("t1")
    choices = PrefetchChoices(tmp_path, measure=measured)
    assert choose(choices, cache_bytes=MIN_CACHE_BYTES - 1) == DEFAULT_PREFETCH.name
    assert choose(choices, BlockLayout(2, 32, "float32")) == DEFAULT_PREFETCH.name
    assert not measured.calls and not list(tmp_path.iterdir())


def test_the_environment_names_a_way(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "FASTDECODE_PREFETCH": "none"}
    assert choose(PrefetchChoices.of_host(environ)) == "none"
    with pytest.raises(ConfigError, match="FASTDECODE_PREFETCH: prefetch='t2' is not one of t0"):
        PrefetchChoices.of_host(environ | {"FASTDECODE_PREFETCH": "t2"})


def test_what_a_busy_host_shows_is_not_kept(tmp_path: Path) -> None:
    assert choose(PrefetchChoices(tmp_path, measure=Measured("t0", is_calm=False))) == "t0"
    assert not list(tmp_path.iterdir())


def turns(**factors: float) -> dict[Prefetch, list[float]]:
    """Seconds that go up and down with the turns, times each way's factor."""
    noise = np.random.default_rng(1).uniform(1, 3, MIN_TURNS)
    return {
        way: [float(s) * factors.get(way.name.replace("-", "_"), 1) for s in noise]
        for way in PREFETCHES
    }


def test_noise_does_not_leave_the_default() -> None:
    """Medians of the turns' ratios, a margin, and nearly every turn."""
    assert favour(turns()) is DEFAULT_PREFETCH
    assert favour(turns(t1=1 - MARGIN / 2)) is DEFAULT_PREFETCH
    for seed in range(200):  # ways that differ by noise alone
        noise = np.random.default_rng(seed).uniform(1, 3, (len(PREFETCHES), MIN_TURNS))
        seconds = dict(zip(PREFETCHES, noise.tolist(), strict=True))
        assert favour(seconds) is DEFAULT_PREFETCH


def test_a_way_that_is_faster_is_favoured() -> None:
    assert favour(turns(t1=0.9, none=3)).name == "t1"
    # Of two that are as good to a margin the first, even if the other one was luckier.
    assert favour(turns(t0_far=0.8, t1=0.79)).name == "t0-far"
    assert favour(turns(t0_far=0.79, t1=0.8)).name == "t0-far"
    assert favour(turns(t0_far=0.9, t1=0.8)).name == "t1"


def test_a_busy_host_is_noticed() -> None:
    assert is_calm([1.0, 1.1, 1.0, 1.2, 1.1, 5.0, 1.0, 1.1])
    assert not is_calm([1.0, 1.6, 1.0, 1.5, 2.1, 1.8, 1.0, 1.1])


def test_a_measurement_takes_turns_until_its_time_is_over() -> None:
    """Every way as often as the others."""
    ticks = iter(np.arange(0.0, 100.0, 0.01))
    trial = measure_prefetch(
        BlockLayout(2, 20, "int8"), 6, "float32", num_bytes=1, clock=lambda: float(next(ticks))
    )
    assert trial.chosen is DEFAULT_PREFETCH and trial.is_calm
    assert list(trial.gb_per_s) == ["t0", "t0-far", "t1", "t1-far"]
    assert len(set(np.round(list(trial.gb_per_s.values()), 6))) == 1
    assert round(next(ticks) / 0.01) == 1 + MIN_TURNS * 4 * 2 + 1  # looks at the clock


def test_an_r_worker_attends_as_it_chose() -> None:
    """Of layers with unlike query heads each has its own."""
    asked: list[int] = []
    ways = {4: find_prefetch("t1"), 2: find_prefetch("none")}

    def choose(layout: BlockLayout, num_q_heads: int, *args: Any) -> object:
        asked.append(num_q_heads)
        return ways[num_q_heads]

    executor = AttentionExecutor(
        kernels=reference,  # type: ignore[arg-type]
        prefetches=SimpleNamespace(choose=choose),  # type: ignore[arg-type]
    )
    specs = tuple(AttentionSpec(heads, 2, 16, scale=1.0) for heads in (4, 2, 4))
    layout = BlockLayout(2, 16, "float32")
    executor.prepare(Prepare(HolderId(0), layout, 2, specs, DType("float32")))
    layers = executor._caches[HolderId(0)].layers
    assert sorted(asked) == [2, 4]
    assert [layer.attending["prefetch"] for layer in layers] == [ways[4], ways[2], ways[4]]
