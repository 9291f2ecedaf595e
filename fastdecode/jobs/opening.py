"""Opening a job: everything is checked that can be without a model, before anything is changed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fastdecode import __version__
from fastdecode.conversations import database
from fastdecode.conversations.store import ConversationStore, identity_of
from fastdecode.conversations.turns import no_reuse_warning, why_no_reuse
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.model.checkpoint import check_model, open_checkpoint
from fastdecode.core.model.generation_defaults import with_defaults
from fastdecode.core.model.identity import identify
from fastdecode.core.model.local_models import find_model
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs.formats import LineFormat, OpenAILines, SimpleLines, identifier
from fastdecode.jobs.job import AnswerRules, BatchJob
from fastdecode.jobs.journal import Journal, OnLine, OrderedOutput, Recovered
from fastdecode.jobs.lines import WHOLE, LineSource, Shard
from fastdecode.jobs.manifest import Manifest, identify_model
from fastdecode.jobs.options import JobOptions
from fastdecode.jobs.session import JobSession, session_path
from fastdecode.jobs.survey import OnLook, Survey, kind_of_lines, survey, unseen
from fastdecode.openai.requests import RequestReader
from fastdecode.text.chat_format import AUTO, ChatFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.tokenizer_files import TokenizerFiles, find_tokenizer


def open_job(
    options: JobOptions, config: EngineConfig, tell: Callable[[str], None], on_look: OnLook = unseen
) -> BatchJob:
    """Check everything that can be checked without a model, find out what is left to do, and hold
    the output. Raises ConfigError, ModelError: If something is wrong with options, files or the
    model directory. Nothing was changed."""
    options = replace(options, output=_resumable(options.output))
    output, turns_path = options.output, options.output.with_name(options.output.name + ".turns")
    check_paths(
        options.input, output=output, manifest=Manifest.path_for(output), turns=turns_path,
        session=session_path(output),
    )  # fmt: skip
    check_model(config.model)
    model = find_model(config.model)
    with contextlib.ExitStack() as undo:
        source = LineSource.of(options.input, output.parent)
        undo.callback(source.close)
        lines, template = _lines(options, config, model, source, undo)
        found = _survey(options, source, model, lines, tell, on_look)
        _check_turns(found, source, config, tell)
        journal = Journal(output, sync_lines=options.sync_lines, sync_s=options.sync_s)
        undo.callback(journal.give_up)
        manifest, recovered = _begin(options, config, journal, lines.name, found)
        if isinstance(lines, OpenAILines):
            lines = replace(lines, run_id=manifest.run_id)
        if recovered.num_torn_bytes:
            tell(
                f"the run before ended in the middle of a line: {recovered.num_torn_bytes} bytes "
                "were cut off"
            )
        if not recovered.done:
            database.remove(turns_path)
        turns = None
        if found.num_turns:
            identity = identity_of(model)
            turns = ConversationStore(turns_path, identity, counts=recovered.has, option="output")
            undo.callback(turns.close)
            journal.before_sync = turns.sync
        session = _session(options, config, recovered, tell)
        rules = AnswerRules(manifest.run_seed, template, manifest.date)
        undo.pop_all()
        return BatchJob(source, lines, rules, found, journal, recovered, turns, session)


def _session(
    options: JobOptions, config: EngineConfig, recovered: Recovered, tell: Callable[[str], None]
) -> JobSession | None:
    """Return the job's session, if its R-workers may outlive it."""
    addresses = _addresses_by_holder(config)
    if not addresses:
        return None
    session = JobSession(
        session_path(options.output),
        addresses,
        (lambda name: not recovered.has(name)) if options.resume else None,
        num_replicas=config.r_part.num_replicas,
    )
    if options.resume and (why := why_no_reuse(config)):
        tell(f"resuming without KV of the run before: {why}")
    return session


def _resumable(output: Path) -> Path:
    """Return the output's real path. Raises: ConfigError: If no job could resume from it."""
    if output == STANDARD or output.suffix == ".gz":
        raise ConfigError(
            f"the output {output} can't be resumed: give a file that isn't compressed, and "
            "pack it when the job is done (fastdecode merge OUTPUT -o all.jsonl.gz)"
        )
    output = output.resolve()
    if output.exists() and not output.is_file():
        raise ConfigError(f"the output {output} is not a file: a job resumes from what is in it")
    return output


def _check_turns(
    found: Survey, source: LineSource, config: EngineConfig, tell: Callable[[str], None]
) -> None:
    """Raises: ConfigError: If a shard would part the turns of a conversation."""
    if found.num_turns and found.shard != WHOLE:
        raise ConfigError(
            f"--shard {found.shard} would part the turns of a conversation, which {source} "
            "has: give the file to one job, or split it between conversations"
        )
    if found.num_turns and (why := no_reuse_warning(why_no_reuse(config))):
        tell(f"warning: {why}")


def open_ordered_job(
    options: JobOptions,
    model: Path,
    tell: Callable[[str], None],
    on_line: OnLine | None = None,
    on_look: OnLook = unseen,
) -> BatchJob:
    """Open a job of simple lines whose answers stand in the order of the lines. It can't be
    resumed. Raises ConfigError: If something is wrong with the files. Nothing was changed."""
    check_paths(options.input, output=options.output)
    lines = simple_lines(options, numbers=False)
    is_stream = options.output == STANDARD
    beside = Path(tempfile.gettempdir()) if is_stream else options.output.resolve().parent
    with contextlib.ExitStack() as undo:
        source = LineSource.of(options.input, beside)
        undo.callback(source.close)
        if kind_of_lines(source) == "openai":
            raise ConfigError(
                f"{source} has OpenAI batch lines, which fastdecode generate doesn't take: use "
                f"fastdecode run-batch --model MODEL -i {options.input} -o {options.output}"
            )
        found = _survey(options, source, model, lines, tell, on_look)
        undo.pop_all()
    rules = AnswerRules(secrets.randbits(63), None, datetime.now(), answers_lost=True)
    output = OrderedOutput(options.output, on_line)
    return BatchJob(source, lines, rules, found, output, Recovered())


def simple_lines(options: JobOptions, *, numbers: bool = True) -> SimpleLines:
    defaults, greedy = (
        SamplingParams(**with_defaults(options.model_defaults, options.sampling, given))
        for given in ({}, {"temperature": 0})
    )
    return SimpleLines(defaults, greedy, numbers=numbers)


def _lines(
    options: JobOptions,
    config: EngineConfig,
    model: Path,
    source: LineSource,
    undo: contextlib.ExitStack,
) -> tuple[LineFormat, ChatTemplate | None]:
    """Return the format of a job's lines, and the template of its chats, which ``undo`` closes."""
    if kind_of_lines(source) == "simple":
        return simple_lines(options), None
    template = ChatTemplate.load(model, _template_file(options))
    special: Mapping[str, int] = {}
    if template is not None:
        undo.callback(template.close)
        special = TokenizerFiles.read(model).special_ids()
    names = options.served_model_name or (config.model, Path(os.path.abspath(config.model)).name)
    chat_format = ChatFormat.of(template, special, options)
    reader = RequestReader(
        options.sampling, names, template is not None, model_defaults=options.model_defaults,
        chat_format=chat_format,
    )  # fmt: skip
    return OpenAILines(reader, run_id=""), template


def _survey(
    options: JobOptions,
    source: LineSource,
    model: Path,
    lines: LineFormat,
    tell: Callable[[str], None],
    on_look: OnLook,
) -> Survey:
    """Raises: ConfigError: If bad lines keep a job from starting, or all lines need a tokenizer."""
    tell(f"checking {source}")
    takes_text = not model.is_dir() or find_tokenizer(model) is not None
    found = survey(
        source, lines, takes_text=takes_text, shard=Shard.of(options.shard), on_look=on_look
    )
    if found.is_refused or (len(found.bad) and options.on_error != "skip"):
        raise found.refusal(source)
    return found


def _template_file(options: JobOptions) -> Path | None:
    return None if options.chat_template is None else Path(options.chat_template)


def _addresses_by_holder(config: EngineConfig) -> list[tuple[str, ...]]:
    """Return the R-workers of each holder, one of every stage. R-workers that share heads all keep
    the same holder. Empty if R-workers have no addresses, and end with the job."""
    addresses = config.cluster.r_worker_addresses
    num_holders = len(addresses) // config.s_part.pp
    if config.r_part.r_partition == "heads":
        num_holders = min(1, num_holders)
    return [addresses[index::num_holders] for index in range(num_holders)]


def _begin(
    options: JobOptions, config: EngineConfig, journal: Journal, lines: str, found: Survey
) -> tuple[Manifest, Recovered]:
    """Begin or resume a run. Raises ConfigError: If this job may not resume what was begun."""
    path, is_empty = Manifest.path_for(options.output), journal.is_empty
    if not (options.resume or options.overwrite or is_empty):
        raise ConfigError(
            f"the output {options.output} exists: continue its run with --resume, or replace it "
            "with --overwrite"
        )
    is_resumed = options.resume and not is_empty
    manifest = _manifest(options, config, lines, found)
    if options.resume and (not is_empty or path.exists()):
        before = Manifest.read(path)
        if options.run_seed is None:
            manifest = replace(manifest, run_seed=before.run_seed)
        differences = before.differences(manifest)
        if not differences:
            manifest = before
        elif is_resumed:
            listed = "\n".join(f"  {difference}" for difference in differences)
            raise ConfigError(
                f"this run differs from the one that began {options.output}:\n{listed}\n"
                "To resume, use the same input, model and options. Or start again, with another "
                "--output or with --overwrite",
                code="manifest_mismatch",
            )
    if is_resumed:
        identify = identifier(manifest.lines, manifest.run_id)
        retries = options.retry_errors
        return manifest, journal.recover(
            identify, found.last_line, found.shard, retry_errors=retries
        )
    journal.empty()  # first: an old output never stands beside a new manifest
    manifest.write(path)
    return manifest, Recovered()


def _manifest(options: JobOptions, config: EngineConfig, lines: str, found: Survey) -> Manifest:
    directory = find_model(config.model)
    checkpoint = open_checkpoint(directory, config.s_part.load_format)
    identity = identify(config, checkpoint.spec(max_model_len=config.s_part.max_model_len))
    files = identify_model(directory, _template_file(options), config.s_part.load_format)
    formats = {
        "--tool-parser": options.tool_parser,
        "--reasoning-parser": options.reasoning_parser,
        "--chat-template-content-format": options.chat_template_content_format,
    }
    return Manifest(
        run_id=secrets.token_hex(6),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        version=__version__,
        lines=lines,
        input_sha256=found.sha256,
        # As JSON gives it back, so that it can be compared.
        sampling=json.loads(json.dumps({**options.model_defaults, **options.sampling})),
        model={**files, **{name: given for name, given in formats.items() if given != AUTO}},
        dtype=identity.dtype.value,
        kv_dtype=identity.kv_dtype.value,
        max_model_len=identity.max_model_len,
        run_seed=secrets.randbits(63) if options.run_seed is None else options.run_seed,
        shard=str(found.shard),
        num_lines=found.num_lines,
        last_line=found.last_line,
    )
