"""Fixtures for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from batch_jobs import LINES, Job
from fake_llm import model_dir


@pytest.fixture(scope="module")
def job_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_job(tmp_path: Path, job_model: Path) -> Callable[..., Job]:
    def make(name: str = "job", lines: list[str] = LINES) -> Job:
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, job_model)
        job.write(lines)
        return job

    return make
