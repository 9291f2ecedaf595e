"""What ZeroMQ's I/O threads let through, worked out by hand: an 8B Llama on one
GPU and R-workers on other hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sizing import HARDWARE, setup

from cost_model.plans.question import Goal, Setup
from cost_model.plans.report import as_text
from cost_model.plans.size import size
from cost_model.stages import TRANSPORTS
from fastdecode.core.dtype import DType

ROUND = {name: replace(TRANSPORTS[name], thread_bytes_per_s=rate)
         for name, rate in (("zmq-encrypted", 1.5e9), ("zmq-plain", 6e9))}  # fmt: skip
TOKEN_BYTES = 32 * (2 * 32 + 2 * 8) * 128 * 2
"""Layers, heads of q and o, of k and v, their width, two bytes: 655,360."""


def ask(**more: Any) -> Setup:
    bfloat16 = {"dtype": DType.BFLOAT16, "kv_dtype": "bfloat16"}
    return replace(setup("Llama-3 8B", "H200", "EPYC 9654", "400GbE"), **bfloat16, **more)


@pytest.mark.parametrize(
    ("name", "threads", "sockets", "tokens_per_s"),
    [
        ("zmq-encrypted", 1, 16, 2_289),
        ("zmq-encrypted", 4, 16, 9_155),
        ("zmq-encrypted", 4, 2, 4_578),  # a connection has one thread
        ("zmq-plain", 1, 16, 9_155),
    ],
)
def test_threads_that_carry_a_tokens_bytes_set_the_pace(
    name: str, threads: int, sockets: int, tokens_per_s: float
) -> None:
    """1.5e9 bytes a second / 655,360 bytes a token = 2,289 tokens a second."""
    transport = replace(ROUND[name], num_threads=threads)
    step = ask(transport=transport).system().predict(256, 2, sockets)
    assert step.limit == "ZeroMQ I/O"
    assert step.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-3)
    assert step.tokens_per_s == pytest.approx(
        transport.thread_bytes_per_s * min(threads, sockets) / TOKEN_BYTES
    )


def test_size_names_the_threads_that_limit_it() -> None:
    assert "ZeroMQ" not in as_text(size(ask(), Goal()), explain=True), "MPI has no such threads"
    one = replace(TRANSPORTS["zmq-encrypted"], num_threads=1)
    sizing = size(ask(transport=one), Goal(batch=512, lanes=2), HARDWARE)
    assert sizing.plan is not None and sizing.plan.expected.limit == "ZeroMQ I/O"
    (row,) = [row for row in sizing.plan.constraints if row.name == "ZeroMQ I/O"]
    assert "--key none" in row.mend and "MPI" in row.mend
    text = as_text(sizing, explain=True)
    assert "1.9 GB/s a thread, 1 at most" in text


def test_enough_threads_do_not_stand_in_the_way() -> None:
    """Each is a connection's: the plan has as many sockets as it needs threads."""
    many = replace(TRANSPORTS["zmq-plain"], num_threads=16)
    sizing = size(ask(transport=many), Goal(), HARDWARE)
    assert sizing.feasible and sizing.plan is not None
    (row,) = [row for row in sizing.plan.constraints if row.name == "ZeroMQ I/O"]
    assert row.min_sockets is not None and 1 < row.min_sockets <= sizing.plan.sockets
