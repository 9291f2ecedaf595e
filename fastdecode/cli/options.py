"""Options of the commands: dataclasses declare them, ``add_options`` draws them, and
``read_options`` reads them. Also what several commands share. Cheap to import."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from fastdecode.cli.parser import RareHelp
from fastdecode.core.config.options import (
    REQUIRED,
    Declared,
    check_options,
    declared,
    option,
    switch,
)
from fastdecode.core.errors import ConfigError, FastDecodeError, Given, RequestError
from fastdecode.core.files import STANDARD, check_paths

if TYPE_CHECKING:
    from fastdecode.core.config.engine import EngineConfig

T = TypeVar("T")
EXIT_UNEXPECTED = 1
EXIT_NO = 1  # to a question: infeasible, damaged, beyond a tolerance, or unfit for a job
EXIT_SOME_FAILED = 3
EXIT_WORKERS_LOST = 4
_METAVARS = {"GB": "GB", "s": "S"}
_TITLES = "S-part", "R-part", "batching", "prefix cache", "cluster", "instances"


def add_options(
    parser: argparse._ActionsContainer,
    group: type[Any],
    title: str | None = None,
    description: str | None = None,
    *,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Draw the options that a dataclass declares (``core.config.options.option``).

    A bool becomes ``--name`` and ``--no-name``, or ``--name`` alone if it is a ``switch``. A tuple
    becomes an option that may be repeated, unless ``Option.read`` reads it from one word. A default
    of ``REQUIRED`` makes argparse ask for it. ``read_options`` checks the limits.

    Args:
        title: Draw them into a group, which ``--help=GROUP`` shows, or with None into the parser.
        defaults: Texts for the help, by name, of defaults that the command chooses.
    """
    target = parser if title is None else parser.add_argument_group(title, description)
    alternatives = target.add_mutually_exclusive_group()
    options = [each for each in declared(group) if each.name not in leave_out]
    shows_all = not any(each.option.common for each in options)
    for each in options:
        text = _help(each, defaults.get(each.name))
        flags = [each.flag] if each.option.short is None else [each.flag, each.option.short]
        (alternatives if each.option.is_alternative else target).add_argument(
            *flags,
            help=text if shows_all or each.option.common else RareHelp(text),
            **_action(each, is_positional=not each.flag.startswith("-")),
        )


def _help(each: Declared, default: object) -> str:
    text = each.option.help
    if default is not None:
        head, is_named, _ = text.rpartition("; default: ")
        text = f"{head}; default: {default}" if is_named else f"{text} (default: {default})"
    elif "default" not in text and not each.option.is_switch:
        shown = f"{each.default:g}" if isinstance(each.default, float) else each.default
        if shown not in (None, (), "", REQUIRED):
            text += f" (default: {('no', 'yes')[each.default] if each.kind is bool else shown})"
    return text.replace("%", "%%")


def _action(each: Declared, *, is_positional: bool) -> dict[str, Any]:
    known: dict[str, Any] = {} if is_positional else {"dest": each.name}
    if each.default is not REQUIRED:
        known["default"] = each.default
    elif not is_positional:
        known["required"] = True
    if each.kind is bool:
        if not each.option.is_switch:
            return {**known, "action": argparse.BooleanOptionalAction}
        return {**known, "action": "store_const", "const": not each.default}
    known["metavar"] = each.option.metavar or _usual_metavar(each)
    if each.option.choices and each.kind is str:
        known["choices"] = each.option.choices
    if each.kind is tuple and each.option.read is None:
        how = {"nargs": "+"} if is_positional else {"action": "append", "default": []}
        return {**known, **how, "type": each.element}
    return {**known, "type": _reader(each)}


def _usual_metavar(each: Declared) -> str:
    if each.option.choices and each.kind is str:
        return f"{{{','.join(each.option.choices)}}}"
    return "FILE" if issubclass(each.kind, Path) else _METAVARS.get(each.option.unit, "N")


def _reader(each: Declared) -> Callable[[str], object]:
    read = each.option.read or each.kind
    if each.kind is int and each.option.choices:
        return lambda text: int(text) if text.isdecimal() else text
    if each.option.auto:
        return lambda text: None if text == "auto" else int(text)
    if each.option.read is None:
        return read

    def reader(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def given(args: argparse.Namespace, group: type[Any]) -> dict[str, Any]:
    """Return the values of the options that a dataclass declares, by name."""
    values = {each.name: getattr(args, each.name) for each in declared(group)}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


def read_options(args: argparse.Namespace, group: type[T]) -> T:
    """Return a dataclass that ``add_options`` has drawn, with the values that were given. Raises
    ConfigError: If a value does not fit its declaration, or the dataclass refuses it."""
    options = group(**given(args, group))
    check_options(options)
    return options


def as_typed(error: FastDecodeError, flags: Mapping[str, str]) -> str:
    """Return an error's message with ``flags`` in place of parameters of the Python API."""

    def typed(given: Given) -> str:
        flag = flags.get(given.name)
        if flag is None:
            return str(given)
        if not given.has_value or given.value is True:
            return flag
        if isinstance(given.value, (list, tuple)) and given.value:  # of an option that is repeated
            return " ".join(f"{flag} {each}" for each in given.value)
        return f"{flag} {given.shown.strip(chr(39)) or given.shown}"

    return error.told(typed)


def tell(text: str) -> None:
    """Print a line for a person to stderr. A closed stderr ends no job."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def progress_teller(every_s: float = 5.0) -> Callable[[str], None]:
    """Return a function that prints progress, at most once in ``every_s``."""
    began_s = told_s = time.monotonic()

    def progress(text: str) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= every_s:
            told_s = now_s
            tell(f"{text} in {now_s - began_s:.0f} s")

    return progress


def add_log_level_option(parser: argparse._ActionsContainer, default: str = "warning") -> None:
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", default=default, choices=levels)


def add_exit_code_option(parser: argparse._ActionsContainer) -> None:
    text = "also write the exit code there: mpirun's says little once a rank was lost"
    parser.add_argument("--exit-code-file", type=Path, metavar="FILE", help=text)


def add_status_option(parser: argparse._ActionsContainer) -> None:
    text = "write the command's state there once a second, JSON: fastdecode top shows it"
    parser.add_argument("--status", type=Path, metavar="FILE", help=text)


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of ``SamplingParams`` that make sense for every request of a command. Those with
    their default are not given."""

    temperature: float | None = option(None, "0 is greedy", metavar="X", common=True)
    top_k: int | None = option(None, "keep the k likeliest tokens; 0 keeps all", metavar="K")
    top_p: float | None = option(
        None, "keep the likeliest tokens up to this probability", metavar="X", common=True
    )
    min_p: float | None = option(
        None, "keep tokens this likely, relative to the likeliest", metavar="X"
    )
    repetition_penalty: float | None = option(None, "on tokens of prompt and output", metavar="X")
    presence_penalty: float | None = option(None, "on tokens of the output", metavar="X")
    frequency_penalty: float | None = option(
        None, "on tokens of the output, each time", metavar="X"
    )
    seed: int | None = option(
        None, "same seed, same tokens, whatever else is in the batch", common=True
    )
    max_tokens: int | None = option(None, "most tokens to generate", common=True)
    min_tokens: int | None = option(None, "fewest tokens to generate")
    logprobs: int | None = option(
        None, "also give logprobs, and those of the K likeliest", metavar="K"
    )
    prompt_logprobs: int | None = option(None, "the same of the prompt's tokens", metavar="K")
    n: int | None = option(None, "completions of each prompt")
    stop: tuple[str, ...] = option(
        (), "stop before this text; repeatable", metavar="TEXT", common=True
    )
    stop_token_ids: tuple[int, ...] = option((), "stop at this token; repeatable", metavar="ID")
    allowed_token_ids: tuple[int, ...] = option(
        (), "generate this token and no others; repeatable", metavar="ID"
    )
    bad_words: tuple[str, ...] = option((), "never generate this text; repeatable", metavar="TEXT")
    ignore_eos: bool = switch("continue after the end-of-sequence token")
    detokenize: bool = option(
        True, "give token ids only, without text", flag="--no-detokenize", is_switch=True
    )
    include_stop_str_in_output: bool = switch(
        "keep the stop text, or the text of the stop token, in the text"
    )
    skip_special_tokens: bool = option(
        True, "keep special tokens in the text", flag="--no-skip-special-tokens", is_switch=True
    )
    truncate_prompt_tokens: int | None = option(
        None, "keep the last N tokens of each prompt; -1: as many as fit"
    )


def add_sampling_options(
    parser: argparse._ActionsContainer, askers: str = "lines", *, has_chats: bool = False
) -> None:
    """Draw the sampling options. ``has_chats``: some of the ``askers`` may be chats."""
    from fastdecode.core.model.generation_defaults import GENERATION_CONFIGS
    from fastdecode.core.sequence import SamplingParams

    params = SamplingParams()
    group = parser.add_argument_group("sampling", f"defaults for {askers} that do not set them")
    defaults: dict[str, object] = {
        each.name: getattr(params, each.name)
        for each in declared(SamplingOptions)
        if each.default is None and each.name != "truncate_prompt_tokens"
    }
    none = "no logprobs"
    defaults |= {"seed": "a random one", "logprobs": none, "prompt_logprobs": none}
    if has_chats:
        defaults["max_tokens"] = f"{params.max_tokens}; of chats: the model's limit"
    add_options(group, SamplingOptions, defaults=defaults)
    group.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default="auto",
        metavar="WHAT",
        help="auto: the defaults of the model's generation_config.json, not for greedy "
        f"{askers}; ignore: none (default: auto)",
    )


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that were given, and no others."""
    return {
        each.name: getattr(args, each.name)
        for each in declared(SamplingOptions)
        if getattr(args, each.name) not in (each.default, [])
    }


def model_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Return and print the sampling parameters that the model's generation_config.json
    recommends."""
    from fastdecode.core.model.generation_defaults import generation_defaults, told
    from fastdecode.core.model.local_models import find_model

    defaults = generation_defaults(find_model(args.model), args.generation_config)
    if defaults:
        tell(told(defaults))
    return defaults


def add_engine_options(
    parser: argparse._ActionsContainer, defaults: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Draw the options of ``EngineConfig``, each of its groups as a group, with the command's own
    ``defaults``."""
    from fastdecode.core.config.engine import GROUPS

    for title, group in zip(_TITLES, GROUPS.values(), strict=True):
        add_options(parser, group, title, defaults=defaults)
    parser.set_defaults(**defaults)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    from fastdecode.core.config.engine import GROUPS

    return {name: value for group in GROUPS.values() for name, value in given(args, group).items()}


def load_engine(args: argparse.Namespace) -> None:
    """Import what runs a model, unless instances run it."""
    if not args.instances:
        import fastdecode.engine.setup.launch  # noqa: F401


def check_engine_options(args: argparse.Namespace) -> EngineConfig:
    """Refuse impossible options before anything starts: ranks of an MPI job wait for each other."""
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.core.sequence import SamplingParams

    try:
        config = EngineConfig.of(args.model, **engine_options(args))
        SamplingParams(**sampling_given(args))
        return config
    except (ConfigError, RequestError) as error:
        refused = error if isinstance(error, ConfigError) else ConfigError(*error.words)
        refused.is_of_command_line = True
        raise refused from None


@contextlib.contextmanager
def measuring(
    args: argparse.Namespace, command: str, **outputs: Path | None
) -> Iterator[Callable[[str], None]]:
    """Write ``--status``, if it is given, while the command measures. Yield what reports a line.
    Raises ConfigError: If the file can't be written, or is one of ``outputs``, by option."""
    from fastdecode.measure.status_file import status_file

    if args.status is not None:
        check_paths(STANDARD, status=args.status, **outputs)
    fields = {"model": args.model, "phase": "starting"}

    def say(line: str) -> None:
        fields["phase"] = line.strip()
        tell(line)

    with status_file(args.status, command, lambda _: ("measuring", fields), tell):
        yield say
