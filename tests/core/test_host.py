"""What a process sees of its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.core.host import facts as host


def test_numa_nodes_are_known_by_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_NODES", tmp_path)
    assert host.this_host().numa_cpus == (), "a host that does not say"
    for node, cpus in {0: "0-3", 2: "4-7", 10: "8"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert host.this_host().numa_cpus == ("0-3", "", "4-7", *[""] * 7, "8")
