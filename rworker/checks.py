"""Checks of peers' messages. What breaks the protocol raises ``ProtocolError``."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.wire.blocks import keys_of
from fastdecode.wire.messages import MAX_STEP_TOKENS, PROTOCOL_VERSION, BeginStep, Hello

_RULES: Final = (
    "num_past must equal the {cached} tokens cached here",
    "num_new must be at least 1, or 0 where something is attended",
    f"num_beyond must be at least 0, and no sequence is longer than {MAX_SEQUENCE_TOKENS} tokens",
    "num_queries must be within 0 … num_new + num_beyond",
    "num_visible must be num_past or num_past + num_new",
)
"""Rules of a step's counts, in the order in which they are checked."""


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError if a greeting is of another version, or contradicts itself."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the S-worker speaks protocol version {hello.protocol_version}, this R-worker "
            f"{PROTOCOL_VERSION}: "
            "install the same version of fastdecode on both",
            code="protocol_version",
        )
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
    """Check a step's counts. ``cached``: the worker's own token counts, [N]."""
    past, new = begin.num_past, begin.num_new
    queries, visible = begin.num_queries, begin.num_visible
    beyond = np.zeros_like(cached)
    if begin.num_beyond is not None:
        beyond = begin.num_beyond.astype(np.int64)
    broken = (
        past != cached,
        (new < 0) | ((new == 0) & (queries == 0)),
        # Where nothing is beyond, the reservation is the limit.
        (beyond < 0) | ((beyond > 0) & (cached + new + beyond > MAX_SEQUENCE_TOKENS)),
        (queries < 0) | (queries > new + beyond),
        (visible != past) & (visible != cached + new),
    )
    for wrong, rule in zip(broken, _RULES, strict=True):
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


def check_arrays(
    dtype: np.dtype[np.generic], *wanted: tuple[str, NDArray[np.generic], tuple[int, ...]]
) -> None:
    """Raise ProtocolError unless arrays, each by its name and shape, are as announced."""
    for name, array, shape in wanted:
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            found = getattr(array, "dtype", type(array).__name__)
            raise ProtocolError(f"{name} must be an array of {dtype}, not {found}")
        if array.shape != shape:
            raise ProtocolError(
                f"{name} has shape {list(array.shape)}, but {list(shape)} was announced"
            )
        if not array.flags.c_contiguous:
            raise ProtocolError(f"{name} must be C-contiguous")


def checked_keys(keys: NDArray[np.int64]) -> list[bytes]:
    """Return the keys of blocks. Raises ProtocolError: If there are none."""
    if not len(keys):
        raise ProtocolError("keys has none")
    return keys_of(keys)
