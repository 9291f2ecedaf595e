"""Messages to bytes and back: msgpack for fields, raw bytes for arrays.

A message travels as a **head** and a **body**::

    head   | prefix 16 | msgpack: [tag, field, field, ...] |
    prefix | magic 3s, version u8 | bytes of msgpack u32 | bytes of the body u64 |
    body   | array | pad to 64 | array | pad to 64 | ... | array |

Everything is little-endian. In msgpack an array is its **header**, bytes: dtype u8, number of dims
u8, dims u32 each. So a transport may send arrays from where they lie, and receive a body into
memory that it already has: ``Prefix`` says how much to expect. In one piece, the body starts at
the first multiple of 64 behind the head. ZeroMQ sends each array in frames of its own, without
padding. Where a head would be too long (``Message.is_long``), the
prefix announces none, and the body is the msgpack.

The codec refuses what a peer sent with ``ProtocolError``, before any state is touched, unless all
of this holds: magic, version, lengths; a tag that this side receives; every field within its type
and bounds; every array's dtype and number of dims; arrays that fill the body. Array elements are
left to the network's own checksums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from struct import Struct as Packer
from struct import error as PackError
from typing import Any, Final, NamedTuple, TypeAlias, Union, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.wire.instances.messages import InstanceSays, ToInstance
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker, ToRWorker
from fastdecode.wire.stages import FromStage, StageMessage
from fastdecode.wire.traits import Message

Array: TypeAlias = NDArray[Any]

ALIGNMENT: Final = 64  # a cache line, and the widest vector
MAX_HEAD_BYTES: Final = 1 << 18
MAX_BODY_BYTES: Final = 1 << 30
_LONG_BYTES: Final = 1 << 16
NAME: Final = b"FDN"
"""What a message of any version begins with."""
_MAGIC: Final = NAME + bytes([PROTOCOL_VERSION])
_PREFIX: Final = Packer("<4sIQ")
_DTYPES: Final = [np.dtype(name) for name in ("<f4", "<u2", "<i4", "<i8", "u1")]
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_DIMS: Final = 3
_ERRORS: Final = {
    kind.__name__: kind
    for kind in (FastDecodeError, RequestError, CapacityError, WorkerError, ConfigError)
}
"""Errors as they travel: a subclass becomes the closest of these."""
KINDS: Final[dict[int, type[Message]]] = {
    kind.__struct_config__.tag: kind
    for union in (ToRWorker, FromRWorker, StageMessage, FromStage, ToInstance, InstanceSays)
    for kind in get_args(union)
}
"""All messages of the protocol, by their numbers."""
_CACHED: Final = 1024  # shapes that are kept, since most steps have the same; a peer chooses them

assert sys.byteorder == "little", "arrays travel as they lie in memory, little-endian"


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return (num_bytes + ALIGNMENT - 1) & -ALIGNMENT


class Prefix(NamedTuple):
    """What the first bytes of a message say."""

    head_bytes: int  # with the prefix
    body_bytes: int

    @classmethod
    def of(cls, data: bytes | memoryview, max_body_bytes: int = MAX_BODY_BYTES) -> Prefix:
        """Read the prefix at the start of ``data``.

        Raises:
            ProtocolError: If these bytes begin no message, or announce more than is allowed.
                (code ``protocol_version``) If the peer speaks another version.
        """
        try:
            magic, fields_bytes, body_bytes = _PREFIX.unpack_from(data)
        except PackError:
            raise ProtocolError(
                f"{len(data)} bytes are too few for a message: is another program using this port?"
            ) from None
        if magic != _MAGIC:
            if magic[:3] == NAME:
                raise ProtocolError(
                    f"the peer speaks protocol version {magic[3]}, this side {PROTOCOL_VERSION}: "
                    "install the same FastDecode on every host",
                    code="protocol_version",
                )
            raise ProtocolError(
                f"a message starts with {magic!r}, not {_MAGIC!r}: is another program using this "
                "port?"
            )
        head_bytes = _PREFIX.size + fields_bytes
        if head_bytes > MAX_HEAD_BYTES or body_bytes > max_body_bytes:
            raise ProtocolError(
                f"a head of {head_bytes} bytes and a body of {body_bytes}, where "
                f"{MAX_HEAD_BYTES} and {max_body_bytes} are allowed"
            )
        return cls(head_bytes, body_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of head and body in one piece."""
        body_at = (self.head_bytes + ALIGNMENT - 1) & -ALIGNMENT  # aligned, without the call
        return body_at + self.body_bytes if self.body_bytes else self.head_bytes

    def is_whole(self, num_bytes: int) -> bool:
        """Return True if a piece of ``num_bytes`` is the whole message, False if it is the head.

        Raises:
            ProtocolError: If it is neither.
        """
        whole = self.num_bytes
        if num_bytes not in (whole, self.head_bytes):
            raise ProtocolError(
                f"{num_bytes} bytes came, where a head of {self.head_bytes} and a body of "
                f"{self.body_bytes} were announced"
            )
        return num_bytes == whole


class Frame(NamedTuple):
    """An encoded message: its head, and its arrays where they lie."""

    head: bytes
    arrays: Sequence[Array]
    body_bytes: int

    @property
    def body_at(self) -> int:
        """Where the body starts in one piece."""
        num_bytes = len(self.head)
        return (num_bytes + ALIGNMENT - 1) & -ALIGNMENT if self.body_bytes else num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of head and body in one piece."""
        return self.body_at + self.body_bytes

    def write(self, out: memoryview) -> None:
        """Write head and body in one piece into bytes [num_bytes]. Padding stays as it was."""
        out[: len(self.head)] = self.head
        self._copy(out, self.body_at)

    def write_body(self, out: memoryview) -> None:
        """Copy the arrays into bytes [body_bytes]."""
        self._copy(out, 0)

    def body_in_place(self) -> Array | None:
        """Return the body, uint8 [body_bytes], if the arrays lie in one flat array."""
        base = self.arrays[0].base if self.arrays else None
        if not isinstance(base, np.ndarray) or base.ndim != 1 or not base.flags.c_contiguous:
            return None
        start = _address(base)
        at = first = _address(self.arrays[0]) - start
        for array in self.arrays:
            if array.base is not base or not array.flags.c_contiguous:
                return None
            if array.size and _address(array) - start != at:
                return None
            at = first + aligned(at - first + array.nbytes)
        found: Array = base.view(np.uint8)[first : first + self.body_bytes]
        return found if len(found) == self.body_bytes else None

    def _copy(self, out: memoryview, at: int) -> None:
        for array in self.arrays:
            end = at + array.nbytes
            if end > at:
                try:
                    out[at:end] = array.data.cast("B")
                except TypeError:  # it isn't contiguous, and a check takes time
                    out[at:end] = np.ascontiguousarray(array).data.cast("B")
            at = (end + ALIGNMENT - 1) & -ALIGNMENT


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _ArrayHeaders(dict[tuple[np.dtype[Any], tuple[int, ...]], bytes]):
    """The header of an array, by its dtype and dims."""

    def __missing__(self, key: tuple[np.dtype[Any], tuple[int, ...]]) -> bytes:
        dtype, dims = key
        if dtype not in _CODES or max(dims) >= 1 << 32:
            raise ProtocolError(f"an array of {dtype} {list(dims)} can't be sent")
        if len(self) >= _CACHED:
            self.clear()
        header = Packer(f"<BB{len(dims)}I").pack(_CODES[dtype], len(dims), *dims)
        self[key] = header
        return header


class _ArrayHeader(NamedTuple):
    """What the header of an array says."""

    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    num_bytes: int
    step: int  # bytes up to the next one
    fits: list[Any]  # types of fields that it is known to fit


class _ParsedHeaders(dict[bytes, _ArrayHeader]):
    """Parsed headers of arrays. Raises ValueError: If a header is invalid."""

    def __missing__(self, header: bytes) -> _ArrayHeader:
        if type(header) is not bytes or len(header) < 2 or len(header) != 2 + 4 * header[1]:
            raise ValueError("the header of an array is damaged")
        code, num_dims = header[0], header[1]
        if code >= len(_DTYPES) or not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"no array has dtype {code} and {num_dims} dims")
        dtype, dims = _DTYPES[code], Packer(f"<{num_dims}I").unpack_from(header, 2)
        # An array without elements, too: NumPy refuses it for its other dims.
        if prod([size or 1 for size in dims], start=dtype.itemsize) > MAX_BODY_BYTES:
            raise ValueError(f"an array of {dtype} {list(dims)} exceeds {MAX_BODY_BYTES} bytes")
        if len(self) >= _CACHED:
            self.clear()
        num_bytes = prod(dims, start=dtype.itemsize)
        array = self[header] = _ArrayHeader(dims, dtype, num_bytes, aligned(num_bytes), [])
        return array


_HEADERS: Final = _ArrayHeaders()
_PARSED: Final = _ParsedHeaders()
_NOTHING: Final[Array] = np.zeros(0, np.uint8)


def _refusal(message: Message, reason: str) -> ProtocolError:
    return ProtocolError(f"{type(message).__name__}: {reason}")


def _check_type(hint: Any, array: _ArrayHeader) -> None:
    """Raise ValueError if ``ndarray[tuple[int, ...], dtype[X]]`` does not describe this array."""
    shape, element = get_args(hint)
    (scalars,) = get_args(element)
    kinds = {np.dtype(scalar) for scalar in get_args(scalars) or (scalars,)}
    if array.dtype not in kinds or len(array.dims) != len(get_args(shape)):
        names = " or ".join(sorted(map(str, kinds)))
        raise ValueError(
            f"an array of {array.dtype} {list(array.dims)} stands where {names} of "
            f"{len(get_args(shape))} dims belongs"
        )
    array.fits.append(hint)


def kind_of(head: memoryview) -> type[Message] | None:
    """Return the kind of the message that this head begins, without reading its fields. None if
    it has none; a message that is long counts as none."""
    return _kind_of(head[_PREFIX.size :])


def _kind_of(fields: memoryview) -> type[Message] | None:
    # msgpack: an array of up to 15 items, or of more; then the tag, up to 127 or above.
    start = bytes(fields[:5])
    at = 3 if start[:1] == b"\xdc" else 1
    tag = start[at + 1 : at + 2] if start[at : at + 1] == b"\xcc" else start[at : at + 1]
    return KINDS.get(tag[0]) if tag else None


def _readable(fields: Any) -> Any:
    """Return the same builtins with ``?`` for each lone surrogate, which UTF-8 hasn't."""
    if isinstance(fields, str):
        return fields.encode("utf-8", "replace").decode()
    if isinstance(fields, dict):
        return {_readable(key): _readable(value) for key, value in fields.items()}
    return [_readable(each) for each in fields] if isinstance(fields, (list, tuple)) else fields


class Codec:
    """Encodes and decodes the messages of one connection. One thread encodes at a time, and one
    decodes.

    Args:
        receives: Kinds of messages that the peer may send. None for all.
    """

    def __init__(self, receives: Iterable[type[Message]] = KINDS.values()) -> None:
        self._receives = frozenset(receives)
        # A peer that may send nothing is held to a message without a number.
        union: Any = Union[tuple(self._receives) or (Message,)]  # noqa: UP007  (known at run time)
        self._arrays: list[Array] = []
        self._body: Array = _NOTHING
        self._at = self._end = 0
        self._frames: Iterator[Any] | None = None
        self._take_buffer: Callable[[int], Array] = np.empty
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._encode_value).encode
        self._decode: Callable[[Any], Message]
        self._decode = msgspec.msgpack.Decoder(union, dec_hook=self._decode_value).decode

    def encode(self, message: Message) -> Frame:
        """Encode one message. Arrays are referred to, not copied.

        Raises:
            ProtocolError: If the message can't travel: an array of another dtype, a number beyond
                64 bits, more bytes than a message may have.
        """
        arrays = self._arrays = []
        try:
            try:
                fields = self._encode(message)
            except UnicodeEncodeError:  # a lone surrogate, in an error about a client's text
                arrays.clear()
                plain = msgspec.to_builtins(
                    message, builtin_types=(bytes,), enc_hook=self._encode_value
                )
                fields = self._encode(_readable(plain))
        except ProtocolError as error:
            raise _refusal(message, str(error)) from None
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise _refusal(message, f"can't be sent: {error}") from None
        finally:
            self._arrays = []
        fields_bytes = len(fields)
        if fields_bytes > _LONG_BYTES and message.is_long:
            arrays.append(np.frombuffer(fields, np.uint8))
            fields, fields_bytes = b"", 0
        body_bytes = 0
        for array in arrays:
            body_bytes = ((body_bytes + ALIGNMENT - 1) & -ALIGNMENT) + array.nbytes
        if fields_bytes + _PREFIX.size > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
            raise _refusal(
                message,
                f"{fields_bytes} bytes of fields and {body_bytes} of arrays exceed the "
                f"{MAX_HEAD_BYTES} and {MAX_BODY_BYTES} of a message",
            )
        head = _PREFIX.pack(_MAGIC, fields_bytes, body_bytes) + fields
        return Frame(head, arrays, body_bytes)

    def decode(self, piece: Array, prefix: Prefix | None = None) -> Message:
        """Decode a message in one piece, uint8 [num_bytes]. Its arrays are views of ``piece``.

        Args:
            prefix: Of the piece, if it was read and ``is_whole``.

        Raises:
            ProtocolError: If this side does not receive such a message.
        """
        if prefix is None:
            prefix = Prefix.of(piece.data)
            if not prefix.is_whole(len(piece)):
                raise ProtocolError(f"a body of {prefix.body_bytes} bytes is missing")
        start = prefix.num_bytes - prefix.body_bytes
        return self._decoded(piece.data[_PREFIX.size : prefix.head_bytes], piece, start)

    def decode_apart(self, head: Array, body: Array) -> Message:
        """Decode a message whose body came apart. Its arrays are views of ``body``.

        Raises:
            ProtocolError: If this side does not receive such a message.
        """
        return self._decoded(head.data[_PREFIX.size :], body, 0)

    def decode_frames(
        self, head: memoryview, frames: Sequence[Any], take: Callable[[int], Array]
    ) -> Message:
        """Decode a message whose arrays came in frames of their own, one or several each. Its
        arrays are views of these, or of what ``take`` gives to join several in.

        Raises:
            ProtocolError: If this side receives no such message.
        """
        prefix = Prefix.of(head)
        num_bytes = sum(map(len, frames))
        if prefix.head_bytes != len(head) or num_bytes > prefix.body_bytes:
            raise ProtocolError(
                f"{len(head)} and {num_bytes} bytes came, where a head of {prefix.head_bytes} and "
                f"a body of {prefix.body_bytes} were announced"
            )
        self._frames, self._take_buffer = iter(frames), take
        try:
            if len(head) > _PREFIX.size:
                return self._decoded(head[_PREFIX.size :], _NOTHING, 0, num_bytes)
            if not num_bytes:
                raise ProtocolError("a message without fields came")
            whole = np.frombuffer(self._joined(num_bytes), np.uint8)
        finally:
            self._frames = None
        return self._decoded(head[_PREFIX.size :], whole, 0)

    def _decoded(
        self, fields: memoryview, body: Array, start: int, frame_bytes: int | None = None
    ) -> Message:
        is_long = not fields
        if is_long:
            fields, start = body.data[start:], len(body)
        self._body, self._at = body, start
        self._end = len(body) if frame_bytes is None else frame_bytes
        try:
            message = self._decode(fields)
        except (msgspec.MsgspecError, FastDecodeError, UnicodeError, RecursionError) as error:
            raise ProtocolError(self._reason(fields, error)) from None
        finally:
            self._body = _NOTHING
        if is_long and not message.is_long:
            raise _refusal(message, "its fields came in the place of arrays")
        if not -ALIGNMENT < self._end - self._at <= 0:
            raise _refusal(message, f"its body has {self._end - self._at} bytes too many")
        return message

    def _reason(self, fields: memoryview, error: Exception) -> str:
        """Return why this side refuses what came."""
        kind = _kind_of(fields)
        if kind is None:
            return f"an unknown message came: {error}"
        if kind not in self._receives:
            return f"{kind.__name__} is not for this side"
        return f"{kind.__name__}: {error}"

    def _encode_value(self, value: Any) -> Any:
        """Return what stands for an array or an error in msgpack; msgspec's hook."""
        try:
            dims: tuple[int, ...] = value.shape
        except AttributeError:
            if isinstance(value, FastDecodeError):
                kinds = [kind.__name__ for kind in type(value).__mro__ if kind.__name__ in _ERRORS]
                return kinds[0], value.message, value.code
            raise TypeError(f"{type(value).__name__} has no place in a message") from None
        if not dims:
            return value.item()  # a number of NumPy's
        self._arrays.append(value)
        return _HEADERS[value.dtype, dims]

    def _decode_value(self, hint: Any, header: Any) -> Any:
        """Return the next array of the body, or an error; msgspec's hook."""
        if hint is FastDecodeError:
            name, message, code = header
            if type(message) is not str or type(code) is not str or name not in _ERRORS:
                raise ValueError("an error is damaged")
            return _ERRORS[name](message, code=code)
        array = _PARSED[header]
        if hint not in array.fits:
            _check_type(hint, array)
        at = self._at
        if at + array.num_bytes > self._end:
            raise ValueError("its arrays go beyond its body")
        if self._frames is not None:
            self._at = at + array.num_bytes
            decoded = np.ndarray(array.dims, array.dtype, self._joined(array.num_bytes))
            return decoded if decoded.flags.aligned else decoded.copy()
        self._at = at + array.step
        return np.ndarray(array.dims, array.dtype, self._body, at)

    def _joined(self, num_bytes: int) -> Any:
        """Return the next frames as one buffer. Raises ProtocolError: If they don't fit."""
        assert self._frames is not None
        part = next(self._frames, b"") if num_bytes else b""
        if len(part) == num_bytes:
            return part
        joined, at = self._take_buffer(num_bytes), 0
        while at < num_bytes:
            end = at + len(part)
            if not at < end <= num_bytes:
                raise ProtocolError("its frames don't fit its arrays")
            joined[at:end] = np.frombuffer(part, np.uint8)
            at, part = end, next(self._frames, b"") if end < num_bytes else b""
        return joined
