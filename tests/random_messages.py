"""Any message of the protocol, made from its declared fields."""

from __future__ import annotations

import dataclasses
import enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of
from random_requests import DELTAS, REQUESTS, TOKENS

from fastdecode.core.delta import Delta
from fastdecode.core.dtype import DType
from fastdecode.core.sequence import Request
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.arrays import ArrayField, is_array
from fastdecode.wire.instances.messages import EndConversation
from fastdecode.wire.messages import Hello
from fastdecode.wire.opcodes import OPCODES

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
ACTIVATIONS = [dtype for dtype in DType if dtype.is_float]


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


BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: INTS,
    float: FLOATS,
    str: TEXTS,
    NoneType: st.none(),
    Any: st.integers() | TEXTS,
    AttentionSpec: attention_specs(),
    KVSpec: st.builds(
        KVSpec, st.integers(1, 100), st.integers(1, 64), st.just(64), st.sampled_from(DType)
    ),
    Request: REQUESTS,
    Delta: DELTAS,
}
BY_FIELD: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (Hello, "activation_dtype"): st.sampled_from(ACTIVATIONS),
    (Hello, "outlives"): st.just(False),
    (Hello, "resumes"): st.just(False),
    (Hello, "role"): st.just(Hello.role),
    (EndConversation, "token_ids"): TOKENS,
}
"""Fields of which not every value makes sense."""


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a declared type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    if origin in (Union, UnionType):
        return st.one_of(*map(of_type, args))
    if origin in (tuple, list) or (origin is not None and len(args) == 1):
        return st.lists(of_type(args[0]), max_size=3).map(tuple)
    if origin is not None:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return any_of(hint)


@st.composite
def any_of(draw: st.DrawFn, kind: type[Any]) -> Any:
    """Draw every field of a dataclass. Arrays share the dims that have one name."""
    hints = get_type_hints(kind, include_extras=True)
    dims: dict[str, int] = {}
    made: dict[str, Any] = {}
    bits = draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.uint16)]))
    for name in (field.name for field in dataclasses.fields(kind)):
        hint = hints[name]
        if (kind, name) in BY_FIELD:
            made[name] = draw(BY_FIELD[kind, name])
        elif is_array(hint) and not isinstance(get_args(hint)[1], str):
            made[name] = draw(of_type(get_args(hint)[0]))  # travels as JSON
        elif is_array(hint):
            array = ArrayField.of(name, hint)
            for dim in array.dims:
                dims.setdefault(dim, int(dim) if dim.isdigit() else draw(st.integers(0, 5)))
            shape = tuple(dims[dim] for dim in array.dims)
            dtype = bits if bits in array.dtypes else array.dtypes[0]
            is_absent = array.optional and draw(st.booleans())
            made[name] = None if is_absent else draw(arrays_of(dtype, shape))
        else:
            made[name] = draw(of_type(hint))
    return kind(**made)


MESSAGES: dict[type, st.SearchStrategy[Any]] = {kind: any_of(kind) for kind in OPCODES}
