"""A turn of a conversation: its prompt follows from the turns before it, so it
is made when these are over.

What was run and drawn is gone on with as it is, and not encoded again. A chat
is rendered anew by its template, all messages of it; if the text goes on where
the tokens end, they stay, and only the rest is encoded. If it doesn't (a
template that strips what a model thought, a stop string that cut the text), all
of it is encoded, and its KV is reused up to the first difference.
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
    """From the conversation's first token on."""
    num_past: int
    """Of them, those that are its history's."""
    answered: Callable[[Completion], HistoryStep]
    """What the turn adds to the conversation, once it has been answered."""
    text: str | None = None
    """The prompt, or the chat as its template writes it; None: token ids were given."""


class Prompter(Protocol):
    """Makes a turn's prompt."""

    def __call__(self, history: History) -> TurnPrompt:
        """Raises RequestError: there is no such turn after this history."""


@dataclass(frozen=True)
class Turn:
    """A request that goes on with a conversation.

    Raises:
        RequestError: (code ``invalid_conversation``) the id is none, or several
            answers are asked for.
    """

    request_id: str
    conversation_id: str
    prompter: Prompter
    params: SamplingParams
    cache: CacheUse = SHARED
    name: str = ""
    """What stands beside it where turns are kept; a batch line's number."""

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
    """What keeps a turn from being run, said of its conversation."""
    if error.code != "prompt_too_long":
        return error
    return RequestError(
        f"the conversation has become too long ({error}), or begin another one",
        code="conversation_too_long",
    )


def check_id(conversation_id: object) -> str:
    """A conversation's id, if it is one. Raises RequestError."""
    if not isinstance(conversation_id, str) or not 1 <= len(conversation_id) <= MAX_ID_CHARS:
        raise RequestError(
            Given("conversation_id"),
            f": must be a string of 1 to {MAX_ID_CHARS} characters",
            code="invalid_conversation",
        )
    return conversation_id


def check_turn(conversation_id: object, params: SamplingParams, num_prompts: int) -> str | None:
    """The conversation that a request names, if it does: then it has one prompt,
    and wants one answer. Raises RequestError."""
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
    """What turns come to that come after one that has failed."""
    return RequestError(
        "an earlier turn of its conversation has failed: ask that one again, and this one after it",
        code=PREVIOUS_FAILED,
    )


@dataclass(frozen=True)
class PromptTurn:
    """Goes on with a text, or with token ids."""

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
    """Goes on with new messages."""

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
    """What a prompt's tokens and those drawn after them spell; None if the
    answer's text isn't what its tokens say, as where a stop string was cut
    off."""
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
