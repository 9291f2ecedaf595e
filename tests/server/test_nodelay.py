"""Every TCP socket of the product sends small packets at once (TCP_NODELAY)."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from fastdecode.server.frontend import _listen
from fastdecode.server.options import ServeOptions


async def accepted_from(listener: socket.socket) -> int:
    """Return TCP_NODELAY of the socket that a server accepts."""
    taken: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

    class Taker(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.set_result(transport)

    host, port = listener.getsockname()[:2]
    server = await asyncio.get_running_loop().create_server(Taker, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(host, port)
        transport = await taken
        number = nodelay_of(transport)
        writer.close()
        transport.close()
    return number


def nodelay_of(transport: asyncio.BaseTransport) -> int:
    number: int = transport.get_extra_info("socket").getsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY
    )
    return number


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_accepted_connections_do_not_wait_for_acks(host: str) -> None:
    listener, address = _listen(ServeOptions(host=host, port=0))
    assert address.startswith("http://")
    is_set = asyncio.run(accepted_from(listener))
    assert is_set, "an answer on a reused connection would be 40 ms late"
