"""How one field of a message is written, derived from its type.

====================  ==============================================================================
type                  on the wire
====================  ==============================================================================
``int``               int64
``float``             float64
``bool``              1 byte, 0 or 1
``str``               uint32 length in bytes, UTF-8
an ``Enum``           1 byte, the member's place in its definition
``X | None``          1 byte, 0 or 1; then X if 1
``tuple[X, ...]``     uint32 length, then every X
a dataclass           its fields, in order
====================  ==============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from struct import Struct
from types import NoneType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from fastdecode.core.errors import ConfigError, ProtocolError

MAX_STRING_BYTES = 1 << 14
MAX_TUPLE_LENGTH = 1 << 14

_BYTE, _LENGTH, _INT, _FLOAT = Struct("<B"), Struct("<I"), Struct("<q"), Struct("<d")


class Cursor:
    """Bytes of a peer, read from front to back. Reading past the end raises ``ProtocolError``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.remaining:
            raise ProtocolError(
                f"a field of {num_bytes} bytes stands where {self.remaining} are left"
            )
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def unpack(self, form: Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def flag(self) -> bool:
        value: int = self.unpack(_BYTE)
        if value > 1:
            raise ProtocolError(f"a flag is {value}, neither 0 nor 1")
        return value == 1


class Kind(Protocol):
    """How values of one type are written and read."""

    def write(self, value: Any, out: bytearray) -> None: ...

    def read(self, cursor: Cursor) -> Any: ...


@dataclasses.dataclass(frozen=True)
class _Number:
    form: Struct

    def write(self, value: Any, out: bytearray) -> None:
        out += self.form.pack(value)

    def read(self, cursor: Cursor) -> Any:
        return cursor.unpack(self.form)


class _Flag:
    def write(self, value: Any, out: bytearray) -> None:
        out.append(bool(value))

    def read(self, cursor: Cursor) -> bool:
        return cursor.flag()


class _Text:
    def write(self, value: Any, out: bytearray) -> None:
        encoded = value.encode(errors="replace")
        if len(encoded) > MAX_STRING_BYTES:
            # An error message may quote a compiler; its beginning must get through all the same.
            encoded = encoded[: MAX_STRING_BYTES - 3].decode(errors="ignore").encode() + b"..."
        out += _LENGTH.pack(len(encoded))
        out += encoded

    def read(self, cursor: Cursor) -> str:
        length: int = cursor.unpack(_LENGTH)
        if length > MAX_STRING_BYTES:
            raise ProtocolError(f"a string of {length} bytes exceeds {MAX_STRING_BYTES}")
        try:
            return cursor.take(length).decode()
        except UnicodeDecodeError:
            raise ProtocolError("a string is not valid UTF-8") from None


class _Enumerated:
    def __init__(self, kind: type[Enum]) -> None:
        self._name = kind.__name__
        self._members = tuple(kind)
        assert len(self._members) < 256

    def write(self, value: Any, out: bytearray) -> None:
        out.append(self._members.index(value))

    def read(self, cursor: Cursor) -> Enum:
        index: int = cursor.unpack(_BYTE)
        if index >= len(self._members):
            raise ProtocolError(f"{self._name} number {index} does not exist")
        return self._members[index]


@dataclasses.dataclass(frozen=True)
class _Optional:
    inner: Kind

    def write(self, value: Any, out: bytearray) -> None:
        out.append(value is not None)
        if value is not None:
            self.inner.write(value, out)

    def read(self, cursor: Cursor) -> Any:
        return self.inner.read(cursor) if cursor.flag() else None


@dataclasses.dataclass(frozen=True)
class _Repeated:
    inner: Kind

    def write(self, value: Any, out: bytearray) -> None:
        if len(value) > MAX_TUPLE_LENGTH:
            raise ProtocolError(f"a tuple of {len(value)} items exceeds {MAX_TUPLE_LENGTH}")
        out += _LENGTH.pack(len(value))
        for item in value:
            self.inner.write(item, out)

    def read(self, cursor: Cursor) -> tuple[Any, ...]:
        length: int = cursor.unpack(_LENGTH)
        # Every item takes a byte at least, so a lie about the length ends here
        # and not in a long loop.
        if length > min(MAX_TUPLE_LENGTH, cursor.remaining):
            raise ProtocolError(
                f"a tuple of {length} items in {cursor.remaining} bytes; at most {MAX_TUPLE_LENGTH}"
            )
        return tuple(self.inner.read(cursor) for _ in range(length))


class _Record:
    def __init__(self, kind: type) -> None:
        self._make: Callable[..., Any] = kind
        self._name = kind.__name__
        hints = get_type_hints(kind)
        self._fields = [(f.name, kind_of(hints[f.name])) for f in dataclasses.fields(kind)]
        assert self._fields

    def write(self, value: Any, out: bytearray) -> None:
        for name, kind in self._fields:
            kind.write(getattr(value, name), out)

    def read(self, cursor: Cursor) -> Any:
        values = [kind.read(cursor) for _, kind in self._fields]
        try:
            return self._make(*values)
        except ConfigError as error:
            raise ProtocolError(f"a {self._name} that makes no sense: {error}") from None


def kind_of(hint: Any) -> Kind:
    """The kind of a type hint. ``TypeError`` for types that have none: a
    mistake in ``messages``, not a peer's."""
    plain: dict[Any, Kind] = {
        int: _Number(_INT),
        float: _Number(_FLOAT),
        bool: _Flag(),
        str: _Text(),
    }
    if hint in plain:
        return plain[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner = [arg for arg in args if arg is not NoneType]
        if len(inner) == 1 and len(args) == 2:
            return _Optional(kind_of(inner[0]))
    elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _Repeated(kind_of(args[0]))
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return _Enumerated(hint)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _Record(hint)
    raise TypeError(f"a message field can't be of type {hint}")
