"""What README shows, runs; its links and figures are right."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from mpi_launch import FASTDECODE, needs_mpi, running
from server_process import serving

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for kind, text in BLOCKS if kind == "" for line in text.splitlines()]
RUN = ("fastdecode generate", "fastdecode size", "fastdecode launch --hosts localhost:2")
COMMANDS = [line for line in LINES if line.startswith(RUN)]


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "python"])
def test_a_program_runs(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "README.md", "exec"), {})
    assert "Once upon a time" in capsys.readouterr().out


@needs_mpi
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.replace("examples/", f"{ROOT}/examples/"))
    words = [str(tmp_path / word) if word == "out.jsonl" else word for word in words]
    with running([*FASTDECODE, *words[1:]]) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.output
    if "out.jsonl" in line:
        prompts = (ROOT / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()
        answers = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(x)["id"] for x in answers] == [json.loads(x)["id"] for x in prompts]
    else:
        assert "tokens/s" in outcome.output


def test_the_server_answers_as_shown() -> None:
    (serve,) = [line for line in LINES if line.startswith("fastdecode serve")]
    (curl,) = [line for line in LINES if line.startswith("curl")]
    command = [*FASTDECODE, *shlex.split(serve.replace("examples/", f"{ROOT}/examples/"))[1:]]
    _, url, _, header, _, body = shlex.split(curl)
    with serving(command, "--port", "0") as server:
        status, answer = server.post(url.removeprefix("localhost:8000"), json.loads(body))
    assert header == "content-type: application/json"
    assert status == 200 and answer["usage"]["completion_tokens"] == 12


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


WORKLOADS = {"32 × (512 + 128)": "A", "32 × (2,048 + 64)": "B", "128 × (128 + 128)": "C"}


def test_results_are_those_that_were_measured() -> None:
    kept = json.loads((ROOT / "benchmarks/results/end_to_end.json").read_text("utf-8"))["rows"]
    shown = re.findall(r"^\| (\w+m), (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert len(shown) == 6
    for model, workload, *cells in shown:
        best = [_best(kept, model, WORKLOADS[workload], of) for of in ("fastdecode", "vllm")]
        said = [f"{r['total_s']:.1f} s, {r['decode_tokens_per_s']:.0f} tok/s" for r in best]
        memory = " / ".join(f"{row['peak_rss_gb']:.1f} GB" for row in best)
        assert [*said, memory] == cells


def _best(rows: list[dict[str, Any]], model: str, workload: str, engine: str) -> dict[str, Any]:
    """The calmest round."""
    asked = (model, workload, engine)
    runs = [row for row in rows if (row["model"], row["workload"], row["engine"]) == asked]
    return min(runs, key=lambda row: row["total_s"])


def test_the_package_page_has_no_relative_links() -> None:
    """PyPI shows README without the repository."""
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", described(readme))
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme)) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
