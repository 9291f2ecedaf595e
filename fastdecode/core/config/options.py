"""Options: fields of frozen dataclasses that a user may set, declared once.

A field declares its default, what it is for, and its limits. ``check_options`` checks values
against them. The command line draws its options from them (``cli.options.add_options``).
``group_options`` sorts the options of ``LLM(model, **options)`` into groups."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from fastdecode.core.errors import ConfigError, Given

_KEY = "option"
REQUIRED: Final = dataclasses.MISSING  # the default of an option that must be given


@dataclass(frozen=True)
class Option:
    """Properties of an option besides its name, type and default."""

    help: str
    low: float = -math.inf  # limits of a number, both inclusive
    high: float = math.inf
    choices: tuple[str, ...] = ()
    """Texts that are accepted. An empty tuple accepts any. A number may be one of these, too."""
    metavar: str | None = None
    """The value's name in the help. None means FILE for a path, GB or S for that unit, else N."""
    unit: str = ""
    """Unit of a number that need not be whole."""
    flag: str | None = None
    """Name at the command line. None derives it from the field's name. Without dashes it is a
    positional argument, and must be the field's name."""
    short: str | None = None
    """A second name, such as ``-o``."""
    read: Callable[[str], Any] | None = None
    """Reads the text at the command line, and raises ValueError with a sentence."""
    auto: bool = False
    """At the command line, ``auto`` stands for None."""
    is_switch: bool = False
    """True if a bool has one flag alone, which inverts its default."""
    is_alternative: bool = False
    """True if at most one of the dataclass's alternatives may be given."""
    common: bool = False
    """True if ``--help`` shows it. If a dataclass marks none, it shows all."""


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field that is an option. ``more``: fields of ``Option``."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **more)})


def switch(help: str, **more: Any) -> Any:
    """Return a field of type bool that is False unless its flag is given."""
    return option(False, help, is_switch=True, **more)


@dataclass(frozen=True)
class Declared:
    """An option as the field of a dataclass declares it."""

    name: str
    kind: type
    """Type of its value: bool, int, float, str, Path, or tuple."""
    element: type
    """Type of a tuple's values. Otherwise the same as ``kind``."""
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    def check(self, value: object) -> None:
        """Check a value against the declaration.

        Raises:
            ConfigError: If it does not fit.
        """
        if value is None and self.default is None:
            return
        expected = self._unmet(value)
        if expected:
            raise ConfigError(Given(self.name, value), f" is not {expected}")

    def _unmet(self, value: object) -> str | None:
        """Return what the value should be. None if it is that."""
        low, high = self.option.low, self.option.high
        if self.kind is bool:
            return None if isinstance(value, bool) else "True or False"
        if self.kind is tuple:
            is_list = isinstance(value, (list, tuple)) and all(
                isinstance(x, self.element) for x in value
            )
            words = {str: "texts", int: "whole numbers"}
            return None if is_list else f"a list of {words.get(self.element, 'values')}"
        if self.kind is str:
            if self.option.choices and value not in self.option.choices:
                return f"one of {', '.join(self.option.choices)}"
            return None if isinstance(value, str) else "a text"
        if not issubclass(self.kind, (int, float)):
            return None if isinstance(value, (str, os.PathLike)) else "a path"
        if value in self.option.choices:
            return None
        also = "".join(f"{text}, or " for text in self.option.choices)
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if is_number and low <= value <= high:  # type: ignore[operator]  # a number
            return None
        if self.kind is int:
            last = high if isinstance(high, int) else f"{high:.0f}"
            return f"{also}a whole number from {low:g} to {last}"
        of_unit = f" of {self.option.unit}" if self.option.unit else ""
        return f"{also}a number{of_unit} from {low:g} to {high:g}"


def declared(group: type[Any]) -> tuple[Declared, ...]:
    """Return the options of a dataclass in order, without its other fields."""
    hints = get_type_hints(group)
    return tuple(
        Declared(field.name, *_kind(hints[field.name]), field.default, field.metadata[_KEY])
        for field in dataclasses.fields(group)
        if _KEY in field.metadata
    )


def _kind(hint: Any) -> tuple[type, type]:
    """Return int of ``int | None`` and ``int | str``. Return tuple and str of
    ``tuple[str, ...]``."""
    kinds = [hint]
    if isinstance(hint, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    assert kinds[1:] in ([], [str]), f"not an option: {hint}"
    return (get_origin(kinds[0]) or kinds[0]), (get_args(kinds[0]) or kinds)[0]


def duration(text: str) -> float:
    """Read seconds: ``5``, ``0.005s``, ``5ms``, ``800us``. For ``Option.read``.

    Raises:
        ValueError: If the text isn't a time.
    """
    scales = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in scales if text.strip().endswith(unit)), "")
    try:
        return float(text.strip().removesuffix(unit)) * scales.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"{text!r} is no time: give seconds, or like 5ms") from None


def check_options(group: Any) -> None:
    """Check the values of a dataclass against what its fields declare.

    Raises:
        ConfigError: If one does not fit. It names the option, its value, and its limits.
    """
    for each in declared(type(group)):
        each.check(getattr(group, each.name))


def group_options(
    groups: Mapping[str, type], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options of each group.

    Args:
        groups: Dataclasses by name.
        options: Options by name, of all groups together.

    Raises:
        ConfigError: If an option belongs to no group.
    """
    home = {each.name: name for name, group in groups.items() for each in declared(group)}
    _refuse_unknown(options, home)
    grouped: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for name, value in options.items():
        grouped[home[name]][name] = value
    return grouped


def _refuse_unknown(options: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in options.keys() - set(known):
        near = difflib.get_close_matches(name, list(known))
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(f"there is no option {name!r}{hint}", code="unknown_option")
