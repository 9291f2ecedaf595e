"""A job of lines, run by an engine that is made for it: ``generate`` and ``run-batch``."""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.options import engine_options, tell
from fastdecode.core.progress import Progress
from fastdecode.engine.llm import LLM
from fastdecode.jobs.job import BatchJob, JobResult
from fastdecode.jobs.stopping import Stopping, asked_by_signals
from fastdecode.measure.chrome_trace import open_trace
from fastdecode.measure.status_file import RunningEngineStatus, StatusFile
from fastdecode.measure.summary import summarise


def run_job(
    job: BatchJob,
    args: argparse.Namespace,
    stopping: Stopping,
    progress: Progress,
    **options: Any,
) -> tuple[JobResult, dict[str, Any]]:
    """
    Args:
        options: of the engine, besides those in ``args``.

    Returns:
        How the job went, and the summary of it.
    """
    with (
        open_trace(args.trace) as trace,
        LLM(
            args.model,
            progress=tell,
            trace=trace,
            generation_config="ignore",  # requests bring its defaults
            **engine_options(args),
            **options,
        ) as llm,
        progress,
        StatusFile(
            args.status, args.command, RunningEngineStatus.of(llm, lambda: progress.state), tell
        ),
        asked_by_signals(stopping, f"fastdecode {args.command}"),
    ):
        result = job.run(llm, stopping, progress)
        args.has_hung_workers = llm.snapshot().engine.has_hung_r_workers
        return result, summarise(
            llm,
            started_s=args.started_s,
            num_requests=result.num_run,
            num_failed=result.num_run_failed,
        )
