"""Batch jobs for tests: their files, and runs of them around a model that only hashes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from fake_llm import FakeLLM

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.progress import Progress
from fastdecode.jobs.job import BatchJob, JobResult
from fastdecode.jobs.opening import open_job
from fastdecode.jobs.options import JobOptions
from fastdecode.jobs.stopping import Stopping

NUM_LINES = 30


def openai(custom_id: object, **body: object) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**line, "body": {"prompt": [5, 6, 7], **body}})


LINES = [openai(f"id-{i}", prompt=[i % 50, 3], n=1 + i % 3) for i in range(NUM_LINES)]


class Job:
    """One job's files, and runs of it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.input, self.output, self.model = directory / "in.jsonl", directory / "out.jsonl", model
        self.told: list[str] = []

    def write(self, lines: list[str]) -> None:
        self.input.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def open(self, begin: str = "new", **options: Any) -> BatchJob:
        engine = {"max_model_len": options.pop("max_model_len", None), **options.pop("engine", {})}
        config = EngineConfig.of(str(self.model), **engine)
        options |= {"new": {}, "resume": {"resume": True}, "overwrite": {"overwrite": True}}[begin]
        job = JobOptions(input=self.input, output=self.output, **options)
        return open_job(job, config, self.told.append)

    def run(
        self, llm: FakeLLM | None = None, stopping: Stopping | None = None, **options: Any
    ) -> JobResult:
        with self.open(**options) as job:
            return job.run(llm or FakeLLM(), stopping or Stopping(60), Progress(io.StringIO()))

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    @property
    def said(self) -> dict[str, object]:
        """custom_id → the tokens of its choices, or its error's code; an id twice is an error."""
        said = {}
        for answer in self.answers:
            assert answer["custom_id"] not in said
            body = answer["response"]["body"]
            error = body.get("error")
            said[answer["custom_id"]] = (
                error["code"] if error else [c["token_ids"] for c in body["choices"]]
            )
        return said
