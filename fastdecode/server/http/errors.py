"""Errors as clients see them, in OpenAI's form.

They show no prompt, answer, key, or path but ``--conversations``, and of others' errors the kind.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from fastdecode.core.errors import CHILD_DIED, CapacityError, FastDecodeError, RequestError
from fastdecode.openai.answers import status

INVALID = "invalid_request_error"
SERVER = "server_error"
NOT_AGAIN: Mapping[str, str] = {"x-should-retry": "false"}
"""A header of time-outs. Without it OpenAI's clients would retry at once, and run into the same."""


class HttpRefusal(Exception):  # noqa: N818  (an answer)
    """An error that answers a request. ``kind`` is OpenAI's ``type``, ``param`` the field to blame.
    ``headers`` are sent beside the usual ones."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind, self.param = status, code, kind, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


def refusal(scope: Scope, error: HttpRefusal) -> Response:
    """Return an error as an answer. The request's line in the log gets its code."""
    scope["state"]["line"]["finish"] = error.code
    # Escaped: a name that the client gave may be no text that UTF-8 has.
    return Response(json.dumps(error.body), error.status, error.headers, "application/json")


# Codes of errors that mean something of their own to OpenAI's clients.
_CODES: Mapping[str, tuple[int, str, str]] = {
    "model_mismatch": (404, INVALID, "model_not_found"),
    "prompt_too_long": (400, INVALID, "context_length_exceeded"),
    "conversation_expired": (404, INVALID, "conversation_expired"),
    "output_failed": (500, SERVER, "conversation_not_kept"),
    "draining": (503, SERVER, "draining"),
    "closed": (503, SERVER, "draining"),
    "http_stopped": (503, SERVER, "http_stopped"),
}
NEVER_FIT = frozenset({"exceeds_capacity", "exceeds_load_limit", "too_many_parts"})
"""Codes of a CapacityError that waiting doesn't end."""
_WORDS: Mapping[str, str] = {
    "out_of_capacity": "there is no room for this request at present: try again in a while",
    "draining": "the server is shutting down: try again, or elsewhere",
    "closed": "the server is shutting down: try again, or elsewhere",
    "http_stopped": "the server's HTTP process was stopped for too long: try again",
    "conversation_not_kept": "the turn can't be kept, so the conversation is as it was before it",
    "non_finite_logits": "the model's output isn't finite for this request",
    CHILD_DIED: "the process that renders and encodes prompts died: try again",
}


def refused(error: HttpRefusal | FastDecodeError) -> HttpRefusal:
    """Return an error as its client sees it."""
    if isinstance(error, HttpRefusal):
        return error
    http, kind = status(error)
    code, headers = error.code, {}
    is_theirs = isinstance(error, RequestError) and http < 500
    if isinstance(error, CapacityError) and code in NEVER_FIT:
        http, kind, is_theirs = 400, INVALID, True
    elif isinstance(error, CapacityError):
        # What has no room yet waits: so less is left of it than there was.
        code, headers = CapacityError.default_code, {"retry-after": "1"}
    elif not isinstance(error, RequestError):
        # Which part of it failed, and how, is for its operator.
        http, kind, code = 500, SERVER, "engine_failed"
    if error.code in _CODES:
        http, kind, code = _CODES[error.code]
    message = _WORDS.get(code) or (str(error) if is_theirs else "the engine has failed")
    message += f": {error}" if code == "conversation_not_kept" else ""
    param = getattr(error, "param", None)
    return HttpRefusal(http, message, code, kind=kind, param=param, headers=headers)


_UNAVAILABLE: Mapping[str, str] = {
    "starting": "the model is still loading: try again in a while",
    "draining": _WORDS["draining"],
    "stalled": "the engine makes no step at present: try again in a while",
    "broken": "the engine has failed, and the server ends",
    "no_r_worker": "no R-worker is left to hold the KV cache: try again once one has come back",
}


def unavailable(reason: str, retry_after_s: int = 1) -> HttpRefusal:
    """Return a 503 that says why no token could come out."""
    return HttpRefusal(
        503, _UNAVAILABLE.get(reason, f"no answer could come now: {reason}"), reason, kind=SERVER,
        headers={"retry-after": str(retry_after_s)},
    )  # fmt: skip
