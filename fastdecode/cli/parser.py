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
import textwrap
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

from fastdecode.cli.common import is_said_by_other_rank
from fastdecode.core.errors import ConfigError

ALL = "all"
_LIKENESS = 0.66
"""Likeness of an option to the one that was meant."""
_CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)")
_WORDED = (
    (r"argument (\S+): invalid int value: '(.*)'", r"\1 \2 is not a whole number"),
    (r"argument (\S+): invalid float value: '(.*)'", r"\1 \2 is not a number"),
    (r"argument (\S+): invalid lanes value: '(.*)'", r"\1 \2 is not a whole number or auto"),
    (r"argument (\S+): expected (?:one|at least one) argument", r"\1 needs a value behind it"),
    (r"argument (\S+): ignored explicit argument '(.*)'", r"\1 takes no value: remove =\2"),
    (
        r"argument (\S+): not allowed with argument (\S+)",
        r"\1 and \2 cannot be used together: remove one of them",
    ),
    (r"the following arguments are required: (.*)", r"missing: \1"),
    (r"argument (\S+): (.*)", r"\1: \2"),
)
"""argparse's messages, and ours."""


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
        self._required: list[tuple[str, Callable[[argparse.Namespace], bool]]] = []
        self._required_options: list[argparse.Action] = []
        self.add_argument(
            "-h", "--help", action=_Help,
            help="show this help; --help=all: every option; --help=GROUP: those of one group",
        )  # fmt: skip

    def parse_known_args(  # type: ignore[override]  # the overloads only differ in the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if "--kv-dtype" in self._option_string_actions and any(x.startswith("--") for x in words):
            from fastdecode.cli.vllm_words import as_here

            try:
                words = as_here(words, self._option_string_actions)
            except ConfigError as error:
                self.error(error.told(lambda given: _flag(given.name)))
        if self._subparsers is None:  # said before what is missing, which may be the same thing
            self._refuse_unknown(words)
        self._take_required_options()
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        missing = [words for words, is_given in self._required if not is_given(parsed)]
        if missing:
            self.error(f"missing: {', '.join(missing)}")
        return parsed, unknown

    def require(self, words: str, is_given: Callable[[argparse.Namespace], bool]) -> None:
        """Refuse a command line without something, together with all else that is missing.

        Args:
            words: name it in the message.
        """
        self._required.append((words, is_given))

    def require_nothing(self) -> None:
        """Accept a command line that only asks what there is, such as ``--list``."""
        self._required.clear()

    def _take_required_options(self) -> None:
        """Check required options here: argparse would report them before the rest."""
        for action in self._actions:
            if action.required and action.option_strings:
                action.required = False
                self._required_options.append(action)
                self.require(_shown(action), partial(_is_given, action.dest))

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Up to ``--``, behind which another command may stand."""
        for word in itertools.takewhile(lambda each: each != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown option {name}: {self._mend(name)}")

    def _mend(self, name: str) -> str:
        """What to type in place of an option that there is not."""
        from fastdecode.core.config.options import REMOVED  # with an error alone

        removed = {_flag(old): new and _flag(new) for old, new in REMOVED.items()}
        here = removed.get(name)
        if name in removed and here is None:
            return "FastDecode has nothing like it. Remove it"
        known = [each for each in self._option_string_actions if each.startswith("--")]
        # Without the dashes, which all have; else any two short ones would look alike.
        near = difflib.get_close_matches(name[2:], [each[2:] for each in known], 1, _LIKENESS)
        meant = here if here in known else f"--{near[0]}" if near else None
        return f"did you mean {meant}?" if meant else f"see {self.prog} --help=all"

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, then the usage in one line, and exit with code 2. In an
        MPI job, whose ranks end together, only the first with a command line prints it."""
        if not is_said_by_other_rank():
            said = f"{self.prog}: {_worded(message)}\n{self.format_usage()}"
            print(said, file=sys.stderr, end="")
        sys.exit(2)

    def format_usage(self) -> str:
        """One line: what has to be given, in order."""
        needed = [_shown(a) for a in self._actions if self._is_needed(a)]
        words = [self.prog, *(["[options]"] if self._has_options() else []), *needed]
        return f"usage: {' '.join(words)}\n"

    def _is_needed(self, action: argparse.Action) -> bool:
        return action.required or action in self._required_options or not action.option_strings

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
        return formatter.format_help() + (self._commands_help() if what == ALL else "")

    def _commands_help(self) -> str:
        """The groups of each subcommand's options; empty: there are no subcommands."""
        commands = self._commands()
        if not commands:
            return ""
        lines = [
            textwrap.fill(
                f"  {name:<12} {', '.join(parser.topics())}", 100, subsequent_indent=" " * 15
            )
            for name, parser in commands.items()
        ]
        title = f"options of each command, by group ({self.prog} COMMAND --help=GROUP):"
        return "\n".join(["", title, *lines, ""])

    def _commands(self) -> dict[str, Parser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def topics(self) -> list[str]:
        """What there is to ask help about: subcommands, or groups of options."""
        kinds = [f"{self.prog.split()[-1]} {kind}" for kind in self._commands()]
        return [*kinds, *(self.group_names() if self._has_options() else [])]

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


def _worded(message: str) -> str:
    """A message of argparse in the words of every other error."""
    message = re.sub(r"(--[\w-]+)/-\w\b", r"\1", message)  # --input of --input/-i
    wrong = _CHOICE.fullmatch(message)
    if wrong is not None:
        name, value, known = wrong[1], wrong[2], re.findall(r"[\w.-]+", wrong[3])
        return refused_choice(name, value, known)
    for pattern, words in _WORDED:
        if (found := re.fullmatch(pattern, message)) is not None:
            return found.expand(words)
    return message


def refused_choice(name: str, value: str, known: Collection[str]) -> str:
    """That a value is none of those known, and the one that was meant, if it is near."""
    near = difflib.get_close_matches(value, known, n=1)
    mend = f"did you mean {near[0]}? " if near else ""
    return f"{name} {value} is unknown: {mend}Choose from {', '.join(known)}"


def _plain(title: str | None) -> str:
    """A group's title as one word: ``Prefix cache`` is ``prefix-cache``."""
    return (title or "").lower().replace(" ", "-")


def add_model(parser: argparse.ArgumentParser, help: str = "Hugging Face model directory") -> None:
    """``MODEL`` as the first argument, or ``--model MODEL``: one of the two."""
    assert isinstance(parser, Parser)
    either = parser.add_mutually_exclusive_group()
    absent = argparse.SUPPRESS  # or the one that is not given would undo the other
    either.add_argument("model", metavar="MODEL", nargs="?", default=absent, help=help)
    either.add_argument(
        "--model", dest="model", metavar="MODEL", default=absent,
        help="the same as the argument MODEL",
    )  # fmt: skip
    parser.require("MODEL", partial(_is_given, "model"))


def _is_given(name: str, args: argparse.Namespace) -> bool:
    return getattr(args, name, None) is not None


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _shown(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return str(action.metavar or "COMMAND")
    metavar = str(action.metavar or action.dest.upper())
    return f"{action.option_strings[0]} {metavar}" if action.option_strings else metavar
