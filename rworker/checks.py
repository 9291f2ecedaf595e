"""What all that peers say is held to. What breaks the protocol raises
``ProtocolError``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.wire.kv.kept import KEY_WORDS
from fastdecode.wire.messages import (
    MAX_BLOCKS,
    MAX_HOLDERS,
    MAX_ID,
    MAX_STEP_TOKENS,
    PROTOCOL_VERSION,
    BeginStep,
    Hello,
)
from fastdecode.wire.traits import MAX_FEEDERS

_BEYOND = (
    f"num_beyond must be at least 0, and no sequence is longer than {MAX_SEQUENCE_TOKENS} tokens"
)


def check_hello(hello: Hello) -> None:
    """
    Raises:
        ProtocolError: it is of another version, or contradicts itself.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the S-worker speaks protocol version {hello.protocol_version}, this R-worker "
            f"{PROTOCOL_VERSION}: "
            "install the same version of fastdecode on both",
            code="protocol_version",
        )
    check_integer("holder", hello.holder, 0, MAX_HOLDERS - 1)
    check_integer("max_blocks", hello.max_blocks, 0, MAX_BLOCKS)
    check_integer("session", hello.session, 0, MAX_ID)
    if len(hello.feeders) > MAX_FEEDERS or len(set(hello.feeders)) < len(hello.feeders):
        raise ProtocolError(
            f"{len(hello.feeders)} feeders: {MAX_FEEDERS}, none twice, are the most"
        )
    if hello.feeders and not hello.session:
        raise ProtocolError("prompts come by a session's name, and there is none")
    kv = hello.kv
    if len(hello.attention) != kv.num_layers:
        raise ProtocolError(f"{len(hello.attention)} attention specs for {kv.num_layers} layers")
    for layer, spec in enumerate(hello.attention):
        if (spec.num_kv_heads, spec.head_dim) != (kv.num_kv_heads, kv.head_dim):
            raise ProtocolError(
                f"layer {layer} attends over {spec.num_kv_heads} KV heads of {spec.head_dim}, but "
                f"the KV cache has {kv.num_kv_heads} of {kv.head_dim}"
            )


def check_counts(begin: BeginStep, cached: NDArray[np.int64]) -> None:
    """``cached``: the worker's own token counts, [N]."""
    past = begin.num_past
    new = begin.num_new
    queries = begin.num_queries
    visible = begin.num_visible
    beyond = (
        np.zeros_like(cached) if begin.num_beyond is None else begin.num_beyond.astype(np.int64)
    )
    for wrong, rule in (
        (past != cached, "num_past must equal the {cached} tokens cached here"),
        (
            (new < 0) | ((new == 0) & (queries == 0)),
            "num_new must be at least 1, or 0 where something is attended",
        ),
        # Where nothing is beyond, the reservation is the limit.
        ((beyond < 0) | ((beyond > 0) & (cached + new + beyond > MAX_SEQUENCE_TOKENS)), _BEYOND),
        (
            (queries < 0) | (queries > new + beyond),
            "num_queries must be within 0 … num_new + num_beyond",
        ),
        (
            (visible != past) & (visible != cached + new),
            "num_visible must be num_past or num_past + num_new",
        ),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise ProtocolError(
                f"sequence {begin.sequence_ids[i]} (num_past={past[i]}, num_new={new[i]}, "
                f"num_beyond={beyond[i]}, num_queries={queries[i]}, num_visible={visible[i]}): "
                f"{rule.format(cached=cached[i])}"
            )
    for what, counts in (("appends", new), ("attends", queries)):
        num_tokens = int(counts.sum(dtype=np.int64))
        if num_tokens > MAX_STEP_TOKENS:
            raise ProtocolError(
                f"the step {what} {num_tokens} tokens; {MAX_STEP_TOKENS} is the most"
            )


def check_array(
    name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise ProtocolError(
            f"{name} must be an array of {dtype}, not "
            f"{getattr(array, 'dtype', type(array).__name__)}"
        )
    if array.shape != shape:
        raise ProtocolError(
            f"{name} has shape {list(array.shape)}, but {list(shape)} was announced"
        )
    if not array.flags.c_contiguous:
        raise ProtocolError(f"{name} must be C-contiguous")


def check_arrays(
    dtype: np.dtype[np.generic], *wanted: tuple[str, NDArray[np.generic], tuple[int, ...]]
) -> None:
    """``check_array`` for each, by its name and shape: called where one looks wrong."""
    for name, array, shape in wanted:
        is_right = type(array) is np.ndarray and array.dtype == dtype and array.shape == shape
        if not is_right or not array.flags.c_contiguous:
            check_array(name, array, dtype, shape)


def checked_keys(keys: NDArray[np.int64]) -> list[bytes]:
    """Of blocks, at least one."""
    num_keys = len(keys) if np.ndim(keys) == 2 else 0
    check_array("keys", keys, np.dtype(np.int64), (num_keys, KEY_WORDS))
    if not num_keys:
        raise ProtocolError("keys has none")
    data = keys.tobytes()
    size = len(data) // num_keys
    return [data[at : at + size] for at in range(0, len(data), size)]


def checked_gap(start: int, stop: int) -> range:
    """Tokens that are missing."""
    check_integer("gap_start", start, 0, MAX_SEQUENCE_TOKENS)
    return range(start, check_integer("gap_stop", stop, start, MAX_SEQUENCE_TOKENS))


def checked_identity(identity: str) -> str:
    """Of a lower tier: a name that is part of a path."""
    if len(identity) != 64 or not set(identity) <= set("0123456789abcdef"):
        raise ProtocolError("identity is not 64 hexadecimal digits")
    return identity


def check_integer(name: str, value: int, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r} is not a whole number within {low}..{high}")
    return value
