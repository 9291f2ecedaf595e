"""ZeroMQ's own threads: how many, and what they take."""

from __future__ import annotations

import contextlib
import sys

import pytest

zmq = pytest.importorskip("zmq")

from messages_for_tests import attend, to_r_worker  # noqa: E402

from fastdecode.wire.zmq.hub import (  # noqa: E402
    ZmqHub,
    ZmqListener,
    io_cpu_s,
    io_threads_for,
)


@pytest.mark.parametrize(
    ("num_peers", "num_cores", "expected"),
    [(1, 64, 1), (4, 64, 4), (16, 64, 16), (16, 16, 4), (4, 2, 1), (0, 64, 1)],
)
def test_one_an_r_worker_and_a_quarter_of_the_cores(
    num_peers: int, num_cores: int, expected: int
) -> None:
    assert io_threads_for(num_peers, num_cores) == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_hub_has_as_many_as_it_is_given(num_threads: int) -> None:
    with contextlib.closing(ZmqHub(num_io_threads=num_threads)) as hub:
        hub.add("tcp://127.0.0.1:9")
        assert hub._context.get(zmq.IO_THREADS) == num_threads


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads take")
def test_what_they_take_is_counted() -> None:
    before_s = io_cpu_s()
    with (
        contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r")) as listener,
        contextlib.closing(ZmqHub()) as hub,
    ):
        connection = hub.add(listener.address)
        connection.send(to_r_worker()[0])
        for step in range(20):
            connection.send(attend(2000, step=step))
        for _ in range(21):
            listener.receive_any(20)
        assert io_cpu_s() > before_s
