"""The parser of every command: argparse with a short help and one usage line.

``--help`` shows the common options, ``--help=all`` every option, and ``--help=GROUP`` one
group. Options can't be abbreviated.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

from fastdecode.core.errors import ConfigError
from fastdecode.wire.ranks import repeats_other_rank

ALL = "all"
_LIKENESS = 0.66  # likeness of an unknown option or choice to the one that was meant


class RareHelp(str):
    """The help of an option that the short help leaves out."""


class Parser(argparse.ArgumentParser):
    """An ``argparse`` parser. Parsers of its subcommands are of this class, too."""

    def __init__(self, **options: Any) -> None:
        formatter = partial(argparse.HelpFormatter, width=100, max_help_position=28)
        super().__init__(**options, allow_abbrev=False, formatter_class=formatter, add_help=False)
        self._positionals.title = "arguments"
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            help="show this help; --help=all: every option; --help=GROUP: those of one group",
        )

    def parse_known_args(  # type: ignore[override]  # the overloads only differ in the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if "--kv-dtype" in self._option_string_actions and any(x.startswith("--") for x in words):
            from fastdecode.cli.vllm_words import as_here

            try:
                words = as_here(words, self._option_string_actions)
            except ConfigError as error:
                self.error(error.told(lambda given: "--" + given.name.replace("_", "-")))
        if self._subparsers is None:  # argparse would report first what is missing
            self._refuse_unknown(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        flags = {a.dest: a.option_strings[0] for a in self._actions if a.option_strings}
        parsed.flags = flags | getattr(parsed, "flags", {})
        return parsed, unknown

    def require_nothing(self) -> None:
        """Accept a command line that only asks what there is, such as ``--list``."""
        for action in self._actions:
            action.required = False
        for group in self._mutually_exclusive_groups:
            group.required = False

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not one of the choices, and suggest the nearest."""
        choices = [str(each) for each in action.choices or ()]
        near = difflib.get_close_matches(str(value), choices, 1, _LIKENESS)
        if near and str(value) not in choices:
            hint = f"did you mean {near[0]}?"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}: {hint}")
        super()._check_value(action, value)

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Check the words before ``--``, which separates another command."""
        known = [each for each in self._option_string_actions if each.startswith("--")]
        for word in itertools.takewhile(lambda each: each != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or name in known:
                continue
            # Without the dashes, which all share.
            near = difflib.get_close_matches(name[2:], [each[2:] for each in known], 1, _LIKENESS)
            hint = f"did you mean --{near[0]}?" if near else f"see {self.prog} --help=all"
            self.error(f"unknown option {name}: {hint}")

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2. In an MPI job, whose ranks have the same
        command line, only one of them prints it."""
        if is_said_by_other_rank():
            sys.exit(2)
        super().error(message)

    def format_usage(self) -> str:
        """Return one line with the arguments that are required, in order."""
        needed = [
            f"{a.option_strings[0]} {a.metavar or a.dest.upper()}"
            if a.option_strings
            else str(a.metavar or "COMMAND")
            for a in self._actions
            if a.required or not a.option_strings
        ]
        return f"usage: {' '.join([self.prog, '[options]', *needed])}\n"

    def format_help(self) -> str:
        return self.help_about(None)

    def help_about(self, what: str | None) -> str:
        """Return the help of one group, of every option (``all``), or the short help (None)."""
        formatter = self._get_formatter()
        formatter.add_text(self.format_usage().rstrip())
        if what in (None, ALL):
            formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [
                action
                for action in group._group_actions
                if what in (ALL, _plain(group.title))
                or (what is None and not isinstance(action.help, RareHelp))
            ]
            if shown:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        if what is None and any(isinstance(a.help, RareHelp) for a in self._actions):
            groups = ", ".join(self.groups())
            formatter.add_text(f"More options: --help=all, or --help=GROUP with one of {groups}.")
        return formatter.format_help()

    def groups(self) -> list[str]:
        """Return the names that ``--help=GROUP`` takes."""
        return [_plain(group.title) for group in self._action_groups if group._group_actions]


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="GROUP", help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        what = None if values is None else _plain(str(values))
        if what not in (None, ALL, *parser.groups()):
            parser.error(f"--help={what} is not a group of options: {', '.join(parser.groups())}")
        print(parser.help_about(what), end="")
        sys.exit(0)


def add_model(parser: argparse.ArgumentParser, help: str = "Hugging Face model directory") -> None:
    """Add ``MODEL`` as the first argument, or as ``--model MODEL``."""
    either = parser.add_mutually_exclusive_group(required=True)
    absent = argparse.SUPPRESS  # or the one that is not given would undo the other
    either.add_argument("model", metavar="MODEL", nargs="?", default=absent, help=help)
    either.add_argument(
        "--model", metavar="MODEL", default=absent, help="the same as the argument MODEL"
    )


def _plain(title: str | None) -> str:
    """Return a group's title as one word: ``Prefix cache`` is ``prefix-cache``."""
    return (title or "").lower().replace(" ", "-")


def is_said_by_other_rank() -> bool:
    """Return True if an earlier rank with the same command line reports its errors. All ranks
    of an MPI job then end together."""
    return find_spec("mpi4py") is not None and repeats_other_rank()
