"""ZeroMQ's own threads: how many, and what they take."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from fastdecode.wire.zmq.hub import ZmqHub
from fastdecode.wire.zmq.io_threads import io_cpu_s, io_threads_for


@pytest.mark.parametrize(
    ("num_peers", "num_cores", "expected"),
    [(1, 64, 1), (4, 64, 4), (16, 64, 16), (16, 16, 4), (4, 2, 1), (0, 64, 1)],
)
def test_one_an_r_worker_and_a_quarter_of_the_cores(
    num_peers: int, num_cores: int, expected: int
) -> None:
    assert io_threads_for(num_peers, num_cores) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_hub_has_as_many_as_it_is_given(num_threads: int) -> None:
    def count() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith("ZMQbg/IO") for name in names)

    before = count()
    with contextlib.closing(ZmqHub(num_io_threads=num_threads)) as hub:
        hub.add("tcp://127.0.0.1:9")
        assert count() == before + num_threads
        assert io_cpu_s() >= 0.0
