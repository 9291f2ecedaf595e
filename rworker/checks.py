"""Checks of peers' messages. What breaks the protocol raises ``ProtocolError``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.blocks import keys_of
from fastdecode.wire.messages import PROTOCOL_VERSION, Hello


def check_version(version: int, peer: str) -> None:
    """Raise ProtocolError if a peer speaks another version."""
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {peer} speaks protocol version {version}, this R-worker {PROTOCOL_VERSION}: "
            "install the same version of fastdecode on both",
            code="protocol_version",
        )


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError if a greeting is of another version, or contradicts itself."""
    check_version(hello.protocol_version, "S-worker")
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
