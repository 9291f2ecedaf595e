"""Checks of peers' messages. What breaks the protocol raises ``ProtocolError``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.blocks import keys_of
from fastdecode.wire.messages import Hello


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError if a greeting contradicts itself."""
    kv = hello.kv
    if len(hello.attention) != kv.num_layers:
        raise ProtocolError(f"{len(hello.attention)} attention specs for {kv.num_layers} layers")
    for layer, spec in enumerate(hello.attention):
        if (spec.num_kv_heads, spec.head_dim) != (kv.num_kv_heads, kv.head_dim):
            raise ProtocolError(
                f"layer {layer} attends over {spec.num_kv_heads} KV heads of {spec.head_dim}, but "
                f"the KV cache has {kv.num_kv_heads} of {kv.head_dim}"
            )


def checked_keys(keys: NDArray[np.int64]) -> list[bytes]:
    """Return the keys of blocks. Raises ProtocolError: If there are none."""
    if not len(keys):
        raise ProtocolError("keys has none")
    return keys_of(keys)
