"""How both ends of a ZeroMQ connection prove that they have the cluster's key,
where what they send isn't encrypted (``LinkSecurity.AUTHENTICATE``).

Before either end takes a message, ZeroMQ asks the end that connects for a password
that is made of the key (``door_password``). So a peer without the key can't have
this one buffer anything.

The end that connects sends a **challenge**, a random number. The other answers
with a random number of its own and a **proof**, which only the key can make of
both. From then on both have a **session**: two keys made of the cluster's key
and the two numbers, one for each direction. In front of every message goes a
**tag**, made with the direction's key of the message's number, its length and
its head. So the first tagged message proves the other end, and nothing that was
recorded before, or on another connection, is accepted.

A tag covers the head of a message, and of what has no head (a long message's
further pieces) the first bytes. It does not cover arrays: an attacker who reaches into
the network between hosts can read and change K, V, q and o. Such a one can't
make up, repeat, leave out or reorder messages, nor say how long their arrays
are, which is what memory is taken by.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum
from hashlib import blake2b
from struct import Struct
from typing import Any, Final

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.codec import Prefix

TAG_BYTES: Final = 16
_NUMBER_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_CHALLENGE: Final = b"FDLK\x01C"
_PROOF: Final = b"FDLK\x01P"
_BYTES_WITHOUT_HEAD: Final = 64
"""That a tag covers at least, also of what doesn't begin with a head."""
_COUNTED = Struct("<QQ")


class LinkSecurity(Enum):
    """How a key protects what travels between hosts."""

    ENCRYPT = "encrypt"
    """CURVE: both ends prove the key, and everything is encrypted."""
    AUTHENTICATE = "authenticate"
    """Both ends prove the key; heads are protected, arrays travel as they are."""


class ProvenSession:
    """What both ends share once one has answered the other's challenge. Counts
    the messages of both directions: each is to be sent, and checked, once.

    Args:
        send_key, receive_key: of each direction.
    """

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    def tag(self, data: Any) -> bytes:
        """What goes in front of the next message that is sent."""
        self._num_sent += 1
        return _tag(self._send_key, self._num_sent, data)

    def accepts(self, tag: Any, data: Any) -> bool:
        """Whether this is the next message of the other end, and its tag."""
        self._num_received += 1
        return hmac.compare_digest(bytes(tag), _tag(self._receive_key, self._num_received, data))


class Challenge:
    """Of the end that connects.

    Args:
        key: of the cluster.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = secrets.token_bytes(_NUMBER_BYTES)
        self.message = _CHALLENGE + self._number
        """To be sent first, without a tag."""

    def session(self, proof: Any) -> ProvenSession | None:
        """The session, if this is a proof of the other end's; None: it isn't."""
        data = bytes(proof)
        theirs = data[len(_PROOF) : len(_PROOF) + _NUMBER_BYTES]
        numbers = self._number + theirs
        expected = _PROOF + theirs + _derived(self._key, b"proof of listener", numbers)
        if not hmac.compare_digest(data, expected):
            return None
        return ProvenSession(*_direction_keys(self._key, numbers))


def answer_challenge(key: bytes, challenge: Any) -> tuple[bytes, ProvenSession] | None:
    """The proof to be sent back, without a tag, and the session; None: this is no
    challenge."""
    if len(challenge) != len(_CHALLENGE) + _NUMBER_BYTES:
        return None  # before it is copied: a stranger has sent it
    data = bytes(challenge)
    if not data.startswith(_CHALLENGE):
        return None
    ours = secrets.token_bytes(_NUMBER_BYTES)
    numbers = data[len(_CHALLENGE) :] + ours
    to_listener, to_connecting = _direction_keys(key, numbers)
    proof = _PROOF + ours + _derived(key, b"proof of listener", numbers)
    return proof, ProvenSession(to_connecting, to_listener)


def door_password(key: bytes) -> str:
    """What a peer names before ZeroMQ takes any message from it (its PLAIN mechanism).
    It travels in the clear: it keeps out peers that reach the port, and not those
    that read the network. They can't prove the key.

    Args:
        key: of the cluster, for proofs.
    """
    return blake2b(key, digest_size=32, person=b"fastdecode door").hexdigest()


def link_key(secret: bytes) -> bytes:
    """The key for proofs, from the cluster's secret."""
    return blake2b(secret, digest_size=32, person=b"fastdecode link").digest()


def _direction_keys(key: bytes, numbers: bytes) -> tuple[bytes, bytes]:
    """To the listener, and back."""
    return _derived(key, b"to listener", numbers), _derived(key, b"from listener", numbers)


def _derived(key: bytes, purpose: bytes, numbers: bytes) -> bytes:
    return blake2b(purpose + b"\0" + numbers, key=key, digest_size=_PROOF_BYTES).digest()


def _tag(key: bytes, number: int, data: Any) -> bytes:
    view = memoryview(data)
    covered = view[: _num_covered(view)]
    made = blake2b(_COUNTED.pack(number, len(view)), key=key, digest_size=TAG_BYTES)
    made.update(covered)
    return made.digest()


def _num_covered(view: memoryview) -> int:
    try:
        head_bytes = Prefix.of(view).head_bytes
    except ProtocolError:  # a piece of an array
        return _BYTES_WITHOUT_HEAD
    return max(_BYTES_WITHOUT_HEAD, head_bytes)
