"""Container files install what the project has: its files, its extras, pinned versions."""

from __future__ import annotations

import configparser
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from fastdecode.cli.main import _parse
from fastdecode.core.secret_file import exposure
from fastdecode.server.http.guard import OPEN_PATHS
from fastdecode.server.options import ServeOptions

ROOT = Path(__file__).parents[2]
FILES = {path.name: path for path in (ROOT / "examples" / "containers").glob("*.Containerfile")}
EXTRAS = {
    "S-worker.Containerfile": {"sworker", "structured", "server", "mpi", "zmq"},
    "R-worker.Containerfile": {"mpi", "zmq"},
}


def _setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    return config


def test_one_for_each_role() -> None:
    assert set(FILES) == set(EXTRAS)


@pytest.mark.parametrize("name", EXTRAS)
def test_installs_extras_of_the_project(name: str) -> None:
    text = FILES[name].read_text("utf-8")
    extras = set(re.search(r"\.whl\)\[(.*?)\]", text)[1].split(","))  # type: ignore[index]
    assert extras == EXTRAS[name]
    assert extras <= set(_setup()["options.extras_require"])


@pytest.mark.parametrize("name", EXTRAS)
def test_copies_every_package_and_only_what_exists(name: str) -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", FILES[name].read_text("utf-8"), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    packages = _setup()["options.packages.find"]["include"].split()
    assert {package.rstrip("*") for package in packages} <= sources
    assert not [source for source in sources if not (ROOT / source).exists()]


@pytest.mark.parametrize("name", EXTRAS)
def test_versions_are_pinned_and_root_does_not_run(name: str) -> None:
    text = FILES[name].read_text("utf-8")
    assert all(re.search(r":3\.\d+\.\d+-", line) for line in re.findall(r"^FROM (.*)$", text, re.M))
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    assert set(re.findall(r"torch==\S+", text)) <= set(constraints.split())
    assert re.findall(r"^USER (.*)$", text, re.M)[-1:] == ["1000"]
    assert 'ENTRYPOINT ["fastdecode"]' in text


def _manifest() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    text = (ROOT / "examples" / "containers" / "kubernetes.yaml").read_text("utf-8")
    return list(yaml.safe_load_all(text))


def _containers() -> dict[str, dict[str, Any]]:
    pods = [x["spec"]["template"]["spec"] for x in _manifest() if "template" in x["spec"]]
    return {each["name"]: each for pod in pods for each in pod["containers"]}


def test_manifest_has_command_lines_that_parse() -> None:
    containers = _containers()
    ip = "10.0.0.5"
    worker = _parse([x.replace("$(POD_IP)", ip) for x in containers["r-worker"]["args"]])
    assert (worker.command, worker.bind) == ("r-worker", f"tcp://{ip}:5600")
    server = _parse(containers["fastdecode"]["args"])
    options = ServeOptions(host=server.host, port=server.port, api_key_file=server.api_key_file)
    assert not options.is_loopback and options.api_key_file
    assert server.key == str(worker.key) == "/keys/cluster.key"
    workers = next(x for x in _manifest() if x["kind"] == "StatefulSet")
    name = f"{workers['metadata']['name']}-{{}}.{workers['spec']['serviceName']}"
    reached = [f"tcp://{name.format(i)}:5600" for i in range(workers["spec"]["replicas"])]
    assert server.r_worker_addresses == reached


def test_manifest_probes_paths_that_need_no_key() -> None:
    container = _containers()["fastdecode"]
    server = _parse(container["args"])
    for probe, path in (
        ("startupProbe", "/live"), ("readinessProbe", "/health"), ("livenessProbe", "/live")
    ):  # fmt: skip
        assert container[probe]["httpGet"] == {"path": path, "port": server.port}
        assert path in OPEN_PATHS
    pod = next(x for x in _manifest() if x["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > server.drain_timeout_s


def test_manifest_runs_as_the_images_do() -> None:
    for document in _manifest():
        pod = document["spec"].get("template", {}).get("spec")
        if pod is None:
            continue
        assert pod["securityContext"]["runAsUser"] == 1000
        (secret,) = (x["secret"] for x in pod["volumes"] if "secret" in x)
        found = os.stat_result((stat.S_IFREG | secret["defaultMode"], 0, 0, 1, 0, 1000, 0, 0, 0, 0))
        assert not exposure(found, "key"), "root's file, which the pod's group may read"
