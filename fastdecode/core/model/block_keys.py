"""Keys of KV blocks: a block's key is a hash of a salt, and of the tokens of the block and of all
before it. What else its K and V depend on, as model and dtype, is compared once where blocks come
from elsewhere (``tier_identity``).

A reader that doesn't know the **salt** can't name blocks, and so can't find out by hits whether
they exist."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

KEY_BYTES: Final = 16
MAX_SALT_CHARS: Final = 1024


def root_key(salt: str) -> bytes:
    """Return the parent of first blocks. Only requests of one ``salt`` share blocks."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def block_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of consecutive full blocks.

    Args:
        parent: the key of the block before them, or the root's.
        token_ids: of the blocks, ``block_size`` each; what is left over has no key.
    """
    data = np.array(token_ids, "<i4").tobytes()
    size = 4 * block_size
    keys = []
    for at in range(0, len(token_ids) // block_size * size, size):
        parent = blake2b(parent + data[at : at + size], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def tail_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block that isn't full.

    Args:
        parent: as of ``block_keys``.
    """
    data = np.array(token_ids, "<i4").tobytes()
    return blake2b(parent + data, digest_size=KEY_BYTES, person=b"tail").digest()


_BLOCKS: Final = "blocks/1"
"""How blocks lie in memory (``cpu_kernels.layout``): another number for another layout."""


def tier_identity(identity: str) -> str:
    """What kept blocks that outlive a process have to agree in, to the bit: 64 hexadecimal
    digits.

    Args:
        identity: of all beside tokens that K and V depend on, every byte of the weights included.
    """
    said = f"{_BLOCKS}/{identity}".encode(errors="surrogatepass")
    return blake2b(said, digest_size=32, person=b"kept blocks").hexdigest()
