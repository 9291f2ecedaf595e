"""The parser of every command: a short help, errors that say the mend, and no
abbreviations of options.

``--help`` shows what most people need, ``--help=all`` every option, and
``--help=GROUP`` one group. An error says first what is wrong, then how the
command is used, in one line.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

ALL = "all"
ELSEWHERE = {
    "--tensor-parallel-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--enable-expert-parallel": "--ep",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--swap-space": "--cache-memory-gb",
    "--trust-remote-code": None,
    "--quantization": None,
}
"""Options of vLLM: what they are called here; None: there is no such thing."""
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


_Formatter = partial(argparse.HelpFormatter, width=100, max_help_position=28)


class Rare(str):
    """The help of an option that the short help leaves out."""


class Parser(argparse.ArgumentParser):
    """An ``argparse`` parser; parsers of its subcommands are of this class, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"allow_abbrev": False, "formatter_class": _Formatter, **options}, add_help=False
        )
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
        if self._subparsers is None:  # said before what is missing, which may be the same thing
            self._refuse_unknown(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Up to ``--``, behind which another command may stand."""
        for word in itertools.takewhile(lambda each: each != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown option {name}: {self._mend(name)}")

    def _mend(self, name: str) -> str:
        """What to type in place of an option that there is not."""
        if name in ELSEWHERE and ELSEWHERE[name] is None:
            return "FastDecode has nothing like it. Remove it"
        here = ELSEWHERE.get(name)
        known = self._option_string_actions
        near = [here] if here in known else difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]}?" if near else f"see {self.prog} --help=all"

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, then the usage in one line, and exit with code 2."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += f": did you mean {near[0]}?" if near else ""
        print(f"{self.prog}: {message}\n{self.format_usage()}", file=sys.stderr, end="")
        sys.exit(2)

    def format_usage(self) -> str:
        """One line: what has to be given, in order."""
        needed = [_shown(a) for a in self._actions if a.required or not a.option_strings]
        words = [self.prog, *(["[options]"] if self._has_options() else []), *needed]
        return f"usage: {' '.join(words)}\n"

    def _has_options(self) -> bool:
        return any(a.option_strings and not isinstance(a, _Help) for a in self._actions)

    def format_help(self) -> str:
        """The short help."""
        return self.help_about(None)

    def help_about(self, what: str | None) -> str:
        """
        Args:
            what: None: the short help; ``all``: every option; else a group's name.
        """
        formatter = self._get_formatter()
        formatter.add_text(self.format_usage().rstrip())
        if what is None or what == ALL:
            formatter.add_text(self.description)
        for group in self._action_groups:
            actions = [a for a in group._group_actions if self._is_shown(a, group, what)]
            if actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        if what is None and any(isinstance(a.help, Rare) for a in self._actions):
            groups = ", ".join(self.group_names())
            formatter.add_text(f"More options: --help=all, or --help=GROUP with one of {groups}.")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _is_shown(
        self, action: argparse.Action, group: argparse._ArgumentGroup, what: str | None
    ) -> bool:
        if action.help == argparse.SUPPRESS:
            return False
        if what is None:
            return not isinstance(action.help, Rare)
        return what in (ALL, _plain(group.title))

    def group_names(self) -> list[str]:
        """What ``--help=GROUP`` takes."""
        return [_plain(group.title) for group in self._action_groups if group._group_actions]


class _Help(argparse.Action):
    """``--help``, ``--help=all``, ``--help=GROUP``."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="GROUP", help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        what = None if values is None else _plain(str(values))
        if what not in (None, ALL, *parser.group_names()):
            parser.error(
                f"--help={what}: there is no such group of options. Groups are "
                f"{', '.join(parser.group_names())}"
            )
        print(parser.help_about(what), end="")
        sys.exit(0)


def _plain(title: str | None) -> str:
    """A group's title as one word: ``Prefix cache`` is ``prefix-cache``."""
    return (title or "").lower().replace(" ", "-")


def add_model(parser: argparse.ArgumentParser, help: str = "Hugging Face model directory") -> None:
    """``MODEL`` as the first argument, or ``--model MODEL``: one of the two."""
    either = parser.add_mutually_exclusive_group(required=True)
    absent = argparse.SUPPRESS  # or the one that is not given would undo the other
    either.add_argument("model", metavar="MODEL", nargs="?", default=absent, help=help)
    either.add_argument(
        "--model",
        dest="model",
        metavar="MODEL",
        default=absent,
        help="the same as the argument MODEL",
    )


def _shown(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return str(action.metavar or "COMMAND")
    metavar = str(action.metavar or action.dest.upper())
    return f"{action.option_strings[0]} {metavar}" if action.option_strings else metavar
