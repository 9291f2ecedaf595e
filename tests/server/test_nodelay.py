"""Every TCP socket of the product sends small packets at once (TCP_NODELAY)."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from fastdecode.measure.serving.connections import Connections
from fastdecode.server.frontend import _listen
from fastdecode.server.options import ServeOptions


async def accepted_from(listener: socket.socket) -> tuple[int, int]:
    """TCP_NODELAY of the accepted socket, and of the socket that bench-serve connects."""
    taken: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

    class Taker(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.set_result(transport)

    host, port = listener.getsockname()[:2]
    server = await asyncio.get_running_loop().create_server(Taker, sock=listener)
    async with server:
        client = await Connections(host, port, None).take()
        transport = await taken
        numbers = nodelay_of(transport), nodelay_of(client.writer.transport)
        client.writer.close()
        transport.close()
    return numbers


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
    accepted, connected = asyncio.run(accepted_from(listener))
    assert accepted, "an answer on a reused connection would be 40 ms late"
    assert connected, "bench-serve would measure its own delay"
