"""Jobs over three hosts, which are network namespaces of this one: a bridge
between them, and links of 2 Gb/s."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from generate_jobs import GenerateJob, job_of
from limited_steps import StepLimit
from mpi_launch import FASTDECODE, needs_mpi, run, running

from fastdecode.cli.main import main

Asked: TypeAlias = Callable[[int], GenerateJob]
HOSTS = ("s0", "r0", "r1")
NETWORK = "10.77.0.0/24"

# In the place of ssh: AGENT HOST COMMAND ...
AGENT = """#!/bin/bash
host=$1; shift
exec ip netns exec {prefix}$host unshare -u bash -c "hostname $host; $*"
"""


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Net:
    """Hosts of their own names, each with lo and eth0 only."""

    prefix: str

    def at(self, host: str, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        inside = ["unshare", "-u", "bash", "-c", 'hostname "$0"; exec "$@"', host, *command]
        return ["ip", "netns", "exec", self.prefix + host, *inside]

    def address(self, host: str) -> str:
        return f"10.77.0.{1 + HOSTS.index(host)}"

    def cut_off(self, host: str) -> None:
        sh("ip", "-n", self.prefix + host, "link", "set", "eth0", "down")

    def build(self) -> None:
        switch = self.prefix + "sw"
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in HOSTS:
            name = self.prefix + host
            sh("ip", "netns", "add", name)
            link = f"link add eth0 type veth peer name {host} netns {switch}"
            sh("ip", "-n", name, *link.split())
            sh("ip", "-n", switch, "link", "set", host, "master", "bridge", "up")
            sh("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                sh("ip", "-n", name, "link", "set", interface, "up")
            shape = ["rate", "2gbit", "burst", "256kb", "latency", "20ms"]
            sh("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)

    def tear_down(self) -> None:
        for host in (*HOSTS, "sw"):
            command = ["ip", "netns", "del", self.prefix + host]
            subprocess.run(command, check=False, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    if shutil.which("ip") is None or shutil.which("tc") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip, tc and unshare, to make hosts of network namespaces")
    made = Net(f"fd{os.getpid()}")
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.tear_down()
        pytest.skip(f"may not make network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.tear_down()


@pytest.fixture
def asked(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Asked:
    return partial(job_of, tmp_path, tiny_checkpoint("llama"))


@needs_mpi
def test_mpi_over_three_hosts(net: Net, asked: Asked, tmp_path: Path) -> None:
    command, output, expected = asked(40)
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(prefix=net.prefix))
    agent.chmod(0o700)
    launch = ["launch", "--hosts", "s0:0,r0:1,r1:1", "--interface", NETWORK]
    launch += ["--r-threads", "1", "--kv-memory-gb", "0.01", "--mpirun-arg=--prtemca"]
    launch += ["--mpirun-arg=plm_ssh_agent", f"--mpirun-arg={agent}", "--"]
    outcome = run(net.at("s0", *FASTDECODE, *launch, "doctor"))
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert "rank 1 on r0" in outcome.output and "rank 2 on r1" in outcome.output
    outcome = run(net.at("s0", *FASTDECODE, *launch, *command))
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert output.read_text() == expected()


def test_a_host_that_is_cut_off_changes_no_token(
    net: Net, asked: Asked, tmp_path: Path, limit: StepLimit
) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    command, output, expected = asked(60)
    key = str(tmp_path / "key")
    assert main(["r-worker", "--new-key", key]) == 0
    serve = ["r-worker", "--threads", "1", "--kv-memory-gb", "0.01", "--silence-s", "2"]
    serve += ["--return-s", "2", "--key", key, "--bind"]
    addresses = {host: f"tcp://{net.address(host)}:5600" for host in ("r0", "r1")}
    command += ["--r-worker", addresses["r0"], "--r-worker", addresses["r1"]]
    command += ["--key", key, "--worker-silence-s", "2"]
    with (
        running(net.at("r0", *FASTDECODE, *serve, addresses["r0"])) as r0,
        running(net.at("r1", *FASTDECODE, *serve, addresses["r1"])) as r1,
        running(net.at("s0", *limit.fastdecode, *command)) as s0,
    ):
        s0.wait_for_text(output)
        net.cut_off("r0")
        limit.lift()
        outcome = s0.wait()
        assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
        assert output.read_text() == expected()
        assert f"R-worker {addresses['r0']} is lost" in outcome.output
        for worker in (r0, r1):  # one has lost its S-worker, the other was told that all is done
            outcome = worker.wait()
            assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
