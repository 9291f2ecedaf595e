"""A turn of a conversation: its prompt is made when the turns before it are over.

Tokens of the history stay as they are, and are not encoded again. A chat is rendered with all of
its messages. If the text continues where the tokens end, only the rest is encoded. If it doesn't
(a template that strips reasoning, a stop string that cut the text), all of it is encoded, and KV
is reused up to the first difference.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Final, Protocol

from fastdecode.conversations.history import History, HistoryStep, Spelled
from fastdecode.core.errors import FastDecodeError, Given, RequestError
from fastdecode.core.sequence import (
    SHARED,
    CacheUse,
    Completion,
    Prompt,
    SamplingParams,
    check_prompt,
)
from fastdecode.text.chat_template import PLAIN, ChatTemplate
from fastdecode.text.chats import Message, Rendering
from fastdecode.text.codec import TextCodec

MAX_ID_CHARS = 1024


@dataclass(frozen=True)
class TurnPrompt:
    """A turn's prompt."""

    token_ids: tuple[int, ...]
    """All tokens of the conversation."""
    num_past: int
    """Leading tokens that are its history's."""
    answered: Callable[[Completion], HistoryStep]
    """Returns what an answered turn adds to the conversation."""
    text: str | None = None
    """The prompt, or the chat as its template writes it. None if token ids were given."""


class Prompter(Protocol):
    """Makes a turn's prompt."""

    def __call__(self, history: History) -> TurnPrompt:
        """Raises: RequestError: If there is no such turn after this history."""


@dataclass(frozen=True)
class Turn:
    """A request that continues a conversation.

    Raises:
        RequestError: If the id is invalid, or several answers are requested (code
            ``invalid_conversation``).
    """

    request_id: str
    conversation_id: str
    prompter: Prompter
    params: SamplingParams
    cache: CacheUse = SHARED
    name: str = ""
    """Name of the turn in a store: a batch line's number."""

    def __post_init__(self) -> None:
        check_turn(self.conversation_id, self.params, 1)
        if not isinstance(self.prompter, ChatTurn):
            return
        if not self.params.detokenize:
            raise RequestError(
                "detokenize is false, but a chat's next turn needs the text of this answer: leave "
                "detokenize out, or give prompts instead of messages",
                code="invalid_conversation",
            )
        if self.prompter.how.continue_final_message:
            raise RequestError(
                Given("continue_final_message"),
                ": a conversation keeps whole messages: leave conversation_id out, and give all "
                "messages",
                code="invalid_conversation",
            )


def told_of_turn(error: FastDecodeError) -> FastDecodeError:
    """Return an error of a turn's request, as one of its conversation."""
    if error.code != "prompt_too_long":
        return error
    return RequestError(
        f"the conversation has become too long ({error}), or begin another one",
        code="conversation_too_long",
    )


def check_id(conversation_id: object) -> str:
    """Return a conversation's id. Raises: RequestError: If it is invalid."""
    if not isinstance(conversation_id, str) or not 1 <= len(conversation_id) <= MAX_ID_CHARS:
        raise RequestError(
            Given("conversation_id"),
            f": must be a string of 1 to {MAX_ID_CHARS} characters",
            code="invalid_conversation",
        )
    return conversation_id


def check_turn(conversation_id: object, params: SamplingParams, num_prompts: int) -> str | None:
    """Return the conversation that a request names, if it does.

    Raises:
        RequestError: If such a request hasn't one prompt, or wants more than one answer.
    """
    if conversation_id is None:
        return None
    if params.truncate_prompt_tokens is not None:
        raise RequestError(
            Given("truncate_prompt_tokens", params.truncate_prompt_tokens),
            ": a conversation keeps its beginning: leave it out",
            code="invalid_conversation",
        )
    if params.prompt_logprobs is not None:
        raise RequestError(
            Given("prompt_logprobs", params.prompt_logprobs),
            ": a conversation's turn does not run its whole prompt: leave it out",
            code="invalid_conversation",
        )
    if num_prompts != 1 or params.n > 1:
        raise RequestError(
            Given("conversation_id"),
            ": a conversation goes on with one prompt and one answer: ask for the others without "
            "it",
            code="invalid_conversation",
        )
    return check_id(conversation_id)


PREVIOUS_FAILED: Final = "previous_turn_failed"


def after_a_failed_turn() -> RequestError:
    """Return the error of turns after one that has failed."""
    return RequestError(
        "an earlier turn of its conversation has failed: ask that one again, and this one after it",
        code=PREVIOUS_FAILED,
    )


@dataclass(frozen=True)
class PromptTurn:
    """Continues with a text, or with token ids."""

    prompt: Prompt
    codec: TextCodec

    def __call__(self, history: History) -> TurnPrompt:
        if history.messages:
            raise _mixed("a chat", "messages")
        new = check_prompt(self.prompt)
        if isinstance(new, str):
            new = self.codec.encode(new, add_special_tokens=not history.token_ids)
        token_ids = (*history.token_ids, *new)
        num_past = len(history.token_ids)

        def answered(completion: Completion) -> HistoryStep:
            return HistoryStep(num_past, (*token_ids[num_past:], *completion.token_ids))

        text = self.prompt if isinstance(self.prompt, str) else None
        return TurnPrompt(token_ids, num_past, answered, text)


@dataclass(frozen=True)
class ChatTurn:
    """Continues with new messages."""

    messages: tuple[Message, ...]
    codec: TextCodec
    template: ChatTemplate
    how: Rendering = PLAIN

    def __call__(self, history: History) -> TurnPrompt:
        if history.token_ids and not history.messages:
            raise _mixed("prompts", "a prompt")
        messages = [*history.messages, *self.messages]
        text = self.template.render(messages, history.begun, self.how)
        rest = None if history.spelled is None else history.spelled.rest_of(text)
        past = () if rest is None else tuple(history.token_ids)
        new = self.codec.encode(text if rest is None else rest, add_special_tokens=False)
        token_ids = (*past, *new)

        def answered(completion: Completion) -> HistoryStep:
            spelled = _spelled(self.codec, token_ids, text, completion)
            answer = {"role": "assistant", "content": completion.text}
            added = (*new, *completion.token_ids)
            asked = [deepcopy(dict(each)) for each in self.messages]  # callers may change theirs
            return HistoryStep(len(past), added, (*asked, answer), spelled)

        return TurnPrompt(token_ids, len(past), answered, text)


def _spelled(
    codec: TextCodec, prompt_token_ids: tuple[int, ...], prompt: str, completion: Completion
) -> Spelled | None:
    """Return what the tokens of a prompt and its answer spell. None if the answer's text differs,
    as where a stop string was cut off."""
    drawn, end = list(completion.token_ids), ""
    vocabulary = codec.vocabulary
    if vocabulary is not None and drawn and drawn[-1] in vocabulary.skipped:
        end = vocabulary.tokenizer.id_to_token(drawn.pop()) or ""
    said = codec.sequence_text(SamplingParams(), prompt_token_ids)
    for token in drawn:
        said.append(token)
    if said.finish() != completion.text:
        return None
    return Spelled.of(prompt + completion.text, end)


def _mixed(begun: str, wanted: str) -> RequestError:
    return RequestError(
        f"the conversation began as {begun}: go on with {wanted}, or under another conversation_id",
        code="invalid_conversation",
    )
