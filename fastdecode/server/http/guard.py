"""What every request passes before a route sees it: who may ask, from where;
and what every answer has."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any

from fastdecode.server.http.errors import HttpRefusal
from fastdecode.server.http.exchange import REFUSED, Receive, Send, send_error
from fastdecode.server.options import is_loopback

App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/live", "/health", "/", "/page.css", "/page.js", "/icon.svg"})
"""Need no key. All other paths do, whether there is a route or not."""
METRICS_PATHS = frozenset({"/metrics", "/status.json", "/history.json"})
"""Nor do these, if the server's options say so."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_NO_KEY = "this server needs an API key, and got none: send it as Authorization: Bearer KEY"
_WRONG_KEY = (
    "the API key is wrong: this server has no such key. Send one of those in its --api-key-file "
    "or its FASTDECODE_API_KEYS"
)
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
)


class Guard:
    """An ASGI application around the routes.

    Args:
        app: the routes.
        keys: SHA-256, in hex, of the keys that let in. Without keys any client that reaches
            a loopback address may ask.
        origins: whose pages may ask from a browser, besides this server's own.
    """

    def __init__(
        self,
        app: App,
        keys: Sequence[str],
        *,
        open_metrics: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._origins = origins
        self.keys = tuple(keys)
        self.open_paths = OPEN_PATHS | (METRICS_PATHS if open_metrics else frozenset())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _request_id(scope["headers"])
        scope["request_id"] = request_id
        always = ((b"x-request-id", request_id.encode()), *_ALWAYS)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *always]
            await send(message)

        try:
            self._check(scope)
            if not scope["path"].isprintable():
                # A newline at the end is none to the routes' patterns.
                raise HttpRefusal(404, "there is nothing at this path", "not_found")
        except HttpRefusal as error:
            scope[REFUSED] = error.code
            await send_error(send_with_headers, error)
        else:
            await self._app(scope, receive, send_with_headers)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """Raises Refused."""
        headers = scope["headers"]
        if self.keys:
            if scope["path"] not in self.open_paths:
                scope["key"] = self._check_key(headers)
            return
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not _is_own(hosts[0]):
            # A page of another site whose name was made to mean this host.
            raise _forbidden("the Host isn't this server's: use localhost, or a key")
        for name, value in headers:
            known = {*_origins(hosts[0]), *self._origins}
            if name == b"origin" and not {value.decode("latin-1"), "*"} & known:
                raise _forbidden(
                    "requests from pages of other sites aren't answered: see --allowed-origins"
                )

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> str:
        """The hash of the key that was given, shortened."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        hashed = hashlib.sha256(key.strip()).hexdigest()
        # All of them, so that the time doesn't tell which.
        matches = [hmac.compare_digest(hashed, known) for known in self.keys]
        is_given = scheme.lower() == b"bearer" and bool(key.strip())
        if not (is_given and any(matches)):
            raise HttpRefusal(
                401, _WRONG_KEY if is_given else _NO_KEY, "invalid_api_key",
                kind="authentication_error", headers={"www-authenticate": "Bearer"}, closes=True,
            )  # fmt: skip
        return hashed[:12]


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's, if it is well-formed, or a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0].decode()
    return new_request_id()


def new_request_id() -> str:
    """For a request that brings none."""
    return "req_" + secrets.token_hex(12)


def _forbidden(text: str) -> HttpRefusal:
    return HttpRefusal(403, text, "forbidden", kind="permission_error", closes=True)


def _is_own(host: str) -> bool:
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1].strip("[]").lower())


def _origins(host: str) -> tuple[str, str]:
    return f"http://{host}", f"https://{host}"
