"""Numbers in JSON objects that people or other programs wrote. An error names the place, the
field and its value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cost_model.exact import LARGEST
from fastdecode.core.errors import ConfigError

MAX_TOKENS = 1 << 24


def count(
    fields: Mapping[str, Any], name: str, where: str, low: int = 1, most: int = MAX_TOKENS
) -> int:
    """A whole number. Raises ConfigError."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        raise _refused(fields, name, where, f"a whole number from {low} to {most}")
    return value


def number(fields: Mapping[str, Any], name: str, where: str, *, may_be_0: bool = False) -> float:
    """A number above 0, or of at least 0, and below 1e15. Raises ConfigError."""
    value: Any = fields.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (0 < value < LARGEST or (may_be_0 and value == 0)):
        return float(value)
    least = "of at least" if may_be_0 else "above"
    raise _refused(fields, name, where, f"a number {least} 0 and below {LARGEST:g}")


def _refused(fields: Mapping[str, Any], name: str, where: str, wanted: str) -> ConfigError:
    if name not in fields:
        return ConfigError(f"{where}: {name} is missing; give {wanted}")
    return ConfigError(f"{where}: {name}={fields[name]!r} is not {wanted}")


def check_known(fields: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises ConfigError: there is a field of another name."""
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(known)}")
