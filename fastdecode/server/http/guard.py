"""The middleware around all routes: who may send requests, from which sites, within which
bounds; what every answer has, and a line in the request log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdecode.core.errors import FastDecodeError
from fastdecode.server.front import Front
from fastdecode.server.http.connection import CONNECTION, MAX_HEADER_BYTES, header_too_large
from fastdecode.server.http.errors import SERVER, HttpRefusal, new_request_id, refusal, refused
from fastdecode.server.options import is_loopback

METHODS = ("GET", "POST", "DELETE")
OPEN_PATHS = frozenset({"/live", "/health", "/", "/page.css", "/page.js", "/icon.svg"})
"""Need no key. All other paths do, whether there is a route or not."""
METRICS_PATHS = frozenset({"/metrics", "/status.json", "/history.json"})
"""Nor do these, if the server's options say so."""
NOT_ADMITTED = (401, 403)
_SHOWN = 64  # letters of a path that the request log shows
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_NO_KEY = "this server needs an API key, and got none: send it as Authorization: Bearer KEY"
_WRONG_KEY = (
    "the API key is wrong: this server has no such key. Send one of those in its --api-key-file "
    "or its FASTDECODE_API_KEYS"
)
_NOT_HOST = "the Host isn't this server's: use localhost, or a key"
_NOT_ORIGIN = "requests from pages of other sites aren't answered: see --allowed-origins"
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
)

logger = logging.getLogger(__name__)


class Guard:
    """An ASGI application around the routes. ``keys`` are the SHA-256, in hex, of the keys that are
    admitted. Without keys, any client that reaches a loopback address is."""

    def __init__(self, routes: ASGIApp, front: Front, keys: Sequence[str]) -> None:
        self._routes, self._front = routes, front
        self.keys = tuple(keys)
        options = front.options
        self._open_paths = OPEN_PATHS | (METRICS_PATHS if options.open_metrics else frozenset())
        self._origins = options.allowed_origins
        self._app: ASGIApp = self._admit
        if self._origins:  # Browsers ask without a key whether a page may send requests.
            self._app = CORSMiddleware(
                self._admit, self._origins, METHODS, allow_headers=["*"],
                expose_headers=["x-request-id"],
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s = time.monotonic()
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_kept = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
        request_id = given[0].decode() if is_kept else new_request_id()
        path = scope["path"]
        line: dict[str, Any] = {
            "time": round(time.time(), 6), "id": request_id, "route": path[:_SHOWN],
            "status": None, "finish": None, "key": None,
        }  # fmt: skip
        scope.setdefault("state", {})["line"] = line
        always = ((b"x-request-id", request_id.encode()), *_ALWAYS)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                took = b"%.0f" % ((time.monotonic() - began_s) * 1e3)
                more = (*always, (b"openai-processing-ms", took))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        connection = CONNECTION.get(None)
        if connection is not None:
            found = dict(scope["headers"])
            length = found.get(b"content-length", b"0").strip()
            is_known = length.isdigit() and b"transfer-encoding" not in found
            connection.begin(int(length) if is_known else None)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            # Without its words and its traceback's values, which may hold a prompt.
            logger.error("%r failed: %s", path[:100], type(error).__name__)
            logger.debug("", exc_info=True)
        finally:
            if connection is not None:
                connection.end_answer()
            status, rejected = line["status"], self._front.metrics.rejected
            if status is None:
                line["finish"] = line["finish"] or "abort"
            elif status in NOT_ADMITTED:
                rejected[line["finish"]] += 1
            elif 400 <= status < 429 and "prompt_tokens" not in line:
                rejected["invalid"] += 1
            # Health, figures and the page are asked for all the time.
            is_watcher = path in OPEN_PATHS | METRICS_PATHS
            if not is_watcher or status in NOT_ADMITTED:
                line["e2e_s"] = round(time.monotonic() - began_s, 6)
                self._front.log.write(line)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            await self._routes(scope, receive, send)
        except (HttpRefusal, FastDecodeError) as error:
            shown = refused(error)
            if shown.code == "engine_failed":
                logger.error(
                    "%r failed: %s (%s)", scope["path"][:100], type(error).__name__, error.code
                )
            await refusal(scope, shown)(scope, receive, send)
        except ClientDisconnect:
            pass  # there is no answer
        except Exception:
            if scope["state"]["line"]["status"] is None:
                text = "the server has made a mistake"
                mistake = HttpRefusal(500, text, "internal_error", kind=SERVER)
                await refusal(scope, mistake)(scope, receive, send)
            raise

    def _check(self, scope: Scope) -> None:
        """Raises: HttpRefusal: If the request isn't admitted."""
        headers = scope["headers"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        if num_bytes + sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise header_too_large()
        if self.keys:
            if scope["path"] not in self._open_paths:
                scope["state"]["line"]["key"] = self._check_key(headers)
        else:
            self._check_site(headers)
        if not scope["path"].isprintable():
            # The log would show it otherwise than it is.
            raise HttpRefusal(404, "there is nothing at this path", "not_found")

    def _check_site(self, headers: list[tuple[bytes, bytes]]) -> None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None or not is_loopback(found[1].strip("[]").lower()):
            # A page of another site whose name was made to mean this host.
            raise HttpRefusal(403, _NOT_HOST, "forbidden", kind="permission_error")
        known = {f"http://{hosts[0]}", f"https://{hosts[0]}", *self._origins}
        for name, value in headers:
            if name == b"origin" and not {value.decode("latin-1"), "*"} & known:
                raise HttpRefusal(403, _NOT_ORIGIN, "forbidden", kind="permission_error")

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return the hash of the key that was given, shortened."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        hashed = hashlib.sha256(key.strip()).hexdigest()
        # All of them, so that the time doesn't tell which.
        matches = [hmac.compare_digest(hashed, known) for known in self.keys]
        is_given = scheme.lower() == b"bearer" and bool(key.strip())
        if not (is_given and any(matches)):
            raise HttpRefusal(
                401, _WRONG_KEY if is_given else _NO_KEY, "invalid_api_key",
                kind="authentication_error", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return hashed[:12]
