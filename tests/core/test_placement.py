"""Placement files, and instances that are ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole, PlacedInstance
from fastdecode.core.config.placement import PLACEMENT_FORMAT, read_placement
from fastdecode.core.errors import ConfigError
from fastdecode.wire.mpirun_line import JobHost, JobLine
from fastdecode.wire.ranks import InstanceRanks, RankRole

PREFILL, DECODE = (
    {"role": role, "tp": 1, "pp": 1, "r_worker_sockets": sockets}
    for role, sockets in (("prefill", 0), ("decode", 3))
)
WHOLE: dict[str, Any] = {
    "format": PLACEMENT_FORMAT,
    "model": "llama-2-7b",
    "instances": [PREFILL, PREFILL, DECODE],
    "slo": {"ttft_s": 0.4, "tpot_s": 0.04, "attainment": 0.9},
    "workload": {"rate": 3.0, "described": "as it comes"},
}


def written(path: Path, **changed: Any) -> Path:
    path.write_text(json.dumps({**WHOLE, **changed}))
    return path


def test_a_placement(tmp_path: Path) -> None:
    instances = read_placement(written(tmp_path / "p.json"))
    assert instances == (
        PlacedInstance(InstanceRole.PREFILL, 1),
        PlacedInstance(InstanceRole.PREFILL, 1),
        PlacedInstance(InstanceRole.DECODE, 3),
    )
    config = EngineConfig.of("m", instances=(",".join(map(str, instances)),), replicas=1)
    assert config.instances.placed == instances
    # An R-worker alone has no neighbour: its prompts are run again.
    assert [config.of_instance(number).r_part.replicas for number in range(3)] == [0, 0, 1]


def test_where_an_instance_has_no_r_workers_kv_is_on_its_devices(tmp_path: Path) -> None:
    """As planned; for prompts, where the command says so."""
    decode = {**DECODE, "pp": 2, "r_worker_sockets": 0}
    path = written(tmp_path / "p.json", instances=[PREFILL, decode])
    instances = read_placement(path)
    assert list(map(str, instances)) == ["prefill:1", "decode:0:pp=2"]
    config = EngineConfig.of("m", instances=tuple(map(str, instances)))
    own = [config.of_instance(number) for number in range(2)]
    assert [each.r_part.kv_placement for each in own] == ["r", "gpu"]
    assert own[0].s_part.pp == 1 and own[1].s_part.pp == 2
    path = written(tmp_path / "p.json", instances=[PREFILL, decode])
    assert list(map(str, read_placement(path, on_devices=True))) == ["prefill:0", "decode:0:pp=2"]
    line = JobLine((), (), (JobHost("a", 1), JobHost("b", 2)), instances=read_placement(path))
    assert [host for host, _ in line._ranks()] == ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"format": "fastdecode-placement/2"}, "its format is 'fastdecode-placement/2'"),
        ({"hosts": ["a"]}, "it has 'hosts'"),
        ({"instances": []}, "no list of 1 to 64"),
        ({"instances": [3]}, "instance 0 is no object"),
        ({"instances": [{**PREFILL, "command": "sh"}]}, "instance 0 has 'command'"),
        ({"instances": [PREFILL, {**DECODE, "role": "all"}]}, "instance 1 has the role 'all'"),
        ({"instances": [{**DECODE, "tp": 65}]}, "tp of instance 0 is 65"),
        ({"instances": [{**DECODE, "pp": 2}]}, "3 sockets for 2 stages"),
        ({"instances": [{**DECODE, "pp": True}]}, "pp of instance 0 is True"),
        ({"instances": [{**DECODE, "r_worker_sockets": -1}]}, "r_worker_sockets of instance 0"),
        ({"instances": [{**DECODE, "r_worker_sockets": 0, "tp": 2}]}, "has no R-worker"),
    ],
)
def test_no_placement(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    path = written(tmp_path / "p.json", **changed)
    with pytest.raises(ConfigError, match=re.escape(f"--placement {path}: ")) as caught:
        read_placement(path)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"instances": ("10.0.0.1:7000",)}, "neither an address tcp://HOST:PORT"),
        ({"instances": ("prefil",)}, "nor of the form ROLE:R_WORKERS"),
        ({"instances": ("prefill",)}, "none of these instances decodes"),
        ({"instances": ("both:0:tp=2",)}, "no tp or replicas yet"),
        ({"instances": ("both:0", "both:2"), "replicas": 1}, "or give it R-workers"),
        ({"instances": ("decode:1025",)}, "nor of the form"),
        ({"instances": ("decode:1",)}, "none of these instances runs prompts"),
        ({"instances": ("both:1",) * 65}, "more than 64"),
        ({"instances": ("both:1", "tcp://127.0.0.1:1")}, "Remove the others"),
        ({"instances": ("both:1",), "tp": 2}, "tp=2 contradicts instances="),
        ({"instances": ("both:1:pp=2:tp=2",)}, "nor of the form"),
        ({"instances": ("both:3:pp=2",)}, "3 are no multiple of 2"),
        ({"instances": ("both:1:tp=65",)}, "tp=65"),
        (
            {"instances": ("both:2:tp=2:pp=2",), "r_partition": "heads"},
            "not supported by an instance of 2 stages yet",
        ),
        (
            {"instances": ("both:1",), "kv_placement": "gpu"},
            "the instance both:1 has 1: Remove them (both:0)",
        ),
    ],
)
def test_ranks_that_can_not_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        EngineConfig.of("m", **options)


def test_ranks_of_instances_with_several_s_workers() -> None:
    prefill = PlacedInstance(InstanceRole.PREFILL, 1, tp=2)
    decode = PlacedInstance(InstanceRole.DECODE, 4, tp=2, pp=2)
    ranks = InstanceRanks((prefill, decode))
    assert ranks.size == 12 and [each.first for each in ranks.stages] == [1, 4]
    assert [list(each.s_ranks) for each in ranks.stages] == [[1, 2], [4, 5, 6, 7]]
    s_ranks = [rank for rank in range(12) if ranks.role(rank).name in ("LEADER", "STAGE", "MIRROR")]
    assert s_ranks == [1, 2, 4, 5, 6, 7] and ranks.role(0) is RankRole.CONTROLLER
    stages = ranks.stages[1]
    assert [(stages.stage(rank), stages.place(rank)) for rank in range(4, 8)] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert [stages.leader(stage) for stage in range(2)] == [4, 6] and stages.others(1) == [0]
    assert [list(stages.r_workers(12, stage)) for stage in range(2)] == [
        [8, 9], [10, 11],
    ]  # fmt: skip
    assert (str(prefill), str(decode)) == ("prefill:1:tp=2", "decode:4:tp=2:pp=2")


def test_a_placement_with_several_s_workers(tmp_path: Path) -> None:
    prefill, decode = {**PREFILL, "tp": 2, "pp": 2}, {**DECODE, "pp": 3}
    instances = read_placement(written(tmp_path / "p.json", instances=[prefill, decode]))
    assert instances == (
        PlacedInstance(InstanceRole.PREFILL, 2, tp=2, pp=2),  # an R-worker for each stage
        PlacedInstance(InstanceRole.DECODE, 3, pp=3),
    )
    config = EngineConfig.of("m", instances=tuple(map(str, instances)))
    assert config.instances.placed == instances
    own = config.of_instance(0)
    assert (own.s_part.tp, own.s_part.pp, own.instances.instances) == (2, 2, ())
