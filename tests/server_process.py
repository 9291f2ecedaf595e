"""Servers for tests: real processes at real sockets; and a scripted one, whose
engine has no model."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from mpi_launch import FASTDECODE, Running, running
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "model" / "checkpoint"
STARTS_WITHIN_S = 180.0
TALK = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ 'Oscar' if message.role == 'user' else 'Noah' }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Noah:{% endif %}"
)
TOOL_TALK = (
    TALK.replace("{% for", "{% if tools %}{{ tools | tojson }}\n<tool_call>{% endif %}{% for", 1)
    .replace(
        "{{ message.content }}",
        "{{ message.content.split('</think>')[-1] }}{% for call in message.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}",
    )
    .replace("Noah:{%", "Noah:{% if thinking %}<think>\n{% else %}<think></think>{% endif %}{%")
)
"""The same for tools, with Hermes's marks, and reasoning."""


class Server:
    """A server under way."""

    def __init__(self, job: Running) -> None:
        self.job = job
        found = re.search(r"listening at http://[0-9.]+:(\d+)", job.output())
        assert found is not None, job.output()
        self.port = int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, timeout_s: float = 120.0, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (in lower case) and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            said = {name.replace("_", "-"): value for name, value in headers.items()}
            raw = None
            if body is not None:
                said.setdefault("content-type", "application/json")
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, said)
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, got, answer.read()

    def get(self, path: str, **headers: str) -> Any:
        return json.loads(self.ask("GET", path, **headers)[2])

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        status, _, raw = self.ask("POST", path, body, **headers)
        return status, json.loads(raw)

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", body)

    def status(self) -> dict[str, Any]:
        said: dict[str, Any] = self.get("/status.json")
        return said

    def metric(self, name: str, authorization: str = "", **labels: str) -> float:
        """A number of ``/metrics``, as Prometheus reads it."""
        text = self.ask("GET", "/metrics", authorization=authorization)[2].decode()
        (value,) = (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
        return value

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Until something has come true while the server runs."""
        self.job.wait_until(condition, timeout_s)

    def wait_until_ready(self) -> None:
        self.job.wait_until(lambda: self.ask("GET", "/health")[0] == 200, STARTS_WITHIN_S)

    def wait_until_idle(self) -> None:
        """Nothing runs, nothing is queued, and no KV block is reserved."""

        def is_idle() -> bool:
            said = self.status()
            used = sum(worker["kv_blocks_used"] for worker in said["figures"].get("r_workers", []))
            return not (said["num_open"] or said["num_queued"] or said["num_running"] or used)

        self.wait_until(is_idle)

    def process(self, what: str) -> psutil.Process:
        """Its ``http`` process, or that of its ``engine``."""
        for process in self.job.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())  # empty while it begins
                is_http, is_child = "server.frontend" in line, "text.child import" in line
                if line and not is_child and is_http == (what == "http"):
                    return process
        raise AssertionError(f"there is no {what} process: {self.job.output()}")


@contextlib.contextmanager
def serving(
    command: list[str], *options: str, is_ready: bool = True, **environ: str
) -> Iterator[Server]:
    """A server at any free port."""
    with running([*command, *options], **environ) as job:
        job.wait_until(
            lambda: "listening at" in job.output() and job.output().endswith("\n"), STARTS_WITHIN_S
        )
        server = Server(job)
        if is_ready:
            server.wait_until_ready()
        yield server


def model_server(*options: str, model: Path = CHECKPOINT, **more: Any) -> Any:
    """``fastdecode serve`` with the demo model."""
    fixed = ["serve", str(model), "--port", "0", "--dtype", "float32", "--kv-memory-gb", "0.02"]
    return serving([*FASTDECODE, *fixed], *options, **more)


def scripted_server(*options: str, **more: Any) -> Any:
    """One whose engine has no model: see ``scripted_serving.py``."""
    script = str(Path(__file__).with_name("scripted_serving.py"))
    return serving([sys.executable, script, "--port", "0"], *options, **more)


def events(raw: bytes) -> list[Any]:
    """The objects of a stream; the last is "[DONE]" if it was said."""
    said = [
        line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line.startswith(b"data: ")
    ]
    return ["[DONE]" if one == b"[DONE]" else json.loads(one) for one in said]
