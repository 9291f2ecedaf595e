"""Opening a batch job: everything is checked that can be without a model,
before anything is changed."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastdecode.conversations import database
from fastdecode.conversations.reuse import why_no_kv, why_none
from fastdecode.conversations.store import ConversationStore, identity_of
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.model.checkpoint import check_model, open_checkpoint
from fastdecode.core.model.generation_defaults import with_defaults
from fastdecode.core.model.identity import identify
from fastdecode.core.model.local_models import find_model
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs.job import AnswerRules, BatchJob
from fastdecode.jobs.journal import HeldOutput, Journal, Recovered, hold
from fastdecode.jobs.line_format import LineFormat
from fastdecode.jobs.line_source import LineSource, open_source
from fastdecode.jobs.manifest import Manifest, identify_model, new_manifest, seed_of
from fastdecode.jobs.openai_lines import OpenAILines
from fastdecode.jobs.ordered import OrderedOutput
from fastdecode.jobs.session import JobSession, session_path
from fastdecode.jobs.shard import WHOLE, Shard
from fastdecode.jobs.simple_lines import SimpleLines
from fastdecode.jobs.survey import OnLook, Survey, kind_of_lines, survey, unseen
from fastdecode.openai.requests import RequestReader
from fastdecode.text.chat_format import AUTO, ChatFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.tokenizer_files import TokenizerFiles, find_tokenizer

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
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the model's generation_config.json recommends for lines without them."""
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
    content_format: str = AUTO
    """One of ``CONTENT_FORMATS``."""
    tool_parser: str = AUTO
    """Of ``TOOL_PARSERS``."""
    reasoning_parser: str = AUTO
    """Of ``REASONING_PARSERS``."""
    run_seed: int | None = None
    """None: drawn, or that of the run that is resumed."""
    sync_lines: int = 100
    sync_s: float = 5.0
    shard: Shard = WHOLE
    """The part of the lines that this job answers."""

    @property
    def formats(self) -> dict[str, str]:
        """The options of ``ChatFormat.of``, in its order."""
        return {
            "--tool-parser": self.tool_parser,
            "--reasoning-parser": self.reasoning_parser,
            "--chat-template-content-format": self.content_format,
        }

    def __post_init__(self) -> None:
        if self.retry_errors and self.begin != "resume":
            raise ConfigError(
                "--retry-errors goes with --resume: it is about answers that are already there"
            )
        if not 1 <= self.sync_lines <= MAX_SYNC_LINES:
            raise ConfigError(
                f"--sync-lines {self.sync_lines} is not a whole number from 1 to {MAX_SYNC_LINES}"
            )
        if not 0 <= self.sync_s <= 1e9:
            raise ConfigError(f"--sync-s {self.sync_s} is not a number of seconds from 0 to 1e9")


def open_job(
    options: JobOptions,
    config: EngineConfig,
    tell: Callable[[str], None],
    on_look: OnLook = unseen,
) -> BatchJob:
    """Check everything that can be checked without a model, find out what is
    left to do, and hold the output.

    Args:
        on_look: gets how much of a long input is checked.

    Raises:
        ConfigError, ModelError: something is wrong with options, files or the
            model directory; nothing was changed.
    """
    _refuse_stream(options.output)
    options = replace(options, output=options.output.resolve())
    if options.output.exists() and not options.output.is_file():
        raise ConfigError(
            f"the output {options.output} is not a file: a job reads in it what is done, to go on "
            "with"
        )
    beside = {
        "manifest": Manifest.path_for(options.output),
        "turns": _turns_path(options.output),
        "session": session_path(options.output),
    }
    check_paths(options.input, output=options.output, **beside)
    check_model(config.model)
    source = open_source(options.input, options.output.parent)
    try:
        return _open_job(options, config, source, tell, on_look)
    except BaseException:
        source.close()
        raise


def _refuse_stream(output: Path) -> None:
    """Raises ConfigError: a resumed job could not read such an output."""
    if output == STANDARD or output.suffix == ".gz":
        raise ConfigError(
            f"the output {output} can't be resumed: give a file that isn't compressed, and pack it "
            f"when the job is done (fastdecode merge OUTPUT -o all.jsonl.gz)"
        )


def _open_job(
    options: JobOptions,
    config: EngineConfig,
    source: LineSource,
    tell: Callable[[str], None],
    on_look: OnLook,
) -> BatchJob:
    template, reader, lines = _format(options, config, source)
    found = _survey(options, source, find_model(config.model), lines, tell, on_look)
    if found.num_turns and options.shard != WHOLE:
        raise ConfigError(
            f"--shard {options.shard} would part the turns of a conversation, which {source} has: "
            "give the file to one job, or split it between conversations"
        )
    if found.num_turns and (why := why_none(config)):
        tell(f"warning: {why}")
    held = hold(options.output)
    try:
        manifest = _manifest(options, config, lines.name, found, is_empty=held.is_empty)
        if reader is not None:
            lines = OpenAILines(reader, manifest.run_id)
        recovered = _go_on(held, options, manifest, lines, found)
    except BaseException:
        held.let_go()
        raise
    if recovered.num_torn_bytes:
        tell(
            f"the run before ended in the middle of a line: {recovered.num_torn_bytes} bytes were "
            "cut off"
        )
    turns = _turns(
        options, find_model(config.model), held, recovered, are_wanted=found.num_turns > 0
    )
    session = _session(options, config, held, recovered)
    if session is not None and options.begin == "resume" and (why := why_no_kv(config)):
        tell(f"going on without KV of the run before: {why}")
    journal = Journal(
        options.output, held.fd, sync_lines=options.sync_lines, sync_s=options.sync_s,
        before_sync=(lambda: None) if turns is None else turns.sync,
    )  # fmt: skip
    rules = AnswerRules(manifest.seed_of, template, manifest.date)
    return BatchJob(source, lines, rules, found, journal, recovered, turns, session)


def _format(
    options: JobOptions, config: EngineConfig, source: LineSource
) -> tuple[ChatTemplate | None, RequestReader | None, LineFormat]:
    """How the input is read; the first two if its lines are OpenAI's."""
    if kind_of_lines(source) == "simple":
        return None, None, _simple_lines(options)
    template = ChatTemplate.load(find_model(config.model), options.chat_template)
    reader = _reader(options, config, template)
    return template, reader, OpenAILines(reader, run_id="")


def _session(
    options: JobOptions, config: EngineConfig, held: HeldOutput, recovered: Recovered
) -> JobSession | None:
    """That of R-workers at addresses, which outlive the job; None: there are none."""
    addresses = _addresses_by_holder(config)
    if not addresses:
        return None

    def counts(request_id: str) -> bool:
        number = request_id.partition(".")[0]
        return number.isdecimal() and int(number) not in recovered.done

    try:
        return JobSession(
            session_path(options.output),
            addresses,
            counts if options.begin == "resume" else None,
            num_replicas=config.r_part.num_replicas,
        )
    except BaseException:
        held.let_go()
        raise


def _addresses_by_holder(config: EngineConfig) -> list[tuple[str, ...]]:
    """Where the R-workers are that keep each holder, one of every stage. R-workers that
    share heads all keep the same holder."""
    addresses = config.cluster.r_worker_addresses
    num_holders = len(addresses) // config.s_part.pp
    if config.r_part.r_partition == "heads":
        num_holders = min(1, num_holders)
    return [addresses[index::num_holders] for index in range(num_holders)]


def _turns_path(output: Path) -> Path:
    return output.with_name(output.name + ".turns")


def _turns(
    options: JobOptions, model: Path, held: HeldOutput, recovered: Recovered, *, are_wanted: bool
) -> ConversationStore | None:
    """What the conversations among the lines have come to, of those that are
    answered; None: there are none. What another run has left is thrown away with
    its output."""
    path = _turns_path(options.output)

    def counts(name: str) -> bool:
        return name.isdecimal() and int(name) in recovered.done

    try:
        if not recovered.done:
            database.remove(path)
        return ConversationStore(path, identity_of(model), counts=counts) if are_wanted else None
    except BaseException:
        held.let_go()
        raise


def open_ordered_job(
    options: JobOptions,
    model: Path,
    tell: Callable[[str], None],
    on_line: Callable[[str | None, dict[str, Any]], None] | None = None,
    on_look: OnLook = unseen,
) -> BatchJob:
    """A job of simple lines whose answers stand in the order of the lines, and
    that can't be gone on with.

    Args:
        model: the model directory.
        on_line: told each answer as it is written, with its prompt if that is
            text.
        on_look: gets how much of a long input is checked.

    Raises:
        ConfigError: something is wrong with the files; nothing was changed.
    """
    check_paths(options.input, output=options.output)
    lines = _simple_lines(options, numbers=False)
    is_stream = options.output == STANDARD
    beside = Path(tempfile.gettempdir()) if is_stream else options.output.resolve().parent
    source = open_source(options.input, beside)
    try:
        if kind_of_lines(source) == "openai":
            raise ConfigError(
                f"{source} has OpenAI batch lines, which fastdecode generate doesn't take: use "
                f"fastdecode run-batch --model MODEL -i {options.input} -o {options.output}"
            )
        found = _survey(options, source, model, lines, tell, on_look)
    except BaseException:
        source.close()
        raise
    rules = AnswerRules(
        partial(seed_of, secrets.randbits(63)), None, datetime.now(), answers_lost=True
    )
    return BatchJob(
        source, lines, rules, found, OrderedOutput(options.output, on_line), Recovered()
    )


def _survey(
    options: JobOptions,
    source: LineSource,
    model: Path,
    lines: LineFormat,
    tell: Callable[[str], None],
    on_look: OnLook,
) -> Survey:
    """Raises ConfigError: bad lines are to keep a job from starting; or the
    model can answer none of them."""
    tell(f"checking {source}")
    takes_text = not model.is_dir() or find_tokenizer(model) is not None
    found = survey(
        source, lines, takes_text=takes_text, shard=options.shard, on_look=on_look,
    )  # fmt: skip
    if found.is_refused or (len(found.bad) and not options.skip_bad_lines):
        raise found.refusal(source)
    return found


def _reader(
    options: JobOptions, config: EngineConfig, template: ChatTemplate | None
) -> RequestReader:
    names = options.served_model_names or (config.model, Path(os.path.abspath(config.model)).name)
    special = TokenizerFiles.read(find_model(config.model)).special_ids() if template else {}
    return RequestReader(
        options.sampling, names, template is not None, model_defaults=options.model_defaults,
        chat_format=ChatFormat.of(template, special, *options.formats.values()),
    )  # fmt: skip


def _simple_lines(options: JobOptions, *, numbers: bool = True) -> SimpleLines:
    defaults, greedy = (
        SamplingParams(**with_defaults(options.model_defaults, options.sampling, said))
        for said in ({}, {"temperature": 0})
    )
    return SimpleLines(defaults, greedy, numbers=numbers)


def _manifest(
    options: JobOptions, config: EngineConfig, lines: str, found: Survey, *, is_empty: bool
) -> Manifest:
    """That of the run that is resumed, or a new one; ``is_empty``: nothing is
    in the output.

    Raises:
        ConfigError: there is an output, and this job may not go on with it.
    """
    path = Manifest.path_for(options.output)
    if options.begin == "new" and not is_empty:
        raise ConfigError(
            f"the output {options.output} exists: go on with its run by --resume, or throw it "
            "away by --overwrite"
        )
    before = (
        Manifest.read(path)
        if options.begin == "resume" and (not is_empty or path.exists())
        else None
    )
    directory = find_model(config.model)
    checkpoint = open_checkpoint(directory, config.s_part.load_format)
    spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    identity = identify(config, spec)
    files = identify_model(directory, options.chat_template, config.s_part.load_format)
    formats = {name: given for name, given in options.formats.items() if given != AUTO}
    seed = options.run_seed
    now = new_manifest(
        lines=lines, input_sha256=found.sha256,
        sampling={**options.model_defaults, **options.sampling}, model={**files, **formats},
        dtype=identity.dtype.value, kv_dtype=identity.kv_dtype.value,
        max_model_len=identity.max_model_len,
        run_seed=before.run_seed if before is not None and seed is None else seed,
        shard=options.shard, num_lines=found.num_lines, last_line=found.last_line,
    )  # fmt: skip
    if before is None:
        return now
    differences = before.differences(now)
    if not differences:
        return before
    if is_empty:
        return now
    told = "\n".join(f"  {difference}" for difference in differences)
    raise ConfigError(
        f"this run differs from the one that began {options.output}:\n{told}\n"
        f"To resume, use the same input, model and options. Or start anew, with another --output "
        "or with --overwrite",
        code="manifest_mismatch",
    )


def _go_on(
    held: HeldOutput, options: JobOptions, manifest: Manifest, lines: LineFormat, found: Survey
) -> Recovered:
    """Begin or resume the output. At no moment stands an old output beside a new manifest."""
    if options.begin == "resume" and not held.is_empty:
        return held.recover(
            lines.identify, last_line=found.last_line, retry_errors=options.retry_errors
        )
    held.empty()
    manifest.write(Manifest.path_for(options.output))
    return Recovered()
