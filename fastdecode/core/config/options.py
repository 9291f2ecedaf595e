"""Options: fields of frozen dataclasses that a user may set, declared once.

A field says with its default what it is for and what it may be.
``check_options`` holds values to it, the command line draws its options from
it, and ``group_options`` sorts what ``LLM(model, **options)`` was given into
groups.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args, get_type_hints

from fastdecode.core.errors import ConfigError, Given

_KEY = "option"
REMOVED: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(("transport", "interval", "min_r_workers", "cache_policy")),
    "swap": "kv_placement",
    "replica_store": "replicas",
    "replan": "replan_slo",
    **dict.fromkeys(
        ("prefill_instances", "decode_instances", "instance_addresses", "instance_ranks"),
        "instances",
    ),
}
"""Options of earlier versions, and what says it now; None: nothing need say it."""


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default."""

    help: str
    low: float = -math.inf
    high: float = math.inf
    """Of numbers."""
    choices: tuple[str, ...] = ()
    """Of texts; none: any. Of numbers: texts that are taken, too."""
    metavar: str = "N"
    unit: str = ""
    """Of numbers that aren't whole."""
    flag: str | None = None
    """At the command line; None: as the field is called."""
    auto: bool = False
    """At the command line, None is said as auto."""
    common: bool = False
    """Whether ``--help`` shows it; ``--help=all`` shows all of them."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass that is an option; ``more``: the fields of ``Option``."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **more)})


@dataclass(frozen=True)
class Declared:
    """An option of a group, as its field declares it."""

    name: str
    kind: type
    """Of its value: bool, int, float, str, or tuple (of texts)."""
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    def check(self, value: object) -> None:
        """Raises ConfigError: it can't have this value."""
        if value is None and self.default is None:
            return
        told = self._refusal(value)
        if told:
            raise ConfigError(Given(self.name, value), f" is not {told}")

    def _refusal(self, value: object) -> str | None:
        """What it has to be, and isn't."""
        low, high = self.option.low, self.option.high
        if self.kind is bool:
            return None if isinstance(value, bool) else "True or False"
        if self.kind is tuple:
            is_list = isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value)
            return None if is_list else "a list of texts"
        if self.kind is str:
            if self.option.choices and value not in self.option.choices:
                return f"one of {', '.join(self.option.choices)}"
            return None if isinstance(value, str) else "a text"
        if value in self.option.choices:
            return None
        also = "".join(f"{text}, or " for text in self.option.choices)
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if is_number and low <= value <= high:  # type: ignore[operator]  # a number
            return None
        if self.kind is int:
            return f"{also}a whole number from {low:g} to {high:.0f}"
        return f"{also}a number of {self.option.unit} from {low:g} to {high:g}"


def declared(group: type[Any]) -> tuple[Declared, ...]:
    """The options of a dataclass, in order; its other fields aren't there."""
    hints = get_type_hints(group)
    return tuple(
        Declared(field.name, _kind(hints[field.name]), field.default, field.metadata[_KEY])
        for field in dataclasses.fields(group)
        if _KEY in field.metadata
    )


def _kind(hint: Any) -> type:
    """int of int | None and int | str, tuple of tuple[str, ...]."""
    if getattr(hint, "__origin__", None) is tuple:
        return tuple
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    assert kinds[1:] in ([], [str]) and isinstance(kinds[0], type), f"not an option: {hint}"
    return kinds[0]


def check_options(group: Any) -> None:
    """Hold the values of a dataclass to what its fields declare.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """
    for each in declared(type(group)):
        each.check(getattr(group, each.name))


def group_options(
    groups: Mapping[str, type], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Which options belong to which group.

    Args:
        groups: by name; each a dataclass.
        options: by name, of all groups together.

    Raises:
        ConfigError: an option is of none of them.
    """
    home = {each.name: name for name, group in groups.items() for each in declared(group)}
    _refuse_unknown(options, home)
    grouped: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for name, value in options.items():
        grouped[home[name]][name] = value
    return grouped


def _refuse_unknown(options: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in options.keys() - set(known):
        near = REMOVED.get(name) or next(iter(difflib.get_close_matches(name, list(known))), None)
        hint = f": did you mean {near}?" if near else ""
        if name in REMOVED and REMOVED[name] is None:
            hint = ": leave it out"
        raise ConfigError(f"there is no option {name!r}{hint}", code="unknown_option")
