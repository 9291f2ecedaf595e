"""How the arrays of one message lie in its body, and how its head tells of
them.

In the head an array is a few uint32 **words**: its dtype and its dims. In the
body it starts at a multiple of ``ALIGNMENT``, behind the one before it. So the
words say everything about the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, Union, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError

ALIGNMENT: Final = 64
"""A cache line, and the widest vector."""
MAX_BODY_BYTES: Final = 1 << 30

Array: TypeAlias = NDArray[Any]

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<u2"),
    3: np.dtype("<i4"),
    4: np.dtype("<i8"),
    5: np.dtype("u1"),
}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}

# Layers of a step have the same shapes, and so have most steps: what was worked
# out once is looked up.
CACHED_SHAPES: Final = 64


class Body(NamedTuple):
    """What a message's arrays make of its body."""

    words: tuple[int, ...]
    views: tuple[tuple[tuple[int, ...], np.dtype[Any], int] | None, ...]
    """Of each array: dims, dtype, offset; None: it is absent."""
    places: tuple[slice, ...]
    """Of each array: where its bytes are; empty if it is absent."""
    num_bytes: int


@dataclass(frozen=True)
class ArrayField:
    """``name: Annotated[NDArray[...], "N D"]``, or with ``| None``; or the bytes of a field
    that travels as JSON (``fastdecode.wire.json_fields``)."""

    name: str
    dtypes: tuple[np.dtype[Any], ...]
    dims: tuple[str, ...]
    optional: bool

    @classmethod
    def of(cls, name: str, hint: Any) -> ArrayField:
        array, dims = get_args(hint)
        if not isinstance(dims, str):
            return cls(name, (np.dtype("u1"),), (name,), False)
        members = get_args(array) if get_origin(array) in (Union, UnionType) else (array,)
        arrays = [member for member in members if member is not NoneType]
        dtypes = tuple(_dtype(member) for member in arrays)
        assert set(dtypes) <= set(_CODES)
        return cls(name, dtypes, tuple(dims.split()), len(arrays) < len(members))

    @property
    def num_words(self) -> int:
        return 1 + len(self.dims)

    def __str__(self) -> str:
        return f"{self.name}: {' or '.join(map(str, self.dtypes))} [{', '.join(self.dims)}]"


def _dtype(array: Any) -> np.dtype[Any]:
    """The dtype of ``NDArray[X]``. Its last argument is ``dtype[X]``, and X itself from
    NumPy 2.5 on."""
    element = get_args(array)[-1]
    return np.dtype(next(iter(get_args(element)), element))


def is_array(hint: Any) -> bool:
    """Whether a message's field travels as an array."""
    return get_origin(hint) is Annotated


class ArrayLayout:
    """The array fields of one message."""

    def __init__(self, fields: Sequence[ArrayField]) -> None:
        self.fields = fields
        self.num_words = sum(field.num_words for field in fields)
        self.of_words = lru_cache(CACHED_SHAPES)(self._of_words)
        self.of_arrays = lru_cache(CACHED_SHAPES)(self._of_arrays)

    def _of_arrays(self, *arrays: tuple[np.dtype[Any], tuple[int, ...]] | None) -> Body:
        """From dtype and dims of each array. Raises ProtocolError if they
        aren't what the fields declare."""
        words: list[int] = []
        for field, array in zip(self.fields, arrays, strict=True):
            if array is None and field.optional:
                words += (0,) * field.num_words
                continue
            dtype, dims = array or (None, ())
            if dtype not in field.dtypes or len(dims) != len(field.dims) or max(dims) >= 1 << 32:
                raise ProtocolError(f"{dtype} {list(dims)} where {field} belongs")
            words += (_CODES[dtype], *dims)
        return self.of_words(tuple(words))

    def _of_words(self, words: tuple[int, ...]) -> Body:
        """From what a peer says. Raises ProtocolError if that isn't what the
        fields declare, or too much."""
        views: list[tuple[tuple[int, ...], np.dtype[Any], int] | None] = []
        places: list[slice] = []
        sizes: dict[str, int] = {}
        at = end = 0
        for field in self.fields:
            code, dims = words[at], words[at + 1 : at + field.num_words]
            at += field.num_words
            if code == 0 and field.optional and not any(dims):
                views.append(None)
                places.append(slice(0, 0))
                continue
            dtype = _DTYPES.get(code)
            if dtype is None or dtype not in field.dtypes:
                raise ProtocolError(f"dtype {dtype or code} where {field} belongs")
            for name, size in zip(field.dims, dims, strict=True):
                if sizes.setdefault(name, size) != size:
                    raise ProtocolError(
                        f"dim {name} of {field.name} is {size}, but {sizes[name]} elsewhere"
                    )
            start = aligned(end)
            end = start + prod(dims, start=dtype.itemsize)
            # An array without elements, too: NumPy refuses it for its other dims.
            most = start + prod([size or 1 for size in dims], start=dtype.itemsize)
            if most > MAX_BODY_BYTES:
                raise ProtocolError(
                    f"arrays of {most} bytes exceed the {MAX_BODY_BYTES} of a message"
                )
            views.append((dims, dtype, start))
            places.append(slice(start, end))
        return Body(words, tuple(views), tuple(places), end)


def aligned(num_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return (num_bytes + ALIGNMENT - 1) & -ALIGNMENT


def copy_into(arrays: tuple[Array | None, ...], out: memoryview, places: tuple[slice, ...]) -> None:
    """Copy arrays to their places in ``out``."""
    for array, place in zip(arrays, places):  # noqa: B905  (as many; checking takes time)
        if array is not None and array.size:
            try:
                out[place] = array.data.cast("B")
            except TypeError:  # it isn't contiguous; asking beforehand takes time, too
                out[place] = np.ascontiguousarray(array).data.cast("B")


def in_place(arrays: Sequence[Array | None], body: Body) -> Array | None:
    """A body, uint8 [num_bytes], if its arrays lie in one flat array just as
    they travel; else None."""
    base = None if arrays[0] is None else arrays[0].base
    if not isinstance(base, np.ndarray) or base.ndim != 1 or not base.flags.c_contiguous:
        return None
    start = _address(base)
    first = _address(arrays[0]) - start
    for array, place in zip(arrays, body.places, strict=True):
        if array is None or array.base is not base or not array.flags.c_contiguous:
            return None
        if array.size and _address(array) - start != first + place.start:
            return None
    found: Array = base.view(np.uint8)[first : first + body.num_bytes]
    return found if len(found) == body.num_bytes else None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
