"""What all routes of the HTTP process share."""

from __future__ import annotations

import itertools
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.open_turns import OpenTurns
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import Request
from fastdecode.engine.checker import RequestChecker
from fastdecode.openai.requests import RequestReader
from fastdecode.server.admission import QueueAdmission
from fastdecode.server.client import RequestTable
from fastdecode.server.health import Outlook, trouble
from fastdecode.server.link import Opening
from fastdecode.server.metrics import Metrics
from fastdecode.server.options import ServeOptions
from fastdecode.server.request_log import RequestLog
from fastdecode.text.chat_format import ChatFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.codec import TextCodec

_TOKENS_UNTIL_READY = 1 << 40


class Threads:
    """For work that takes a while, a pool for each sort of it. What templates
    and tokenizers do is done by one process each, so one thread asks it."""

    def __init__(self) -> None:
        self.bodies = ThreadPoolExecutor(2, "bodies")
        """Parse what was asked, put together what is answered."""
        self.templates = ThreadPoolExecutor(1, "templates")
        self.tokenizer = ThreadPoolExecutor(1, "tokenizer")
        self.conversations = ThreadPoolExecutor(1, "conversations")
        """Keep turns, on a disk perhaps: one after the other."""

    def close(self) -> None:
        """What hasn't begun never does."""
        for pool in (self.bodies, self.templates, self.tokenizer, self.conversations):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class Front:
    """Belongs to one event loop.

    Args:
        opening: what is served.
        options: of it.
        codec: the model's.
        template: for chats; None: the model has none.
        client: the way to the engine.
        log: of requests.
        conversations: that requests may be turns of.
    """

    opening: Opening
    options: ServeOptions
    codec: TextCodec
    template: ChatTemplate | None
    client: RequestTable
    log: RequestLog
    conversations: Conversations = field(default_factory=Conversations)
    threads: Threads = field(default_factory=Threads)
    outlook: Outlook = field(default_factory=Outlook)
    started_s: int = field(default_factory=lambda: int(time.time()))
    run_id: str = field(default_factory=partial(secrets.token_hex, 8))
    """In the ids of all answers, which differ from those of every other server."""
    began_s: float = field(default_factory=time.monotonic)
    num_exchanges: int = 0
    """Generations that are being answered."""
    num_cut: int = 0

    def __post_init__(self) -> None:
        opening = self.opening
        self.names = self.options.names(opening.model)
        has_template = self.template is not None
        self.reader = RequestReader(
            opening.sampling,
            self.names,
            has_template,
            is_online=True,
            model_defaults=opening.model_defaults,
            chat_format=ChatFormat.of(
                self.template,
                self.codec.special_tokens,
                self.options.tool_parser,
                self.options.reasoning_parser,
                self.options.chat_template_content_format,
            ),
        )
        self.checker = RequestChecker(self.codec, opening.vocab_size, opening.max_model_len)
        self.metrics = Metrics(opening.max_model_len, self.names[0])
        most = self.options.max_queued_tokens or _TOKENS_UNTIL_READY
        self.admission = QueueAdmission(self.options.max_queued_requests, most)
        self.turns = OpenTurns(self.conversations, self.threads.conversations)
        self._numbers = itertools.count(1)

    def trouble(self) -> str | None:
        """Why no token could come out now; None: one could."""
        since_s = self.client.waiting_since_s
        return trouble(self.outlook, since_s, time.monotonic(), self.options.stall_s)

    def next_number(self) -> int:
        """Of a generation, unique in this process."""
        return next(self._numbers)

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
        """End the processes that encode and render, and the threads."""
        self.threads.close()
        self.conversations.close()
        self.codec.close()
        if self.template is not None:
            self.template.close()
        self.log.close()


def draining_error() -> FastDecodeError:
    """What those get who are cut off by the end of the server."""
    return RequestError("the server is shutting down", code="draining")
