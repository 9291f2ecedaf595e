"""Lists of CPUs, NUMA nodes, and keeping to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdecode.core.errors import ConfigError
from rworker import binding, host
from rworker.binding import numa_node_cpus, parse_cpu_list, usable_nodes

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system doesn't bind processes"
)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("3,1", {1, 3}),
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        (" 4 , 5-6 ", {4, 5, 6}),
    ],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999", "1;2", "70000"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--cpus=.* is not a list of CPUs"):
        parse_cpu_list(text)


def test_numa_nodes(tmp_path: Path) -> None:
    for node, cpus in (("node0", "0-1,4\n"), ("node2", "2-3\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert numa_node_cpus(2, nodes=tmp_path) == {2, 3}
    with pytest.raises(ConfigError, match="--numa-node=1: this host has 0, 2"):
        numa_node_cpus(1, nodes=tmp_path)
    with pytest.raises(ConfigError, match="doesn't say"):
        numa_node_cpus(0, nodes=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("usable", "ranks", "expected"),
    [
        ({0, 1, 2, 3}, 2, [({0, 1}, 1), ({2, 3}, 1)]),
        ({1}, 2, [({1}, 2), ({1}, 2)]),
        ({1, 2}, 2, [({1}, 1), ({2}, 1)]),
        ({2, 3}, 3, [({2, 3}, 3)] * 3),
        ({3, 4, 9}, 1, [({3}, 1)]),
        ({9}, 1, [(None, 1)]),
    ],
)
def test_numa_node_auto_keeps_to_the_given_cpus(
    usable: set[int],
    ranks: int,
    expected: list[tuple[set[int] | None, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for node, cpus in (("node0", "0-1\n"), ("node1", "2-3\n"), ("node2", "\n"), ("node3", "4")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    monkeypatch.setattr(binding, "usable_cpus", lambda: frozenset(usable))
    monkeypatch.setattr(host, "usable_nodes", lambda: usable_nodes(nodes=tmp_path))
    monkeypatch.setattr(host.mpi_ranks, "local_size", lambda: ranks)
    monkeypatch.setattr(host, "is_bound", lambda: False)
    for rank, (cpus_of_rank, num_sharing) in enumerate(expected):
        bound: list[frozenset[int]] = []
        monkeypatch.setattr(host, "bind", bound.append)
        monkeypatch.setattr(host.mpi_ranks, "local_rank", lambda rank=rank: rank)
        assert host.bind_cpus(None, "auto") == num_sharing
        assert bound == ([] if cpus_of_rank is None else [cpus_of_rank])


def test_numa_node_auto_of_a_bound_rank_shares_its_cpus_with_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "usable_nodes", lambda: [frozenset({1})])
    monkeypatch.setattr(host, "is_bound", lambda: True)
    monkeypatch.setattr(host, "bind", lambda cpus: None)
    monkeypatch.setattr(host.mpi_ranks, "local_size", lambda: 4)
    assert host.bind_cpus(None, "auto") == 1


@needs_affinity
def test_a_bound_process_keeps_to_its_cpus_and_knows_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = (
        "from rworker.binding import *; print(is_bound()); bind(frozenset({%d})); "
        "print(len(usable_cpus()), is_bound())"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", script % cpu], capture_output=True, text=True, check=True
    )
    bound = len(os.sched_getaffinity(0)) > 1
    assert outcome.stdout.split() == ["False", "1", str(bound)]


@needs_affinity
def test_cpus_that_are_not_there() -> None:
    script = "from rworker.binding import *; bind(frozenset({60000}))"
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "ConfigError" in outcome.stderr and "60000" in outcome.stderr
