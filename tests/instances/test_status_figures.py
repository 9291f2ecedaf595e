"""Status figures of an instance as they come over a connection: typed, finite and
bounded, or refused; nothing else is ever summed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.engine.instances.client import (
    EngineClient,
    status_from_json,
    status_to_json,
    sum_figures,
    sum_stats,
)
from fastdecode.engine.stats import EngineFigures, EngineStats, HolderFigures
from fastdecode.engine.transfers import FetchingTime
from fastdecode.wire.instances import InstanceWelcome, StatusReport

FIGURES = EngineFigures(
    1,
    (HolderFigures("r0", None, 8, 3, 20, 0.5), HolderFigures("r1", "it is gone", 8, 0, 0, 0.0)),
)  # fmt: skip
BAD_NUMBERS = ["1", None, [], {}, True, float("inf"), float("nan"), -1, 1 << 60]


def told() -> Any:
    stats = EngineStats(num_steps=3, wait_s=1.5)
    stats.ttft.add(0.2)
    stats.resumed.num_sequences, stats.tiers.fetch_s = 4, 0.5
    return json.loads(json.dumps(status_to_json(stats, FIGURES)))


def leaves(said: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all values, and all that hold some."""
    if isinstance(said, dict):
        below = [leaf for key, value in said.items() for leaf in leaves(value, (*way, key))]
    elif isinstance(said, list):
        below = [leaf for i, value in enumerate(said) for leaf in leaves(value, (*way, i))]
    else:
        below = []
    return [way, *below] if way else below


def changed(way: tuple[Any, ...], value: Any) -> Any:
    said = copy.deepcopy(told())
    place = said
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    return said


def test_what_an_engine_reports_comes_back_whole() -> None:
    stats, figures = status_from_json(told())
    assert (stats.num_steps, stats.wait_s, len(stats.ttft)) == (3, 1.5, 1)
    assert figures == FIGURES
    total = sum_stats([stats, stats])
    assert total.num_steps == 6 and len(total.ttft) == 2
    assert (total.resumed.num_sequences, total.tiers.fetch_s) == (8, 1.0)
    assert (stats.resumed.num_sequences, stats.tiers.fetch_s) == (4, 0.5)
    assert status_from_json(json.loads(json.dumps(status_to_json(stats, None))))[1] is None


def test_r_workers_of_a_lost_instance_are_lost_and_hold_nothing() -> None:
    welcome = InstanceWelcome(
        "x", InstanceRole.DECODE, "m", DType.FLOAT32, DType.FLOAT32, 64, 64, 16, 2, 64, 2, 1
    )
    instance = EngineClient("x", lambda message: None, welcome, welcome)
    instance.update(StatusReport(5, num_live_r_workers=1, figures=told()))
    assert instance.figures() == FIGURES
    instance.broken = WorkerError("rank 2 has ended")
    figures = instance.figures()
    assert figures is not None and [
        (each.name, each.lost, each.kv_blocks, each.kv_blocks_used) for each in figures.r_workers
    ] == [("r0", "rank 2 has ended", 8, 0), ("r1", "it is gone", 8, 0)]
    assert instance.num_live_r_workers == 0


@pytest.mark.parametrize("way", leaves(told()), ids=lambda way: ".".join(map(str, way)))
def test_no_figure_of_another_type_is_summed(way: tuple[Any, ...]) -> None:
    """Whatever a figure is replaced with is refused, or adds up with others'."""
    for value in (*BAD_NUMBERS, "x", 1e300, [[1, 2]], [None], {"r_workers": 1}):
        said = json.loads(json.dumps(changed(way, value)))
        try:
            stats, figures = status_from_json(said)
        except ProtocolError:
            continue
        sum_stats([stats, EngineStats()])
        if figures is not None:
            sum_figures([figures, FIGURES])
            json.dumps(status_to_json(stats, figures), allow_nan=False)


NUMBERS = [
    *((f.name,) for f in fields(EngineStats) if isinstance(told().get(f.name), (int, float))),
    *((name, key) for name in ("resumed", "tiers") for key in told()[name]),
]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("way", NUMBERS, ids=lambda way: ".".join(way))
def test_totals_are_numbers_within_bounds(way: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ProtocolError, match="totals is none"):
        status_from_json(changed(way, value))


def test_1e999_is_refused() -> None:
    said = json.loads(json.dumps(told()).replace('"num_steps": 3', '"num_steps": 1e999'))
    with pytest.raises(ProtocolError, match="totals is none"):
        status_from_json(said)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said.pop("num_steps"),
        lambda said: said["times"].update(ttft=[[1 << 40, 1]]),
        lambda said: said["times"].update(ttft=[[1, 2, 3]]),
        lambda said: said["times"].update(ttft={"a": 1}),
    ],
)
def test_what_is_left_out_or_elsewhere_is_refused(spoil: Callable[[Any], Any]) -> None:
    said = told()
    spoil(said)
    with pytest.raises(ProtocolError):
        status_from_json(said)


@pytest.mark.parametrize(("live", "is_true"), [(2, True), (0, True), (3, False)])
def test_live_r_workers_are_at_most_those_it_began_with(live: int, is_true: bool) -> None:
    seen = StatusReport(5, state="ready", num_live_r_workers=live, figures=told())
    if is_true:
        seen.check(2)
    else:
        with pytest.raises(ProtocolError, match="reports"):
            seen.check(2)


def test_moments_in_which_several_were_fetched_count_once() -> None:
    time = FetchingTime()
    assert time.add(3.0, 2.0) == 2.0  # 1 to 3
    assert time.add(4.0, 2.0) == 1.0  # 2 to 4
    assert time.add(6.0, 1.0) == 1.0  # 5 to 6
    assert time.add(10.0, 8.0) == 5.0, "2 to 10: that from 4 to 5, and from 6 on"
    assert time.add(12.0, 12.0) == 3.0, "0 to 12: the first second, and the last two"
