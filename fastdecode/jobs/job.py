"""The batch job: answers every line of a file, and survives being killed at any moment.

What makes it so is that there is one truth, the output: a line is done when its answer stands there (``journal``). The
manifest beside it says what the answers depend on; a resumed job must agree with it (``manifest``). A line's seed comes
from the run's seed and the line's id, and its tokens depend on nothing else, so a resumed run says what an undisturbed
one would have said.

Memory is flat: the input is read as there is room (``LLM.stream``), answers are written as they come, and what is kept
of a line beyond that is two bits (done, duplicate). Only the first pass needs 24 bytes a line, to find duplicates.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from fastdecode.core.config import EngineConfig
from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, RequestError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.identity import identify
from fastdecode.core.sequence import Prompt, PromptRequest, RequestOutput, SamplingParams
from fastdecode.engine.llm import LLM
from fastdecode.jobs.journal import Journal, Recovered, create, discard, reopen
from fastdecode.jobs.line_format import LineError, LineFormat, LineId, LineRequest
from fastdecode.jobs.lines import LineReader, too_long
from fastdecode.jobs.manifest import Manifest, identify_model, new_manifest
from fastdecode.jobs.openai_lines import OpenAILines
from fastdecode.jobs.ordered import check_paths
from fastdecode.jobs.progress import JobProgress
from fastdecode.jobs.simple_lines import SimpleLines
from fastdecode.jobs.stopping import StopNow, Stopping
from fastdecode.jobs.survey import Survey, is_openai, survey
from fastdecode.openai.chat import Chat, Turn
from fastdecode.openai.requests import RequestReader
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.codec import lacks_tokenizer

MAX_SYNC_LINES = 1 << 30


@dataclass(frozen=True)
class JobOptions:
    """What a user may choose about a job.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """

    input: Path
    output: Path
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for lines that don't say it themselves."""
    begin: Literal["new", "resume", "overwrite"] = "new"
    """What to do with an output that is there: refuse to start, go on with it, throw it away."""
    retry_errors: bool = False
    """When resuming: run those lines again that were answered with an error."""
    skip_bad_lines: bool = False
    """Answer bad lines with an error each, instead of refusing to start."""
    served_model_names: tuple[str, ...] = ()
    """What a line's ``model`` may be; empty: the model directory as given, and its last part."""
    chat_template: Path | None = None
    """In place of the model's own."""
    run_seed: int | None = None
    """None: drawn, or that of the run that is resumed."""
    sync_lines: int = 100
    sync_s: float = 5.0

    def __post_init__(self) -> None:
        if self.retry_errors and self.begin != "resume":
            raise ConfigError("--retry-errors goes with --resume: it is about answers that are already there")
        if not 1 <= self.sync_lines <= MAX_SYNC_LINES:
            raise ConfigError(f"--sync-lines {self.sync_lines} is not a whole number from 1 to {MAX_SYNC_LINES}")
        if not 0 <= self.sync_s <= 1e9:
            raise ConfigError(f"--sync-s {self.sync_s} is not a number of seconds from 0 to 1e9")


@dataclass(frozen=True)
class JobResult:
    """How a job stands."""

    num_lines: int
    num_done: int
    """Answered, now or in a run before."""
    num_failed: int
    """Of those, with an error."""
    num_run: int = 0
    """Answered now."""
    num_run_failed: int = 0
    lost: FastDecodeError | None = None
    """The failure of workers because of which lines are left."""
    interrupted: bool = False


def open_job(options: JobOptions, config: EngineConfig, tell: Callable[[str], None]) -> BatchJob:
    """Check everything that can be checked without a model, find out what is left to do, and hold the output.

    Raises:
        ConfigError, ModelError: something is wrong with options, files or the model directory; nothing was changed.
    """
    options = replace(options, output=options.output.resolve())
    if options.output.exists() and not options.output.is_file():
        raise ConfigError(f"the output {options.output} is not a file: a job reads in it what is done, to go on with")
    check_paths(options.input, output=options.output, manifest=Manifest.path_for(options.output))
    template: ChatTemplate | None = None
    reader: RequestReader | None = None
    lines: LineFormat = SimpleLines(SamplingParams(**options.sampling))
    if is_openai(options.input):
        template = ChatTemplate.load(Path(config.model), options.chat_template)
        reader = _reader(options, config, has_template=template is not None)
        lines = OpenAILines(reader, run_id="")
    tell(f"checking {options.input}")
    found = survey(options.input, lines, takes_text=not lacks_tokenizer(Path(config.model)))
    if found.is_hopeless or (len(found.bad) and not options.skip_bad_lines):
        raise found.refusal(options.input)
    manifest = _manifest(options, config, lines.name, found)
    if reader is not None:
        lines = OpenAILines(reader, manifest.run_id)
    fd, recovered = _hold_output(options, manifest, lines)
    if recovered.num_torn_bytes:
        tell(f"the run before ended in the middle of a line: {recovered.num_torn_bytes} bytes were cut off")
    journal = Journal(options.output, fd, sync_lines=options.sync_lines, sync_s=options.sync_s)
    return BatchJob(options.input, lines, manifest, template, found, journal, recovered)


def _reader(options: JobOptions, config: EngineConfig, *, has_template: bool) -> RequestReader:
    names = options.served_model_names or (config.model, Path(os.path.abspath(config.model)).name)
    return RequestReader(options.sampling, names, has_template)


def _manifest(options: JobOptions, config: EngineConfig, lines: str, found: Survey) -> Manifest:
    """That of the run that is resumed, or a new one.

    Raises:
        ConfigError: there is an output, and this job may not go on with it.
    """
    path = Manifest.path_for(options.output)
    has_output = options.output.exists() and options.output.stat().st_size > 0
    if options.begin == "new" and has_output:
        raise ConfigError(
            f"the output {options.output} exists: go on with its run by --resume, or throw it away by --overwrite"
        )
    before = Manifest.read(path) if options.begin == "resume" and (has_output or path.exists()) else None
    spec = open_checkpoint(config.model).spec(max_model_len=config.s_part.max_model_len)
    identity = identify(config, spec)
    now = new_manifest(
        lines=lines,
        input_sha256=found.sha256,
        sampling=options.sampling,
        model=identify_model(Path(config.model), options.chat_template),
        dtype=identity.dtype.value,
        kv_dtype=identity.kv_dtype.value,
        max_model_len=identity.max_model_len,
        run_seed=before.run_seed if before is not None and options.run_seed is None else options.run_seed,
    )
    if before is None:
        return now
    differences = before.differences(now)
    if not differences:
        return before
    if not has_output:
        return now
    told = "\n".join(f"  {difference}" for difference in differences)
    raise ConfigError(
        f"the run that began {options.output} was another one:\n{told}\n"
        f"resume it with what it began with, or start anew with another --output or --overwrite",
        code="manifest_mismatch",
    )


def _hold_output(options: JobOptions, manifest: Manifest, lines: LineFormat) -> tuple[int, Recovered]:
    """Open the output, begun or resumed. At no moment stands an old output beside a new manifest."""
    output = options.output
    if options.begin == "resume" and output.exists() and output.stat().st_size > 0:
        return reopen(output, lines.identify, retry_errors=options.retry_errors)
    discard(output)
    manifest.write(Manifest.path_for(output))
    return create(output), Recovered()


@dataclass
class _OpenLine:
    """A line whose prompts run."""

    request: LineRequest
    num_prompts: int
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """By the prompt's place in the line."""


class BatchJob:
    """A job that holds its output. ``run`` it, and close it; made by ``open_job``."""

    def __init__(
        self,
        path: Path,
        lines: LineFormat,
        manifest: Manifest,
        template: ChatTemplate | None,
        found: Survey,
        journal: Journal,
        recovered: Recovered,
    ) -> None:
        self._path = path
        self._lines = lines
        self._manifest = manifest
        self._template = template
        self._survey = found
        self._journal = journal
        self._done = recovered.done
        self._num_failed = recovered.num_failed
        self._num_run = self._num_run_failed = 0
        self._open: dict[int, _OpenLine] = {}
        self._lost: FastDecodeError | None = None
        self._interrupted = False
        self._input_changed = False

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._template is not None:
            self._template.close()
        # If something went wrong already, that is what to tell.
        with contextlib.suppress(*([FastDecodeError] if error is not None else [])):
            self._journal.close()

    @property
    def num_pending(self) -> int:
        """Lines that aren't answered yet."""
        return self._survey.num_lines - len(self._done)

    def result(self) -> JobResult:
        """How it stands now."""
        return JobResult(
            num_lines=self._survey.num_lines,
            num_done=len(self._done),
            num_failed=self._num_failed,
            num_run=self._num_run,
            num_run_failed=self._num_run_failed,
            lost=self._lost,
            interrupted=self._interrupted,
        )

    def run(self, llm: LLM, stopping: Stopping, progress: JobProgress) -> JobResult:
        """Answer what is left, until it is done, or ``stopping`` is asked, or no R-worker is left.

        Raises:
            ConfigError: the input was changed meanwhile; some answers may be to lines that aren't there any more.
            FastDecodeError: (code ``output_failed``) the output can't be written.
        """
        progress.begin(self._survey.num_lines, len(self._done))
        withdrawn = False

        def on_step() -> None:
            nonlocal withdrawn
            if stopping.now:
                raise StopNow
            if stopping.wanted and not withdrawn:
                withdrawn = True
                llm.cancel_waiting()
            self._journal.sync_if_due()
            progress.update(
                done=len(self._done),
                num_failed=self._num_failed,
                num_tokens=llm.stats.num_output_tokens,
                live_workers=llm.num_live_r_workers,
                num_workers=llm.num_r_workers,
            )

        with contextlib.suppress(StopNow):
            for output in llm.stream(self._requests(llm, stopping), on_step):
                self._collect(output, llm)
        self._journal.sync()
        self._interrupted = stopping.wanted and self.num_pending > 0
        if self._input_changed:
            raise ConfigError(f"{self._path} was changed while it was read: some answers may be to lines that are gone")
        return self.result()

    def _requests(self, llm: LLM, stopping: Stopping) -> Iterator[PromptRequest]:
        """The prompts of the lines that are left; bad lines are answered here."""
        with self._path.open("rb") as file:
            reader = LineReader(file)
            for number, raw in reader:
                if number in self._done:
                    continue
                request, prompts = self._read(number, raw, llm)
                if request is not None:
                    self._open[number] = _OpenLine(request, len(prompts))
                    for place, prompt in enumerate(prompts):
                        if stopping.wanted:
                            return
                        yield PromptRequest(f"{number}.{place}", prompt, self._params(request, place))
                if stopping.wanted:
                    return
            self._input_changed = reader.sha256 != self._survey.sha256

    def _read(self, number: int, raw: bytes | None, llm: LLM) -> tuple[LineRequest | None, list[Prompt]]:
        """A line's request and its prompts; None if it was answered with an error."""
        line_id: LineId | None = None
        try:
            if raw is None:
                raise too_long(number)
            request = self._lines.parse(raw, number)
            line_id = request.line_id
            if number in self._survey.duplicates:
                text = f"an earlier line has this {self._lines.id_field}: give each line one of its own"
                raise LineError(text, code=self._lines.duplicate_code, param=self._lines.id_field)
            return request, [self._prompt(turn, llm) for turn in request.prompts]
        except RequestError as error:
            if isinstance(error, LineError) and error.line_id is not None:
                line_id = error.line_id
            self._write(number, self._lines.refusal(number, line_id, error), failed=True)
            return None, []

    def _prompt(self, turn: Turn, llm: LLM) -> Prompt:
        if not isinstance(turn, Chat):
            return turn
        assert self._template is not None, "the reader refuses chats without a template"
        text = self._template.render(
            turn.messages,
            self._manifest.date,
            add_generation_prompt=turn.add_generation_prompt,
            variables=turn.variables,
        )
        return llm.codec.encode(text, add_special_tokens=False)

    def _params(self, request: LineRequest, place: int) -> SamplingParams:
        if request.params.seed is not None:
            return request.params
        return replace(request.params, seed=self._manifest.seed_of(request.line_id, place))

    def _collect(self, output: RequestOutput, llm: LLM) -> None:
        """One prompt is done. Its line is answered once all of its prompts are, or one has failed."""
        number, place = map(int, output.request_id.split("."))
        line = self._open.get(number)
        if line is None:
            return  # another prompt of the line has failed
        if output.error is None:
            line.outputs[place] = output
            if len(line.outputs) == line.num_prompts:
                del self._open[number]
                outputs = [line.outputs[i] for i in range(line.num_prompts)]
                self._write(number, self._lines.answer(number, line.request, outputs, llm.codec), failed=False)
            return
        del self._open[number]
        if isinstance(output.error, (RequestError, CapacityError)):
            refusal = self._lines.refusal(number, line.request.line_id, output.error)
            self._write(number, refusal, failed=True)
        else:
            # Not the line's fault: it stays as it was, to be answered when the job is resumed.
            self._lost = output.error

    def _write(self, number: int, answer: dict[str, Any], *, failed: bool) -> None:
        self._journal.append(answer)
        self._done.add(number)
        self._num_failed += failed
        self._num_run += 1
        self._num_run_failed += failed
