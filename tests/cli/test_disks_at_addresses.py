"""R-workers at addresses, each with a disk: what one that is killed had in
memory is forgotten, and whoever comes in its place offers what is on its disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_talks import talk
from mpi_launch import FASTDECODE, running
from zmq_r_workers import r_workers

from fastdecode import LLM
from rworker.tiers.disk import slot_files

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

LIMIT_S = 120.0
OPTIONS = {"dtype": "float32", "block_size": 16, "max_num_sequences": 4, "prefix_cache": "on"}


def test_a_replacement_offers_the_disk_of_one_that_was_killed(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = str(tiny_checkpoint("llama"))
    with LLM(path, **{**OPTIONS, "prefix_cache": "off"}, kv_memory_gb=0.01, r_threads=1) as llm:
        expected = talk(llm)
    disk = ("--cache-disk", str(tmp_path / "kept"), "--cache-disk-gb", "0.001")
    few = (*disk, "--kv-memory-gb", "0.0001")
    with (
        r_workers("*", "*", options=few) as (jobs, addresses),
        LLM(
            path, **OPTIONS, r_worker_addresses=addresses, swap_threshold=0.9,
            worker_silence_s=5.0,
        ) as llm,
    ):  # fmt: skip
        assert talk(llm, "a") == expected
        assert llm.stats.tiers.num_stored > 0 and not llm.stats.tiers.num_found
        jobs[0].process.kill()
        command = [*FASTDECODE, "r-worker", "--threads", "1", "--bind", addresses[0], *few]
        with running(command):
            until_s, number = time.monotonic() + LIMIT_S, 0
            while not llm.stats.tiers.num_found:
                assert time.monotonic() < until_s, "nobody has come in its place"
                assert talk(llm, f"b{number}-") == expected
                number += 1
            assert talk(llm, "c") == expected
        assert len(slot_files(tmp_path / "kept")) == 2
