"""Messages to bytes and back. Every layout is derived from the message's
fields; no message has code of its own.

A message travels as a **head** (bytes) and a **body** (its arrays, raw)::

    head   | header | each array: dtype, dims | ints and floats | other fields
           | crc32 |
    header | magic 4s | version u16 | opcode u8 | 0 u8 | epoch u32
           | head_bytes u32 | body_bytes u64 |
    body   | array | pad to 64 | array | pad to 64 | ... | array |

Everything is little-endian; ``fields`` says how "other fields" are written. An
array's dtype and dims are uint32 each; an absent array has dtype 0 and dims 0.
The body's layout follows from the dims, so a transport may send arrays from
where they lie and receive a body into memory that it already has: ``read_head``
says how much to expect before any of it is allocated. In one piece, the body
starts at the first multiple of 64 behind the head. The crc32 covers the head,
which decides about memory and reaches kernels as numbers; array elements are
left to the network's own checksums.

What a peer sent is refused with ``ProtocolError``, before memory of that size
is taken or any state is touched, unless all of this holds: magic, version,
opcode, lengths and checksum; every array's dtype and number of dims, dims of
one name equal, their bytes within bounds; strings, tuples and enums within
bounds; every dataclass valid in its own eyes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, get_type_hints
from zlib import crc32

import numpy as np

from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.wire.arrays import (
    CACHED_SHAPES,
    MAX_BODY_BYTES,
    Array,
    ArrayField,
    ArrayLayout,
    Body,
    aligned,
    copy_into,
    in_place,
    is_array,
)
from fastdecode.wire.fields import Cursor, Kind, kind_of
from fastdecode.wire.json_fields import AsJson, json_fields
from fastdecode.wire.messages import PROTOCOL_VERSION, Message
from fastdecode.wire.opcodes import OPCODES

MAGIC: Final = b"FDWP"
MAX_HEAD_BYTES: Final = 1 << 18
MAX_EPOCH: Final = (1 << 32) - 1

_HEADER_FORMAT = "<4sHBBIIQ"
_HEADER = Struct(_HEADER_FORMAT)
_CRC = Struct("<I")
_NUM_HEADER_FIELDS = 7
_OPCODE_AT = 6

assert sys.byteorder == "little", "arrays travel as they lie in memory, little-endian"


class _Start(NamedTuple):
    """What heads of one kind have in common if their arrays have the same
    shapes: all in front of their numbers."""

    data: bytes
    """Header and words."""
    epoch: int
    head_bytes: int
    body: Body
    body_at: int
    """Where the body starts in one piece."""
    places: tuple[slice, ...]
    """Where each array's bytes are there."""
    num_bytes: int
    """Of head and body in one piece."""

    @classmethod
    def of(cls, data: bytes, epoch: int, head_bytes: int, body: Body) -> _Start:
        body_at = aligned(head_bytes) if body.num_bytes else head_bytes
        places = tuple(slice(body_at + x.start, body_at + x.stop) for x in body.places)
        return cls(data, epoch, head_bytes, body, body_at, places, body_at + body.num_bytes)


class Frame(NamedTuple):
    """An encoded message: its head, and its arrays where they lie; absent ones are None."""

    head: bytes
    arrays: tuple[Array | None, ...]
    start: _Start

    @property
    def body_bytes(self) -> int:
        return self.start.body.num_bytes

    @property
    def num_bytes(self) -> int:
        """Of head and body in one piece."""
        return self.start.num_bytes

    def write(self, out: memoryview) -> None:
        """Write head and body in one piece into bytes [num_bytes]. Padding is left as it was."""
        out[: self.start.head_bytes] = self.head
        copy_into(self.arrays, out, self.start.places)

    def write_body(self, out: memoryview) -> None:
        """Copy the arrays into bytes [body_bytes]."""
        copy_into(self.arrays, out, self.start.body.places)

    def body_in_place(self) -> Array | None:
        """The body, uint8 [body_bytes], if the arrays lie in one flat array
        just as they travel; else None."""
        return in_place(self.arrays, self.start.body)


class Head:
    """A head that was found to be in order. ``message`` completes it once its body has arrived."""

    __slots__ = ("_layout", "_others", "_start", "kind")

    def __init__(self, layout: _Layout, start: _Start, others: tuple[Any, ...]) -> None:
        self.kind = layout.kind
        self._layout = layout
        self._start = start
        self._others = others
        """All fields but the arrays."""

    @property
    def epoch(self) -> int:
        return self._start.epoch

    @property
    def body_bytes(self) -> int:
        return self._start.body.num_bytes

    def message_in(self, piece: Array) -> Message | None:
        """The message that this head begins, if ``piece``, uint8 [num_bytes], is
        all of it; None: it is the head alone, and its body follows.

        Raises:
            ProtocolError: it is neither.
        """
        start, num_bytes = self._start, len(piece)
        if num_bytes == start.num_bytes:
            return self.message(piece[start.body_at :])
        if num_bytes == start.head_bytes:
            return None
        raise self._layout.refuse(f"{num_bytes} bytes came, not {start.num_bytes}")

    def message(self, body: Array) -> Message:
        """The message. Its arrays are views of ``body``, uint8 [body_bytes],
        and keep it alive.

        Raises:
            ProtocolError: the body hasn't the announced size.
        """
        expected = self._start.body
        if len(body) != expected.num_bytes:
            raise self._layout.refuse(
                f"a body of {len(body)} bytes came where {expected.num_bytes} were announced"
            )
        arrays = [
            None if view is None else np.ndarray(view[0], view[1], body, view[2])
            for view in expected.views
        ]
        try:
            return self._layout.make((*self._others, *arrays))
        except ConfigError as error:
            raise self._layout.refuse(f"makes no sense: {error}") from None
        except ProtocolError as error:
            raise self._layout.refuse(str(error)) from None


class _Layout:
    """How one message is written, derived from its fields."""

    def __init__(self, kind: type[Message], opcode: int) -> None:
        hints = get_type_hints(kind, include_extras=True)
        names = [field.name for field in fields(kind)]
        numbers = [name for name in names if hints[name] in (int, float)]
        arrays = [name for name in names if is_array(hints[name])]
        others = [name for name in names if name not in numbers and name not in arrays]
        self.kind = kind
        self.opcode = opcode
        self.arrays = ArrayLayout([ArrayField.of(name, hints[name]) for name in arrays])
        self.others: list[tuple[str, Kind]] = [(name, kind_of(hints[name])) for name in others]
        as_json = json_fields(kind)
        self.get_arrays = _getter(arrays, as_json)
        self.get_numbers = _getter(numbers, {})
        self.make = _maker(kind, [*numbers, *others, *arrays], as_json)
        letters = "".join("q" if hints[name] is int else "d" for name in numbers)
        self.start = Struct(f"{_HEADER_FORMAT}{self.arrays.num_words}I")
        self.numbers = Struct(f"<{letters}")
        self.fixed_bytes = self.start.size + self.numbers.size + _CRC.size
        self.start_of = lru_cache(CACHED_SHAPES)(self._start_of)
        self.known: dict[bytes, _Start] = {}
        """What the last heads that came began with."""

    def refuse(self, reason: str) -> ProtocolError:
        return ProtocolError(f"{self.kind.__name__}: {reason}")

    def encode(self, message: Message, epoch: int) -> Frame:
        arrays = self.get_arrays(message)
        tail = self._write_others(message) if self.others else b""
        try:
            start = self.start_of(
                epoch, len(tail), *[None if x is None else (x.dtype, x.shape) for x in arrays]
            )
            head = start.data + self.numbers.pack(*self.get_numbers(message)) + tail
        except ProtocolError as error:
            raise self.refuse(str(error)) from None
        except StructError as error:
            raise self.refuse(f"a number that can't be sent: {error}") from None
        return Frame(head + _CRC.pack(crc32(head)), arrays, start)

    def _start_of(
        self, epoch: int, tail_bytes: int, *arrays: tuple[np.dtype[Any], tuple[int, ...]] | None
    ) -> _Start:
        """From dtype and dims of each array. Raises ProtocolError if they
        aren't what the fields declare."""
        body = self.arrays.of_arrays(*arrays)
        head_bytes = self.fixed_bytes + tail_bytes
        header = MAGIC, PROTOCOL_VERSION, self.opcode, 0, epoch, head_bytes, body.num_bytes
        return _Start.of(self.start.pack(*header, *body.words), epoch, head_bytes, body)

    def _write_others(self, message: Message) -> bytes:
        tail = bytearray()
        for name, kind in self.others:
            kind.write(getattr(message, name), tail)
        if self.fixed_bytes + len(tail) > MAX_HEAD_BYTES:
            raise self.refuse(f"{len(tail)} bytes of fields exceed the {MAX_HEAD_BYTES} of a head")
        return bytes(tail)

    def read_start(self, head: bytes, epoch: int, body_bytes: int) -> _Start:
        """Check what is in front of the numbers, and the head's length; its
        header has been checked."""
        spare = len(head) - self.fixed_bytes
        if spare < 0 or (spare and not self.others):
            raise self.refuse(f"a head of {len(head)} bytes, where {self.fixed_bytes} are needed")
        try:
            body = self.arrays.of_words(self.start.unpack_from(head)[_NUM_HEADER_FIELDS:])
        except ProtocolError as error:
            raise self.refuse(str(error)) from None
        if body.num_bytes != body_bytes:
            raise self.refuse(f"arrays of {body.num_bytes} bytes are not its body of {body_bytes}")
        return _Start.of(head[: self.start.size], epoch, len(head), body)

    def read(self, start: _Start, data: bytes | memoryview) -> Head:
        """The rest of a head, at the start of ``data``."""
        others = self.numbers.unpack_from(data, self.start.size)
        if self.others:
            others += self._read_others(
                Cursor(bytes(data[self.fixed_bytes - _CRC.size : start.head_bytes - _CRC.size]))
            )
        return Head(self, start, others)

    def remember(self, start: _Start) -> None:
        if len(self.known) >= CACHED_SHAPES:
            self.known.clear()
        self.known[start.data] = start

    def _read_others(self, cursor: Cursor) -> tuple[Any, ...]:
        values = []
        for name, kind in self.others:
            try:
                values.append(kind.read(cursor))
            except ProtocolError as error:
                raise self.refuse(f"{name}: {error}") from None
        if cursor.remaining:
            raise self.refuse(f"{cursor.remaining} bytes follow its last field")
        return tuple(values)


def _getter(
    names: list[str], as_json: Mapping[str, AsJson]
) -> Callable[[Message], tuple[Any, ...]]:
    if as_json:
        said = [(name, as_json[name].write if name in as_json else _same) for name in names]
        return lambda message: tuple([write(getattr(message, name)) for name, write in said])
    if len(names) >= 2:
        return attrgetter(*names)  # the fast way, for the messages that travel once a layer
    return lambda message: tuple([getattr(message, name) for name in names])


def _same(value: Any) -> Any:
    return value


def _maker(
    kind: type[Message], names: list[str], as_json: Mapping[str, AsJson]
) -> Callable[[tuple[Any, ...]], Message]:
    """Makes a message of all its fields, in the order of ``names``. Its own
    ``__init__`` would set a frozen field a call, which takes half of a
    receive; what it checks, ``__post_init__``, is called as there."""
    read = [(name, each.read) for name, each in as_json.items()]
    check: Callable[[Message], None] | None = getattr(kind, "__post_init__", None)

    def make(values: tuple[Any, ...]) -> Message:
        message = object.__new__(kind)
        made = message.__dict__
        made.update(zip(names, values))  # noqa: B905  (as many; checking takes time)
        for name, value_of in read:
            made[name] = value_of(made[name])
        if check is not None:
            check(message)
        return message

    return make


_BY_KIND: Final = {kind: _Layout(kind, opcode) for kind, opcode in OPCODES.items()}
_BY_OPCODE: Final = {layout.opcode: layout for layout in _BY_KIND.values()}


def encode(message: Message, *, epoch: int = 0) -> Frame:
    """Encode one message. Arrays are referred to, not copied, unless they
    aren't contiguous.

    Raises:
        ProtocolError: the message is none that can travel: an array of a wrong
            dtype or number of dims, dims of one name that differ, a number
            beyond 64 bits, more bytes than a message may have.
    """
    return _BY_KIND[type(message)].encode(message, epoch)


def read_head(data: bytes | memoryview, *, max_body_bytes: int = MAX_BODY_BYTES) -> Head:
    """Check and read the head at the start of ``data``, which may go on behind
    it.

    Raises:
        ProtocolError: it is not a head, or one that the protocol forbids; the
            message says why.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(
            f"{len(data)} bytes are too few for a message: is another program using this port?"
        )
    # Layers of a step begin alike: what begins like one that was found to be in
    # order is, as far as that goes.
    layout = _BY_OPCODE.get(data[_OPCODE_AT])
    start = None if layout is None else layout.known.get(bytes(data[: layout.start.size]))
    if (
        layout is None
        or start is None
        or start.head_bytes > len(data)
        or start.body.num_bytes > max_body_bytes
    ):
        return _read_new_head(data, max_body_bytes)
    _check_crc(layout, data, start.head_bytes)
    return layout.read(start, data)


def read_epoch(data: bytes | memoryview) -> int | None:
    """Of what begins as a message does, whatever else may be wrong with it; None: it doesn't."""
    if len(data) < _HEADER.size:
        return None
    magic, _, _, _, epoch, _, _ = _HEADER.unpack_from(data)
    return int(epoch) if magic == MAGIC else None


def read_head_bytes(data: memoryview) -> int | None:
    """The length of its head, as it says itself, of what begins as a message
    does; None: it doesn't. At most ``MAX_HEAD_BYTES``."""
    if len(data) < _HEADER.size:
        return None
    magic, _, _, _, _, head_bytes, _ = _HEADER.unpack_from(data)
    return min(int(head_bytes), MAX_HEAD_BYTES) if magic == MAGIC else None


def _read_new_head(data: bytes | memoryview, max_body_bytes: int) -> Head:
    magic, version, opcode, zero, epoch, head_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"a message starts with {magic!r}, not {MAGIC!r}: is another program using this port?"
        )
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: install "
            "the same FastDecode on every host",
            code="protocol_version",
        )
    layout = _BY_OPCODE.get(opcode)
    if layout is None or zero != 0:
        raise ProtocolError(f"no message has opcode {opcode}")
    if not _HEADER.size + _CRC.size <= head_bytes <= min(len(data), MAX_HEAD_BYTES):
        raise layout.refuse(
            f"a head of {head_bytes} bytes; {len(data)} came, {MAX_HEAD_BYTES} are allowed"
        )
    if body_bytes > max_body_bytes:
        raise layout.refuse(
            f"a body of {body_bytes} bytes exceeds the {max_body_bytes} that are allowed"
        )
    _check_crc(layout, data, head_bytes)
    start = layout.read_start(bytes(data[:head_bytes]), epoch, body_bytes)
    layout.remember(start)
    return layout.read(start, data)


def _check_crc(layout: _Layout, data: bytes | memoryview, head_bytes: int) -> None:
    end = head_bytes - _CRC.size
    if crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise layout.refuse("its head is damaged (checksum)")


def decode(data: Array, *, max_body_bytes: int = MAX_BODY_BYTES) -> tuple[Message, int]:
    """A message that came in one piece, uint8 [num_bytes], and its epoch. Its
    arrays are views of ``data``.

    Raises:
        ProtocolError: as ``read_head``; or the piece is shorter or longer than
            its head says.
    """
    head = read_head(data.data, max_body_bytes=max_body_bytes)
    message = head.message_in(data)
    if message is None:
        raise ProtocolError(f"{head.kind.__name__}: its body of {head.body_bytes} bytes is missing")
    return message, head.epoch
