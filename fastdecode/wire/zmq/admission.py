"""Have ZeroMQ itself turn away peers that don't name the cluster's key."""

from __future__ import annotations

from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdecode.wire.zmq.access import MEMBER, ClusterKey
from fastdecode.wire.zmq.line import Socket
from fastdecode.wire.zmq.proof import door_password

_ZAP_DOMAIN: Final = "fastdecode"


def admit_only(
    context: zmq.Context[Socket], socket: Socket, key: ClusterKey
) -> ThreadAuthenticator:
    """Have ZeroMQ take messages only from peers that have named the key. Without
    that it would buffer what anybody sends, and a message of endless parts, for which
    it has no limit, without showing it.

    Returns:
        What answers ZeroMQ's questions; stop it before the context ends.
    """

    class Members:
        def callback(self, domain: str, public: bytes) -> bool:
            return public == key.public

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    socket.zap_domain = _ZAP_DOMAIN.encode()
    if key.encrypts:
        authenticator.configure_curve_callback(_ZAP_DOMAIN, Members())
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
    else:
        passwords = {MEMBER: door_password(key.for_proofs)}
        authenticator.configure_plain(_ZAP_DOMAIN, passwords)
        socket.plain_server = True
    return authenticator
