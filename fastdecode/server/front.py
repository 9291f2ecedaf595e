"""What all routes of the HTTP process share."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import PromptRequest, Request
from fastdecode.engine.checker import RequestChecker
from fastdecode.openai.chat import Chat, Turn
from fastdecode.openai.requests import (
    SAMPLING_FIELDS,
    BodyError,
    BodyRequest,
    RequestReader,
    blamed,
)
from fastdecode.server.admission import Admission
from fastdecode.server.client import EngineClient, OpenRequests
from fastdecode.server.health import Outlook, trouble
from fastdecode.server.messages import Opening
from fastdecode.server.observations import Observations, line_of
from fastdecode.server.options import ServeOptions
from fastdecode.server.request_log import RequestLog
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.codec import TextCodec

MOST_SEQUENCES = 2048
"""Of one HTTP request."""
_TOKENS_UNTIL_READY = 1 << 40


@dataclass(eq=False)
class Front:
    """Belongs to one event loop, but for ``checked``, which any thread may call.

    Args:
        opening: what is served.
        options: of it.
        codec: the model's.
        template: for chats; None: the model has none.
        client: the way to the engine.
        log: of requests.
    """

    opening: Opening
    options: ServeOptions
    codec: TextCodec
    template: ChatTemplate | None
    client: EngineClient
    log: RequestLog
    outlook: Outlook = field(default_factory=Outlook)
    started_s: int = field(default_factory=lambda: int(time.time()))
    num_exchanges: int = 0
    """Generations that are being answered."""
    num_cut: int = 0

    def __post_init__(self) -> None:
        opening = self.opening
        self.names = self.options.names(opening.model)
        has_template = self.template is not None
        self.reader = RequestReader(opening.sampling, self.names, has_template, is_online=True)
        self.checker = RequestChecker(self.codec, opening.vocab_size, opening.max_model_len)
        self.observations = Observations(opening.max_model_len)
        most = self.options.max_queued_tokens or _TOKENS_UNTIL_READY
        self.admission = Admission(self.options.max_queued_requests, most)
        self._numbers = itertools.count(1)

    def trouble(self) -> str | None:
        """Why no token could come out now; None: one could."""
        since_s = self.client.waiting_since_s
        return trouble(self.outlook, since_s, time.monotonic(), self.options.stall_s)

    def next_number(self) -> int:
        """Of a generation, unique in this process."""
        return next(self._numbers)

    def checked(self, asked: BodyRequest, number: int) -> list[Request]:
        """What a body asks, as the engine wants it: rendered, tokenised, found
        valid for the model. Takes a while.

        Raises:
            RequestError: a prompt can't be answered.
        """
        num_sequences = len(asked.prompts) * asked.params.n
        if num_sequences > MOST_SEQUENCES:
            raise RequestError(
                f"the body asks for {num_sequences} sequences, n of each prompt: ask for "
                f"{MOST_SEQUENCES} at most",
                code="too_many_sequences",
            )
        requests = []
        for place, turn in enumerate(asked.prompts):
            with _blaming_the_prompt(is_chat=asked.is_chat):
                token_ids = self.tokens_of(turn)
                arrived = PromptRequest(f"{number}.{place}", token_ids, asked.params, asked.cache)
                requests.append(self.checker.check(arrived, token_ids))
        return requests

    def tokens_of(self, turn: Turn) -> tuple[int, ...]:
        """A prompt's or a conversation's token ids. Takes a while. Raises RequestError."""
        if not isinstance(turn, Chat):
            return self.checker.tokenise(turn)
        assert self.template is not None, "the reader refuses chats without a template"
        text = self.template.render(
            turn.messages,
            datetime.now(),
            add_generation_prompt=turn.add_generation_prompt,
            variables=turn.variables,
        )
        return self.checker.tokenise(self.codec.encode(text, add_special_tokens=False))

    def expected_tokens(self, requests: list[Request]) -> int:
        """What requests will have in the KV cache, more or less."""
        expected = self.opening.expected_output_tokens
        return sum(
            len(request.prompt_token_ids) + request.params.n * min(request.max_tokens, expected)
            for request in requests
        )

    def fail_all(self, error: FastDecodeError) -> None:
        """End all open requests with an error."""
        self.num_cut += self.client.fail_all(error)

    def close(self) -> None:
        """End the processes that encode and render."""
        self.codec.close()
        if self.template is not None:
            self.template.close()
        self.log.close()


@contextlib.contextmanager
def _blaming_the_prompt(*, is_chat: bool) -> Iterator[None]:
    """Inside, errors name the field of the body that they come of."""
    try:
        yield
    except RequestError as error:
        if error.code == "invalid_sampling_params":
            param = blamed(error, SAMPLING_FIELDS)
        else:
            param = "messages" if is_chat else "prompt"
        raise BodyError(str(error), code=error.code, param=param) from None


def draining_error() -> FastDecodeError:
    """What those get who are cut off by the end of the server."""
    return RequestError("the server is shutting down", code="draining")


def log_line(
    front: Front, opened: OpenRequests | None, began_s: float, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What the request log says of one request."""
    line: dict[str, Any] = {"time": round(time.time() - (time.monotonic() - began_s), 6), **more}
    if opened is not None:
        line.update(line_of(opened, began_s))
    return line
