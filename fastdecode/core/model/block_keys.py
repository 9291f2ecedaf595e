"""Names of KV blocks: a block's key is a hash of all that its K and V depend on.

That is the model, as far as it is part of the root's key, and the tokens of the
block and of all before it: a key is made of its parent's and of the block's
tokens. Whoever doesn't know the **salt** that a root was made with can't name
its blocks, and so can't find out by hits whether they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

KEY_BYTES: Final = 16
MAX_SALT_CHARS: Final = 1024


def root_key(identity: str, salt: str = "") -> bytes:
    """The parent of first blocks.

    Args:
        identity: of all beside tokens that K and V depend on.
        salt: of whoever shares blocks with each other only.
    """
    said = identity.encode(errors="surrogatepass")
    head = len(said).to_bytes(8, "little")
    salted = salt.encode(errors="surrogatepass")
    return blake2b(head + said + salted, digest_size=KEY_BYTES).digest()


def block_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of consecutive full blocks.

    Args:
        parent: the key of the block before them, or the root's.
        token_ids: of the blocks, ``block_size`` each; what is left over has no
            key.
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
        token_ids: of the block.
    """
    data = np.array(token_ids, "<i4").tobytes()
    return blake2b(parent + data, digest_size=KEY_BYTES, person=b"tail").digest()


_BLOCKS: Final = "blocks/1"
"""How blocks lie in memory (``cpu_kernels.layout``): another number for another layout."""


def tier_identity(identity: str) -> str:
    """What kept blocks that outlive a process have to agree in, to the bit: 64
    hexadecimal digits.

    Args:
        identity: of all beside tokens that K and V depend on, every byte of the
            weights included.
    """
    said = f"{_BLOCKS}/{identity}".encode(errors="surrogatepass")
    return blake2b(said, digest_size=32, person=b"kept blocks").hexdigest()
