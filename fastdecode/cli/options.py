"""Options and exit codes that several subcommands of ``fastdecode`` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastdecode.cli.common import EXIT_INFEASIBLE as EXIT_INFEASIBLE
from fastdecode.cli.common import EXIT_SOME_FAILED as EXIT_SOME_FAILED
from fastdecode.cli.common import EXIT_UNEXPECTED as EXIT_UNEXPECTED
from fastdecode.cli.common import EXIT_WORKERS_LOST as EXIT_WORKERS_LOST
from fastdecode.cli.common import add_log_level_option as add_log_level_option
from fastdecode.cli.common import duration as duration
from fastdecode.cli.common import tell as tell
from fastdecode.cli.parser import Rare
from fastdecode.core.config.engine import GROUPS, EngineConfig
from fastdecode.core.config.instances import Instances
from fastdecode.core.config.options import Declared, declared
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.files import write_json
from fastdecode.core.model.generation_defaults import (
    GENERATION_CONFIGS,
    generation_defaults,
    told,
)
from fastdecode.core.model.local_models import find_model
from fastdecode.core.sequence import SamplingParams

_TITLES = "S-part", "R-part", "batching", "prefix cache", "cluster", "instances"


def add_engine_options(
    parser: argparse.ArgumentParser, defaults: Mapping[str, str] = MappingProxyType({})
) -> None:
    """The options of ``EngineConfig``, a group of theirs for each of its groups.

    Args:
        defaults: what help says of those that the command chooses itself.
    """
    for title, group in zip(_TITLES, GROUPS.values(), strict=True):
        add_options(parser.add_argument_group(title), group, defaults=defaults)


def add_options(
    arguments: argparse._ArgumentGroup,
    group: type[Any],
    *,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """The options that a dataclass declares, but for some. ``defaults``: as above."""
    for each in declared(group):
        if each.name not in leave_out:
            _add_option(arguments, each, defaults.get(each.name))


def _add_option(arguments: argparse._ArgumentGroup, each: Declared, default: str | None) -> None:
    text = each.option.help.replace("%", "%%")
    if default is not None:
        text = f"{text.rpartition('; default: ')[0] or text}; default: {default}"
    elif each.default not in (None, ()) and "default" not in text:
        text += f" (default: {'yes' if each.default is True else each.default})"
    shown = text if each.option.common else Rare(text)
    if each.kind is bool:
        arguments.add_argument(
            each.flag, dest=each.name, action=argparse.BooleanOptionalAction, default=each.default,
            help=shown,
        )  # fmt: skip
    elif each.kind is tuple:
        arguments.add_argument(
            each.flag, dest=each.name, action="append", default=[], metavar=each.option.metavar,
            help=shown,
        )  # fmt: skip
    else:
        arguments.add_argument(
            each.flag, dest=each.name, type=_reader(each), default=each.default,
            metavar=each.option.metavar, help=shown,
        )  # fmt: skip


def _reader(each: Declared) -> Callable[[str], object]:
    if each.kind is int and each.option.choices:
        return lambda text: int(text) if text.isdecimal() else text
    return lanes if each.option.auto else each.kind


def lanes(text: str) -> int | None:
    """A whole number, or auto, which is None."""
    return None if text == "auto" else int(text)


def add_exit_code_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exit-code-file", type=Path, metavar="FILE",
        help="also write the exit code there: mpirun's says little once a rank was lost",
    )  # fmt: skip


def add_input_option(arguments: argparse._ActionsContainer) -> None:
    arguments.add_argument(
        "--input", "-i", required=True, type=Path, metavar="FILE",
        help="requests, JSON Lines, also compressed by gzip; -: standard input",
    )  # fmt: skip


def add_report_options(arguments: argparse._ActionsContainer) -> None:
    """Files about a job, besides its answers."""
    arguments.add_argument(
        "--summary", type=Path, metavar="FILE", help="write timings and totals there, JSON"
    )
    arguments.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what ran when, as Chrome trace events"
    )
    add_status_option(arguments)


def add_status_option(arguments: argparse._ActionsContainer) -> None:
    arguments.add_argument(
        "--status", type=Path, metavar="FILE",
        help="write the command's state there once a second, JSON: fastdecode top shows it",
    )  # fmt: skip


_COMMON_SAMPLING = frozenset(("--temperature", "--top-p", "--seed", "--max-tokens", "--stop"))
"""Sampling parameters that the short help shows."""
_VALUES: Sequence[tuple[str, type, str, str]] = (
    ("--temperature", float, "X", "0 is greedy"),
    ("--top-k", int, "K", "keep the k likeliest tokens; 0 keeps all"),
    ("--top-p", float, "X", "keep the likeliest tokens up to this probability"),
    ("--min-p", float, "X", "keep tokens this likely, relative to the likeliest"),
    ("--repetition-penalty", float, "X", "on tokens of prompt and output"),
    ("--presence-penalty", float, "X", "on tokens of the output"),
    ("--frequency-penalty", float, "X", "on tokens of the output, each time"),
    ("--seed", int, "N", "same seed, same tokens, whatever else is in the batch"),
    ("--max-tokens", int, "N", "most tokens to generate"),
    ("--min-tokens", int, "N", "fewest tokens to generate"),
    ("--logprobs", int, "K", "also give logprobs, and those of the K likeliest"),
    ("--prompt-logprobs", int, "K", "the same of the prompt's tokens"),
    ("--n", int, "N", "completions of each prompt"),
)
_LISTS: Sequence[tuple[str, type, str, str]] = (
    ("--stop", str, "TEXT", "stop before this text"),
    ("--stop-token-ids", int, "ID", "stop at this token"),
    ("--allowed-token-ids", int, "ID", "generate this token and no others"),
    ("--bad-words", str, "TEXT", "never generate this text"),
)
_SWITCHES = (
    ("--ignore-eos", "continue after the end-of-sequence token"),
    ("--no-detokenize", "give token ids only, without text"),
    ("--include-stop-str-in-output",
     "keep the stop text, or the text of the stop token, in the text"),
    ("--no-skip-special-tokens", "keep the names of special tokens in the text"),
)  # fmt: skip


def add_sampling_options(
    parser: argparse.ArgumentParser, askers: str = "lines", *, has_chats: bool = False
) -> None:
    """One option for each field of ``SamplingParams`` that makes sense for every
    line of a file, or for every request. ``has_chats``: some may be chats,
    which have no limit of their own."""
    group = parser.add_argument_group("sampling", f"defaults for {askers} that do not set them")
    default = SamplingParams()
    none = "no logprobs"
    defaults = {"seed": "a random one", "logprobs": none, "prompt_logprobs": none}
    if has_chats:
        defaults["max_tokens"] = f"{default.max_tokens}; of chats: the model's limit"

    def add(flag: str, text: str, **options: Any) -> None:
        shown = text if flag in _COMMON_SAMPLING else Rare(text)
        group.add_argument(flag, default=argparse.SUPPRESS, help=shown, **options)

    for flag, kind, metavar, text in _VALUES:
        name = _name_of(flag)
        said = f"{text} (default: {defaults.get(name, getattr(default, name))})"
        add(flag, said, type=kind, metavar=metavar)
    for flag, kind, metavar, text in _LISTS:
        add(flag, f"{text}; repeatable", action="append", type=kind, metavar=metavar)
    for flag, text in _SWITCHES:
        action = "store_false" if flag.startswith("--no-") else "store_true"
        add(flag, text, action=action, dest=_name_of(flag))
    last = "keep the last N tokens of each prompt; -1: as many as fit"
    add("--truncate-prompt-tokens", last, type=int, metavar="N")
    group.add_argument(
        "--generation-config", choices=GENERATION_CONFIGS, default="auto", metavar="WHAT",
        help="auto: the defaults of the model's generation_config.json, not for greedy "
        f"{askers}; ignore: none (default: auto)",
    )  # fmt: skip


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def load_engine(args: argparse.Namespace) -> None:
    """Import what runs a model, unless instances elsewhere do. Raises
    ModuleNotFoundError: a package is missing."""
    if not Instances(tuple(args.instances)).is_elsewhere:
        import fastdecode.engine.setup.launch  # noqa: F401


def engine_flags() -> set[str]:
    """Return the flags of ``EngineConfig``'s options."""
    return {each.flag for group in GROUPS.values() for each in declared(group)}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of ``EngineConfig`` as given."""
    return {name: value for group in GROUPS.values() for name, value in given(args, group).items()}


def given(args: argparse.Namespace, group: type[Any]) -> dict[str, Any]:
    """Of the options that a dataclass declares, what was given or is their default."""
    return {each.name: getattr(args, each.name) for each in declared(group)}


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that were given; those left out aren't there."""
    return {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}


def model_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters that the model's generation_config.json recommends;
    says so if there are any."""
    defaults = generation_defaults(find_model(args.model), args.generation_config)
    if defaults:
        tell(told(defaults))
    return defaults


def sampling_defaults(args: argparse.Namespace) -> SamplingParams:
    """What lines that don't say it themselves are sampled with. Raises
    ConfigError naming a bad option."""
    try:
        return SamplingParams(**sampling_given(args))
    except RequestError as error:
        raise ConfigError(*error.words) from None


def check_options(args: argparse.Namespace) -> SamplingParams:
    """Refuse what no job can be run with, before anything is begun: ranks of an
    MPI job wait for each other.

    Returns:
        What lines that don't say it themselves are sampled with.

    Raises:
        ConfigError: names the bad option.
    """
    try:
        EngineConfig.of(args.model, **engine_options(args))
        return sampling_defaults(args)
    except ConfigError as error:
        error.is_of_command_line = True
        raise


def leave_summary(command: str, path: Path | None, summary: dict[str, Any]) -> int:
    """Write a job's summary, if it is wanted. Returns the exit code, should the
    job itself have none: 1, what was wanted isn't there though the answers are."""
    try:
        if path is not None:
            write_json(path, summary, "summary")
    except ConfigError as error:
        tell(f"{command}: {error}; the answers are whole")
        return EXIT_UNEXPECTED
    return 0
