"""Any message of the protocol, made from the fields that it declares."""

from __future__ import annotations

from collections import abc
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of
from random_requests import DELTAS, REQUESTS, SOURCES

from fastdecode.core.delta import Delta
from fastdecode.core.dtype import DType
from fastdecode.core.holders import KVSource
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.sequence import Request
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import Inventory, Open, Progress
from fastdecode.wire.codec import KINDS
from fastdecode.wire.messages import Hello
from fastdecode.wire.traits import OWNERS, Message

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)


@st.composite
def attention_specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * group
    return AttentionSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 512)),
        scale=draw(st.floats(1e-3, 10)),
        sliding_window=draw(st.none() | st.integers(1, 1 << 40)),
        alibi_slopes=draw(st.none() | st.tuples(*[st.floats(-1, 1)] * heads)),
        logit_softcap=draw(st.none() | st.floats(1, 100)),
    )


_LISTS = st.lists(TEXTS, max_size=3).map(tuple)
_NUMBERS = st.lists(INTS, max_size=3).map(tuple)
_KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: FLOATS,
    bool: st.booleans(),
    str: TEXTS,
    Any: st.integers(0, 9) | TEXTS,
    AttentionSpec: attention_specs(),
    KVSpec: st.builds(
        KVSpec, st.integers(1, 100), st.integers(1, 64), st.just(64), st.sampled_from(DType)
    ),
    HostFacts: st.builds(
        HostFacts, TEXTS, _LISTS, TEXTS, _NUMBERS, INTS, _LISTS, TEXTS, INTS, _LISTS
    ),
    KVSource: SOURCES,
    Request: REQUESTS,
    Delta: DELTAS,
}
_TOGETHER: dict[type[Message], dict[str, st.SearchStrategy[Any]]] = {
    Hello: {
        "activation_dtype": st.sampled_from([dtype for dtype in DType if dtype.is_float]),
        "role": st.sampled_from(sorted(OWNERS, key=lambda role: role.name)),
        "outlives": st.just(False),
        "resumes": st.just(False),
    },
    Open: {"gap_start": st.integers(0, 9), "gap_stop": st.integers(10, 1 << 23)},
    Progress: {"num_there": st.integers(1, 9), "num_layers": st.integers(10, 4096)},
    Inventory: {
        "keys": st.just(np.ones((3, 2), np.int64)),
        "num_tokens": arrays_of(np.int32, 3, elements=st.integers(1, 1 << 30)),
        "num_slots": st.integers(3, 1 << 24),
    },
}
"""What the fields of a message must be together."""


def _array(hint: Any, num_rows: int) -> st.SearchStrategy[Any]:
    shape, element = get_args(hint)
    (scalars,) = get_args(element)
    dtypes = [np.dtype(scalar) for scalar in get_args(scalars) or (scalars,)]
    dims = (num_rows, 2, 3)[: len(get_args(shape))]
    return st.sampled_from(dtypes).flatmap(lambda dtype: arrays_of(dtype, dims))


def _values(hint: Any, num_rows: int, has_options: bool) -> st.SearchStrategy[Any]:
    """Values of a field's type. Arrays have ``num_rows`` rows, optional ones if ``has_options``."""
    if hint in _KNOWN:
        return _KNOWN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = args[1]
        if args[0] is int:
            return st.integers(bounds.ge, bounds.lt - 1 if bounds.le is None else bounds.le)
        if args[0] is float:
            return st.floats(max(bounds.ge or 0, bounds.gt or 0), 1e6, exclude_min=True)
        if bounds.pattern:
            return st.from_regex(bounds.pattern)
        values = _values(args[0], num_rows, has_options)
        return values.filter(lambda value: len(value) >= (bounds.min_length or 0))
    if origin in (Union, UnionType):
        inner = [_values(each, num_rows, True) for each in args if each is not NoneType]
        if any(get_origin(each) is np.ndarray for each in args):
            return inner[0] if has_options else st.none()
        return st.none() | st.one_of(inner)
    if origin is np.ndarray:
        return _array(hint, num_rows)
    if origin is tuple:
        return st.lists(_values(args[0], num_rows, has_options), max_size=3).map(tuple)
    if origin is abc.Mapping:
        return st.dictionaries(TEXTS, _KNOWN[args[1]], max_size=3)
    assert issubclass(hint, Enum), hint
    return st.sampled_from(hint)


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    num_rows, has_options = draw(st.integers(0, 5)), draw(st.booleans())
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: draw(_values(hints[name], num_rows, has_options)) for name in kind.__struct_fields__
    }
    fields |= {name: draw(values) for name, values in _TOGETHER.get(kind, {}).items()}
    return kind(**fields)


MESSAGES: dict[type[Message], st.SearchStrategy[Any]] = {
    kind: messages(kind) for kind in KINDS.values()
}
