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
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.fields import Cursor, Kind, kind_of
from fastdecode.wire.messages import OPCODES, PROTOCOL_VERSION, Message

MAGIC: Final = b"FDWP"
ALIGNMENT: Final = 64
"""Arrays start at multiples of this in a body: a cache line, and the widest vector."""
MAX_HEAD_BYTES: Final = 1 << 18
MAX_BODY_BYTES: Final = 1 << 30
MAX_EPOCH: Final = (1 << 32) - 1

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<u2"), 3: np.dtype("<i4"), 4: np.dtype("<i8")}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_HEADER_FORMAT = "<4sHBBIIQ"
_HEADER = Struct(_HEADER_FORMAT)
_CRC = Struct("<I")

Array: TypeAlias = NDArray[Any]

assert sys.byteorder == "little", "arrays travel as they lie in memory, little-endian"


class Frame(NamedTuple):
    """An encoded message: its head, and its arrays where they lie, C-contiguous, which belong at ``offsets`` of the
    body."""

    head: bytes
    arrays: tuple[Array, ...]
    offsets: tuple[int, ...]
    body_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of head and body in one piece."""
        return aligned(len(self.head)) + self.body_bytes if self.body_bytes else len(self.head)

    def write(self, out: memoryview) -> None:
        """Write head and body in one piece into bytes [num_bytes or more]. Padding is left as it was."""
        head = len(self.head)
        out[:head] = self.head
        start = aligned(head)
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            if array.nbytes:
                out[start + offset : start + offset + array.nbytes] = array.data.cast("B")


class _Shape(NamedTuple):
    """Where an array lies in its body, and how to see it."""

    dtype: np.dtype[Any]
    dims: tuple[int, ...]
    offset: int
    num_bytes: int


class Head:
    """A head that was found to be in order. ``message`` completes it once its body has arrived."""

    __slots__ = ("_layout", "_shapes", "_values", "body_bytes", "epoch", "head_bytes")

    def __init__(
        self,
        layout: _Layout,
        epoch: int,
        head_bytes: int,
        body_bytes: int,
        shapes: tuple[_Shape | None, ...],
        values: list[Any],
    ) -> None:
        self.epoch = epoch
        self.head_bytes = head_bytes
        self.body_bytes = body_bytes
        self._layout = layout
        self._shapes = shapes
        self._values = values

    @property
    def kind(self) -> type[Message]:
        return self._layout.kind

    @property
    def spans(self) -> list[slice]:
        """Where in the body the arrays lie, in the order of ``Frame.arrays``."""
        return [slice(shape.offset, shape.offset + shape.num_bytes) for shape in self._shapes if shape is not None]

    def message(self, body: Array | memoryview) -> Message:
        """The message. Its arrays are views of ``body``, uint8 [body_bytes], and keep it alive.

        Raises:
            ProtocolError: the body hasn't the announced size.
        """
        if len(body) != self.body_bytes:
            raise self._layout.refuse(f"a body of {len(body)} bytes came where {self.body_bytes} were announced")
        values = self._values
        for array, shape in zip(self._layout.arrays, self._shapes, strict=True):
            if shape is not None:
                values[array.place] = np.ndarray(shape.dims, shape.dtype, body, shape.offset)
        return self._layout.kind(*values)


@dataclass(frozen=True)
class _ArrayField:
    name: str
    place: int
    """Among the message's fields."""
    dtypes: tuple[np.dtype[Any], ...]
    dims: tuple[str, ...]
    optional: bool
    first_word: int
    """Of the head's words: the dtype's; its dims follow."""

    def __str__(self) -> str:
        return f"{' or '.join(map(str, self.dtypes))} [{', '.join(self.dims)}]"


class _Layout:
    """How one message is written, derived from its fields."""

    def __init__(self, kind: type[Message], opcode: int) -> None:
        hints = get_type_hints(kind, include_extras=True)
        names = [field.name for field in fields(kind)]
        self.kind = kind
        self.opcode = opcode
        self.num_fields = len(names)
        self.arrays: list[_ArrayField] = []
        self.others: list[tuple[int, str, Kind]] = []
        numbers: list[str] = []
        self.num_words = 0
        for place, name in enumerate(names):
            hint = hints[name]
            if hint in (int, float):
                numbers.append(name)
            elif get_origin(hint) is Annotated:
                self.arrays.append(_array_field(name, hint, place, self.num_words))
                self.num_words += 1 + len(self.arrays[-1].dims)
            else:
                self.others.append((place, name, kind_of(hint)))
        self.number_places = [names.index(name) for name in numbers]
        self.equal_dims = _equal_dims(self.arrays)
        self.get_arrays = _getter([array.name for array in self.arrays])
        self.get_numbers = _getter(numbers)
        letters = "".join("q" if hints[name] is int else "d" for name in numbers)
        self.fixed = Struct(f"{_HEADER_FORMAT}{self.num_words}I{letters}")
        self.shapes_of = lru_cache(maxsize=64)(self._read_shapes)

    def refuse(self, reason: str) -> ProtocolError:
        return ProtocolError(f"{self.kind.__name__}: {reason}")

    def encode(self, message: Message, epoch: int) -> Frame:
        words: list[int] = []
        present: list[Array] = []
        offsets: list[int] = []
        end = 0
        for field, array in zip(self.arrays, self.get_arrays(message), strict=True):
            if array is None and field.optional:
                words += (0,) * (1 + len(field.dims))
                continue
            dtype = array.dtype
            if dtype not in field.dtypes or array.ndim != len(field.dims):
                raise self.refuse(f"{field.name} is {dtype} {list(array.shape)} where {field} belongs")
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)
            words.append(_DTYPE_CODES[dtype])
            words += array.shape
            offset = aligned(end)
            end = offset + array.nbytes
            present.append(array)
            offsets.append(offset)
        tail = bytearray()
        for _, name, kind in self.others:
            kind.write(getattr(message, name), tail)
        head_bytes = self.fixed.size + len(tail) + _CRC.size
        if head_bytes > MAX_HEAD_BYTES or end > MAX_BODY_BYTES:
            raise self.refuse(f"{head_bytes} + {end} bytes exceed the {MAX_HEAD_BYTES} + {MAX_BODY_BYTES} of a message")
        try:
            head = self.fixed.pack(
                MAGIC, PROTOCOL_VERSION, self.opcode, 0, epoch, head_bytes, end, *words, *self.get_numbers(message)
            )
        except StructError as error:
            raise self.refuse(f"a number that can't be sent: {error}") from None
        if tail:
            head += tail
        return Frame(head + _CRC.pack(crc32(head)), tuple(present), tuple(offsets), end)

    def read(self, head: bytes, epoch: int, body_bytes: int) -> Head:
        spare = len(head) - self.fixed.size - _CRC.size
        if spare < 0 or (spare and not self.others):
            raise self.refuse(f"a head of {len(head)} bytes, where {self.fixed.size + _CRC.size} are needed")
        fixed = self.fixed.unpack_from(head)
        first = len(fixed) - len(self.number_places)
        shapes = self.shapes_of(fixed[first - self.num_words : first], body_bytes)
        values: list[Any] = [None] * self.num_fields
        for place, number in zip(self.number_places, fixed[first:], strict=True):
            values[place] = number
        if self.others:
            self._read_others(Cursor(head[self.fixed.size : -_CRC.size]), values)
        return Head(self, epoch, len(head), body_bytes, shapes, values)

    def _read_others(self, cursor: Cursor, values: list[Any]) -> None:
        for place, name, kind in self.others:
            try:
                values[place] = kind.read(cursor)
            except ProtocolError as error:
                raise self.refuse(f"{name}: {error}") from None
        if cursor.remaining:
            raise self.refuse(f"{cursor.remaining} bytes follow its last field")

    def _read_shapes(self, words: tuple[int, ...], body_bytes: int) -> tuple[_Shape | None, ...]:
        # Cached because all layers of a step, and most steps, have the same shapes.
        shapes: list[_Shape | None] = []
        end = 0
        for field in self.arrays:
            code, *dims = words[field.first_word : field.first_word + 1 + len(field.dims)]
            if code == 0 and field.optional and not any(dims):
                shapes.append(None)
                continue
            dtype = _DTYPES.get(code)
            if dtype is None or dtype not in field.dtypes:
                raise self.refuse(f"{field.name} is of dtype {dtype or code} where {field} belongs")
            offset = aligned(end)
            end = offset + prod(dims, start=dtype.itemsize)
            shapes.append(_Shape(dtype, tuple(dims), offset, end - offset))
        if end != body_bytes:
            raise self.refuse(f"arrays of {end} bytes are not its body of {body_bytes}")
        for name, one, other, array in self.equal_dims:
            if words[one] != words[other] and shapes[array] is not None:
                raise self.refuse(f"dim {name} is both {words[one]} and {words[other]}")
        return tuple(shapes)


def _getter(names: list[str]) -> Callable[[Message], tuple[Any, ...]]:
    if len(names) >= 2:
        return attrgetter(*names)  # the fast way, for the messages that travel once a layer
    return lambda message: tuple(getattr(message, name) for name in names)


def _array_field(name: str, hint: Any, place: int, first_word: int) -> _ArrayField:
    """From ``Annotated[NDArray[...] | ..., "dims"]``."""
    array, dims = get_args(hint)
    members = get_args(array) if get_origin(array) in (Union, UnionType) else (array,)
    arrays = [member for member in members if member is not NoneType]
    dtypes = tuple(np.dtype(get_args(get_args(member)[1])[0]) for member in arrays)
    assert set(dtypes) <= set(_DTYPE_CODES)
    return _ArrayField(name, place, dtypes, tuple(dims.split()), len(arrays) < len(members), first_word)


def _equal_dims(arrays: list[_ArrayField]) -> list[tuple[str, int, int, int]]:
    """Dims that stand twice: (name, its first word, another word, index of the other's array)."""
    first: dict[str, int] = {}
    pairs = []
    for index, array in enumerate(arrays):
        for word, name in enumerate(array.dims, array.first_word + 1):
            if name in first:
                pairs.append((name, first[name], word, index))
            else:
                assert not array.optional, "dims are given by arrays that are always there"
                first[name] = word
    return pairs


_BY_KIND = {kind: _Layout(kind, opcode) for kind, opcode in OPCODES.items()}
_BY_OPCODE = {layout.opcode: layout for layout in _BY_KIND.values()}


def aligned(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def encode(message: Message, *, epoch: int = 0) -> Frame:
    """Encode one message. Arrays are referred to, not copied, unless they aren't contiguous.

    Raises:
        ProtocolError: the message is none that can travel: an array of a wrong dtype or number of dims, a number beyond
            64 bits, more bytes than a message may have.
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
            code="version_mismatch",
        )
    layout = _BY_OPCODE.get(opcode)
    if layout is None or zero != 0:
        raise ProtocolError(f"no message has opcode {opcode}")
    if not _HEADER.size + _CRC.size <= head_bytes <= min(len(data), MAX_HEAD_BYTES):
        raise layout.refuse(f"a head of {head_bytes} bytes; {len(data)} came, {MAX_HEAD_BYTES} are allowed")
    if body_bytes > max_body_bytes:
        raise layout.refuse(f"a body of {body_bytes} bytes exceeds the {max_body_bytes} that are allowed")
    head = bytes(data[:head_bytes])
    if _CRC.unpack_from(head, head_bytes - _CRC.size)[0] != crc32(head[: -_CRC.size]):
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
