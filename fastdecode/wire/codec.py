"""Messages to bytes and back: msgpack for fields, raw bytes for arrays.

A message travels as a **head** and a **body**, all of it little-endian::

    head   | magic 3s, version u8, bytes of msgpack u32, of the body u64 | [tag, field, ...] |
    body   | array | pad to 64 | array | pad to 64 | ... | array |

In msgpack an array is its **header**, bytes: dtype u8, number of dims u8, dims u32 each. In one
piece, the body starts at the first multiple of 64 behind the head. In parts, each begins with an
array, or continues one that began a part. All of it is checked, but the elements of arrays.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, Final, TypeAlias, Union, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.instances import InstanceSays, ToInstance
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker, ToRWorker
from fastdecode.wire.stages import FromStage, StageMessage
from fastdecode.wire.traits import Long, Message, error_fields, error_of

Array: TypeAlias = NDArray[Any]

ALIGNMENT: Final = 64  # a cache line, and the widest vector
MAX_HEAD_BYTES: Final = 1 << 18
MAX_BODY_BYTES: Final = 1 << 30
_LONG_BYTES: Final = 1 << 16
NAME: Final = b"FDN"  # first bytes of a message of any version
_MAGIC: Final = NAME + bytes([PROTOCOL_VERSION])
_PREFIX: Final = struct.Struct("<4sIQ")
_DTYPES: Final = [np.dtype(name) for name in ("<f4", "<u2", "<i4", "<i8", "u1")]
KINDS: Final[dict[int, type[Message]]] = {  # all of the protocol
    kind.__struct_config__.tag: kind
    for union in (ToRWorker, FromRWorker, StageMessage, FromStage, ToInstance, InstanceSays)
    for kind in get_args(union)
}
NOTHING: Final[Array] = np.zeros(0, np.uint8)


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return (num_bytes + ALIGNMENT - 1) & -ALIGNMENT


def read_prefix(data: bytes | memoryview) -> tuple[int, int]:
    """Return the bytes of the head, prefix included, and of the body. Raises ProtocolError: If no
    message begins here, or one of another version (``protocol_version``), or one too large."""
    is_short = len(data) < _PREFIX.size
    magic, fields, body = (bytes(data[:3]), 0, 0) if is_short else _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        if magic[:3] == NAME and not is_short:
            raise ProtocolError(
                f"the peer speaks protocol version {magic[3]}, this side {PROTOCOL_VERSION}: "
                "install the same FastDecode on every host",
                code="protocol_version",
            )
        raise ProtocolError(f"{magic!r} begins no message: is another program using this port?")
    head = _PREFIX.size + fields
    if head > MAX_HEAD_BYTES or body > MAX_BODY_BYTES:
        raise ProtocolError(f"{head} + {body} bytes exceed {MAX_HEAD_BYTES} + {MAX_BODY_BYTES}")
    return head, body


def kind_of(head: memoryview, start: int = _PREFIX.size) -> type[Message] | None:
    """Return the kind of the message whose fields start here, without reading them."""
    words = bytes(head[start : start + 5])
    at = 3 if words[:1] == b"\xdc" else 1  # msgpack: DC begins an array of more than 15, CC a u8
    tag = words[at + 1 : at + 2] if words[at : at + 1] == b"\xcc" else words[at : at + 1]
    return KINDS.get(tag[0]) if tag else None


class Frame(msgspec.Struct, frozen=True, eq=False):
    """An encoded message: its head, and its arrays where they lie."""

    head: bytes
    arrays: list[Array]
    body_bytes: int

    def in_one_piece(self) -> bytes:
        """Return head and body."""
        parts: list[Any] = [self.head]
        at = len(self.head)
        for array in self.arrays if self.body_bytes else ():
            parts += bytes(-at % ALIGNMENT), array if array.flags.c_contiguous else bytes(array)
            at = array.nbytes
        return b"".join(parts)

    def copied(self, pool: BufferPool, *, whole: bool) -> Array:
        """Copy the body into a buffer; behind the head, if ``whole``. Padding stays as it was."""
        arrays = [np.frombuffer(self.head, np.uint8), *self.arrays] if whole else self.arrays
        out, at = pool.take(aligned(len(self.head)) * whole + self.body_bytes), 0
        for array in arrays:
            np.ndarray(array.shape, array.dtype, out, at)[...] = array
            at = aligned(at + array.nbytes)
        return out


@lru_cache(1024)  # bounded, as a peer chooses dims
def _header_of(dtype: np.dtype[Any], dims: tuple[int, ...]) -> bytes:
    if dtype not in _DTYPES or max(dims) >= 1 << 32:
        raise ValueError(f"an array of {dtype} {list(dims)}")
    return struct.Struct(f"<BB{len(dims)}I").pack(_DTYPES.index(dtype), len(dims), *dims)


@lru_cache(1024)
def _parsed(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int, list[Any]]:
    """Return dims, dtype, bytes, and room for the types of fields that were found to fit."""
    try:
        dtype, dims = _DTYPES[header[0]], struct.Struct(f"<{header[1]}I").unpack(header[2:])
    except (IndexError, TypeError, struct.error):
        raise ValueError("the header of an array is damaged") from None
    # An array without elements, too: NumPy refuses it for its other dims.
    if prod([size or 1 for size in dims], start=dtype.itemsize) > MAX_BODY_BYTES:
        raise ValueError(f"an array of {dtype} {list(dims)} exceeds {MAX_BODY_BYTES} bytes")
    return dims, dtype, prod(dims, start=dtype.itemsize), []


def _check_type(hint: Any, dtype: np.dtype[Any], dims: tuple[int, ...]) -> None:
    """Raise ValueError if ``ndarray[tuple[int, Literal[2]], dtype[X]]``, say, has other dims."""
    shape, element = map(get_args, get_args(hint))
    kinds = [np.dtype(scalar) for scalar in get_args(element[0]) or element]
    fits = [size in (get_args(dim) or (size,)) for dim, size in zip(shape, dims, strict=False)]
    if dtype not in kinds or len(shape) != len(dims) or not all(fits):
        wanted = f"{' or '.join(map(str, kinds))} of {len(shape)} dims"
        raise ValueError(f"an array of {dtype} {list(dims)} stands where {wanted} belongs")


class Codec:
    """Encodes and decodes the messages of one connection. One thread encodes at a time, and one
    decodes. ``receives``: kinds of messages that the peer may send."""

    def __init__(self, receives: Iterable[type[Message]] = KINDS.values()) -> None:
        self.pool: Final = BufferPool()  # memory to join the parts of an array in
        self._receives = frozenset(receives)
        self._arrays: list[Array] = []
        self._body, self._at, self._end = NOTHING, 0, 0
        self._parts: Iterator[Any] = iter(())
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._encode_value).encode
        kinds = (*self._receives, *[Long] * any(kind.is_long for kind in self._receives))
        # A peer that may send nothing is held to a message without a number.
        union: Any = Union[kinds or (Message,)]  # noqa: UP007  (known at run time)
        self._decode = msgspec.msgpack.Decoder(union, dec_hook=self._decode_value).decode

    def encode(self, message: Message) -> Frame:
        """Encode one message. Arrays are referred to, not copied. Raises ProtocolError: If it can't
        travel: an array of another dtype, a number beyond 64 bits, too many bytes."""
        arrays = self._arrays = []
        try:
            fields = self._encode(message)
            if len(fields) > _LONG_BYTES and message.is_long:
                return self.encode(Long(np.frombuffer(fields, np.uint8)))
            body_bytes = 0
            for array in arrays:
                body_bytes = ((body_bytes + ALIGNMENT - 1) & -ALIGNMENT) + array.nbytes
            head = _PREFIX.pack(_MAGIC, len(fields), body_bytes) + fields
            if len(head) > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
                read_prefix(head)  # which refuses it
        except (OverflowError, TypeError, ValueError, RecursionError, ProtocolError) as error:
            raise ProtocolError(f"{type(message).__name__} can't be sent: {error}") from None
        return Frame(head, arrays, body_bytes)

    def decode(self, head: Array | memoryview, *parts: Any) -> Message:
        """Decode a message in one piece, or its head and the parts of its body. Arrays are views of
        these. Raises ProtocolError: If this side does not receive such a message."""
        view = memoryview(head)
        head_bytes, body_bytes = read_prefix(view)
        start = end = head_bytes
        if body_bytes and not parts:  # in one piece
            start, end = aligned(head_bytes), aligned(head_bytes) + body_bytes
        if len(view) != end:
            raise ProtocolError(f"{len(view)} bytes came, where {end} were announced")
        self._body, self._at, self._end, self._parts = head, start, end, iter(parts)
        fields = view[_PREFIX.size : head_bytes]
        try:
            message: Message = self._decode(fields)
            if type(message) is Long:
                fields = message.fields.data
                message = self._decode(fields)
                if not message.is_long:
                    raise ProtocolError("it has room in a head")
            if not -ALIGNMENT < self._end - self._at <= 0 or next(self._parts, None) is not None:
                raise ProtocolError("its body has bytes too many")
            return message
        except (msgspec.MsgspecError, FastDecodeError, UnicodeError, RecursionError) as error:
            kind = kind_of(fields, 0)
            if kind is None or kind not in self._receives:
                name = kind.__name__ if kind else "an unknown message"
                raise ProtocolError(f"{name} is not for this side") from None
            names = dict(enumerate(kind.__struct_fields__, start=1))
            reason = re.sub(r"\$\[(\d+)\]", lambda at: names.get(int(at[1]), at[0]), str(error))
            raise ProtocolError(f"{kind.__name__}: {reason}") from None
        finally:
            self._body, self._parts = NOTHING, iter(())

    def _encode_value(self, value: Any) -> Any:
        """Return what stands for an array or an error in msgpack; msgspec's hook."""
        dims = getattr(value, "shape", None)
        if dims:
            self._arrays.append(value)
            return _header_of(value.dtype, dims)
        return error_fields(value) if dims is None else value.item()  # a number of NumPy's

    def _decode_value(self, hint: Any, value: Any) -> Any:
        """Return the next array of the body, or an error; msgspec's hook."""
        if hint is FastDecodeError:
            return error_of(value)
        dims, dtype, num_bytes, fits = _parsed(value)
        if hint not in fits:
            _check_type(hint, dtype, dims)
            fits.append(hint)
        if self._at + num_bytes > self._end:
            self._next_part(num_bytes)
        decoded = np.ndarray(dims, dtype, self._body, self._at)
        self._at = (self._at + num_bytes + ALIGNMENT - 1) & -ALIGNMENT
        return decoded if decoded.flags.aligned else decoded.copy()

    def _next_part(self, num_bytes: int) -> None:
        """Read on in the body's next part, or in all parts that an array of ``num_bytes`` fills."""
        parts, came = [], 0
        while came < num_bytes and (part := next(self._parts, None)) is not None:
            parts.append(part)
            came += len(part)
        if self._at < self._end or came < num_bytes or (len(parts) > 1 and came > num_bytes):
            raise ValueError("its arrays go beyond its body, or do not fit its parts")
        if len(parts) > 1:
            buffers = [np.frombuffer(part, np.uint8) for part in parts]
            parts = [np.concatenate(buffers, out=self.pool.take(num_bytes))]
        self._body, self._at, self._end = parts[0] if parts else NOTHING, 0, came
