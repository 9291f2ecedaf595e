"""Messages to bytes and back. Every layout is derived from the message's fields; no message has code of its own.

A message travels as a **head** (bytes) and a **body** (its arrays, raw)::

    head   | header | each array: dtype, dims | ints and floats | other fields | crc32 |
    header | magic 4s | version u16 | opcode u8 | 0 u8 | epoch u32 | head_bytes u32 | body_bytes u64 |
    body   | array | pad to 64 | array | pad to 64 | ... | array |

Everything is little-endian; ``fields`` says how "other fields" are written. An array's dtype and dims are uint32 each;
an absent array has dtype 0 and dims 0. The body's layout follows from the dims, so a transport may send arrays from
where they lie and receive a body into memory that it already has: ``read_head`` says how much to expect before any of
it is allocated. In one piece, the body starts at the first multiple of 64 behind the head. The crc32 covers the head,
which decides about memory and reaches kernels as numbers; array elements are left to the network's own checksums.

What a peer sent is refused with ``ProtocolError``, before memory of that size is taken or any state is touched, unless
all of this holds: magic, version, opcode, lengths and checksum; every array's dtype and number of dims, dims of one
name equal, their bytes within bounds; strings, tuples and enums within bounds; every dataclass valid in its own eyes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter, itemgetter
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, get_type_hints
from zlib import crc32

import numpy as np

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.arrays import ALIGNMENT, MAX_BODY_BYTES, Array, ArrayField, ArrayLayout, Body, aligned, is_array
from fastdecode.wire.fields import Cursor, Kind, kind_of
from fastdecode.wire.messages import OPCODES, PROTOCOL_VERSION, Message

MAGIC: Final = b"FDWP"
MAX_HEAD_BYTES: Final = 1 << 18
MAX_EPOCH: Final = (1 << 32) - 1

_HEADER_FORMAT = "<4sHBBIIQ"
_HEADER = Struct(_HEADER_FORMAT)
_CRC = Struct("<I")
_NUM_HEADER_FIELDS = 7
_PADDING = bytes(ALIGNMENT)

assert sys.byteorder == "little", "arrays travel as they lie in memory, little-endian"


class Frame(NamedTuple):
    """An encoded message: its head, and its arrays where they lie, C-contiguous; absent ones are None."""

    head: bytes
    arrays: tuple[Array | None, ...]
    body: Body

    @property
    def body_bytes(self) -> int:
        return self.body.num_bytes

    @property
    def num_bytes(self) -> int:
        """Of head and body in one piece."""
        body_bytes = self.body.num_bytes
        return aligned(len(self.head)) + body_bytes if body_bytes else len(self.head)

    def write(self, out: memoryview) -> None:
        """Write head and body in one piece into bytes [num_bytes]. Padding is left as it was."""
        head = self.head
        out[: len(head)] = head
        self.write_body(out[aligned(len(head)) :])

    def whole(self) -> bytes:
        """Head and body in one piece, padding zero: the fastest way for small messages."""
        if not self.body.num_bytes:
            return self.head
        pieces: list[Any] = [self.head]
        end, start = len(self.head), aligned(len(self.head))
        for array, view in zip(self.arrays, self.body.views, strict=True):
            if array is not None and view is not None and array.size:
                offset = start + view[2]
                if offset > end:
                    pieces.append(_PADDING[: offset - end])
                pieces.append(array)
                end = offset + array.nbytes
        pieces.append(_PADDING[: self.num_bytes - end])  # where empty arrays end the body
        return b"".join(pieces)

    def write_body(self, out: memoryview) -> None:
        """Copy the arrays into bytes [body_bytes]."""
        for array, view in zip(self.arrays, self.body.views, strict=True):
            if array is not None and view is not None and array.size:
                offset = view[2]
                out[offset : offset + array.nbytes] = array.data.cast("B")

    def whole_body(self) -> Array | None:
        """The body where it lies, uint8 [body_bytes], if its arrays lie in one buffer just as they do in a body (see
        ``arrays.lay_out``); else None."""
        filled = [
            (a, v[2]) for a, v in zip(self.arrays, self.body.views, strict=True) if a is not None and v and a.size
        ]
        if not filled:
            return None
        first = filled[0][0]
        if len(filled) == 1:
            return first.reshape(-1).view(np.uint8)
        base = first.base
        if not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
            return None
        start = _address(first)
        for array, offset in filled[1:]:
            if array.base is not base or _address(array) != start + offset:
                return None
        return np.ndarray((self.body.num_bytes,), np.uint8, base, start - _address(base))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes takes twice as long
    return address


class Head:
    """A head that was found to be in order. ``message`` completes it once its body has arrived."""

    __slots__ = ("_body", "_layout", "_others", "body_bytes", "epoch", "head_bytes")

    def __init__(self, layout: _Layout, epoch: int, head_bytes: int, body: Body, others: tuple[Any, ...]) -> None:
        self.epoch = epoch
        self.head_bytes = head_bytes
        self.body_bytes = body.num_bytes
        self._layout = layout
        self._body = body
        self._others = others
        """All fields but the arrays."""

    @property
    def kind(self) -> type[Message]:
        return self._layout.kind

    def message(self, body: Array) -> Message:
        """The message. Its arrays are views of ``body``, uint8 [body_bytes], and keep it alive.

        Raises:
            ProtocolError: the body hasn't the announced size.
        """
        if len(body) != self.body_bytes:
            raise self._layout.refuse(f"a body of {len(body)} bytes came where {self.body_bytes} were announced")
        arrays = [None if view is None else np.ndarray(view[0], view[1], body, view[2]) for view in self._body.views]
        return self._layout.make(*self._others, *arrays)


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
        self.get_arrays = _getter(arrays)
        self.get_numbers = _getter(numbers)
        self.make = _maker(kind, names, [*numbers, *others, *arrays])
        letters = "".join("q" if hints[name] is int else "d" for name in numbers)
        self.fixed = Struct(f"{_HEADER_FORMAT}{self.arrays.num_words}I{letters}")
        self.fixed_bytes = self.fixed.size + _CRC.size

    def refuse(self, reason: str) -> ProtocolError:
        return ProtocolError(f"{self.kind.__name__}: {reason}")

    def encode(self, message: Message, epoch: int) -> Frame:
        arrays = self.get_arrays(message)
        try:
            body = self.arrays.of_arrays(*[None if x is None else (x.dtype, x.shape) for x in arrays])
        except ProtocolError as error:
            raise self.refuse(str(error)) from None
        if not all([x is None or x.flags.c_contiguous for x in arrays]):  # noqa: C419  (a list is faster)
            arrays = tuple(None if x is None else np.ascontiguousarray(x) for x in arrays)
        tail = b""
        if self.others:
            tail = self._write_others(message)
        head_bytes = self.fixed_bytes + len(tail)
        try:
            head = self.fixed.pack(
                MAGIC,
                PROTOCOL_VERSION,
                self.opcode,
                0,
                epoch,
                head_bytes,
                body.num_bytes,
                *body.words,
                *self.get_numbers(message),
            )
        except StructError as error:
            raise self.refuse(f"a number that can't be sent: {error}") from None
        head += tail
        return Frame(head + _CRC.pack(crc32(head)), arrays, body)

    def _write_others(self, message: Message) -> bytes:
        tail = bytearray()
        for name, kind in self.others:
            kind.write(getattr(message, name), tail)
        if self.fixed_bytes + len(tail) > MAX_HEAD_BYTES:
            raise self.refuse(f"{len(tail)} bytes of fields exceed the {MAX_HEAD_BYTES} of a head")
        return bytes(tail)

    def read(self, head: bytes, epoch: int, body_bytes: int) -> Head:
        spare = len(head) - self.fixed_bytes
        if spare < 0 or (spare and not self.others):
            raise self.refuse(f"a head of {len(head)} bytes, where {self.fixed_bytes} are needed")
        fixed = self.fixed.unpack_from(head)
        first_number = _NUM_HEADER_FIELDS + self.arrays.num_words
        try:
            body = self.arrays.of_words(fixed[_NUM_HEADER_FIELDS:first_number])
        except ProtocolError as error:
            raise self.refuse(str(error)) from None
        if body.num_bytes != body_bytes:
            raise self.refuse(f"arrays of {body.num_bytes} bytes are not its body of {body_bytes}")
        others = fixed[first_number:]
        if self.others:
            others += self._read_others(Cursor(head[self.fixed.size : -_CRC.size]))
        return Head(self, epoch, len(head), body, others)

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


def _getter(names: list[str]) -> Callable[[Message], tuple[Any, ...]]:
    if len(names) >= 2:
        return attrgetter(*names)  # the fast way, for the messages that travel once a layer
    return lambda message: tuple([getattr(message, name) for name in names])


def _maker(kind: type[Message], names: list[str], given: list[str]) -> Callable[..., Message]:
    """``kind``, for arguments in the order ``given`` instead of its own, ``names``."""
    if names == given:
        return kind
    order = itemgetter(*[given.index(name) for name in names])
    return lambda *values: kind(*order(values))


_BY_KIND: Final = {kind: _Layout(kind, opcode) for kind, opcode in OPCODES.items()}
_BY_OPCODE: Final = {layout.opcode: layout for layout in _BY_KIND.values()}


def encode(message: Message, *, epoch: int = 0) -> Frame:
    """Encode one message. Arrays are referred to, not copied, unless they aren't contiguous.

    Raises:
        ProtocolError: the message is none that can travel: an array of a wrong dtype or number of dims, dims of one
            name that differ, a number beyond 64 bits, more bytes than a message may have.
    """
    return _BY_KIND[type(message)].encode(message, epoch)


def read_head(data: Array | bytes | memoryview, *, max_body_bytes: int = MAX_BODY_BYTES) -> Head:
    """Check and read the head at the start of ``data``, which may go on behind it.

    Raises:
        ProtocolError: it is not a head, or one that the protocol forbids; the message says why.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"{len(data)} bytes are too few for a message: is another program using this port?")
    magic, version, opcode, zero, epoch, head_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"a message starts with {magic!r}, not {MAGIC!r}: is another program using this port?")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: install the same FastDecode on "
            "every host",
            code="protocol_version",
        )
    layout = _BY_OPCODE.get(opcode)
    if layout is None or zero != 0:
        raise ProtocolError(f"no message has opcode {opcode}")
    if not _HEADER.size + _CRC.size <= head_bytes <= min(len(data), MAX_HEAD_BYTES):
        raise layout.refuse(f"a head of {head_bytes} bytes; {len(data)} came, {MAX_HEAD_BYTES} are allowed")
    if body_bytes > max_body_bytes:
        raise layout.refuse(f"a body of {body_bytes} bytes exceeds the {max_body_bytes} that are allowed")
    head = bytes(data[:head_bytes])
    if crc32(head[: -_CRC.size]) != _CRC.unpack_from(head, head_bytes - _CRC.size)[0]:
        raise layout.refuse("its head is damaged (checksum)")
    return layout.read(head, epoch, body_bytes)


def decode(data: Array, *, max_body_bytes: int = MAX_BODY_BYTES) -> tuple[Message, int]:
    """A message that came in one piece, uint8 [num_bytes], and its epoch. Its arrays are views of ``data``.

    Raises:
        ProtocolError: as ``read_head``; or the piece is shorter or longer than its head says.
    """
    head = read_head(data, max_body_bytes=max_body_bytes)
    start = aligned(head.head_bytes) if head.body_bytes else head.head_bytes
    return head.message(data[start:]), head.epoch
