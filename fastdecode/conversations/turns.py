"""A turn of a conversation: its prompt is made when the turns before it are over.

Tokens of the history stay as they are, and are not encoded again. A chat is rendered with all of
its messages. If the text continues where the tokens end, only the rest is encoded. If it doesn't
(a template that strips reasoning, a stop string that cut the text), all of it is encoded, and KV
is reused up to the first difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Final, TypeAlias

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import FastDecodeError, Given, RequestError
from fastdecode.core.sequence import SHARED, CacheUse, Completion, SamplingParams, check_prompt
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Chat, Message, PromptOrChat
from fastdecode.text.codec import TextCodec

MAX_ID_CHARS = 1024
PREVIOUS_FAILED: Final = "previous_turn_failed"
_NOT_IN_TURNS: Final = {
    "truncate_prompt_tokens": "a conversation keeps its beginning",
    "prompt_logprobs": "a conversation's turn does not run its whole prompt",
}
"""Sampling parameters that no turn may have."""


@dataclass(frozen=True)
class Spelled:
    """Length and digest of the text that a chat's tokens spell."""

    num_chars: int
    digest: bytes
    end: str = ""
    """The special token that the model ended with, which the text lacks."""

    @classmethod
    def of(cls, text: str, end: str = "") -> Spelled:
        return cls(len(text), digest_of(text), end)

    def rest_of(self, text: str) -> str | None:
        """Return what follows the tokens' text in ``text``. None if ``text`` begins otherwise."""
        said, rest = text[: self.num_chars], text[self.num_chars :]
        if len(said) < self.num_chars or digest_of(said) != self.digest:
            return None
        return rest[len(self.end) :] if rest.startswith(self.end) else None


@dataclass(frozen=True)
class HistoryStep:
    """Addition of one turn. ``num_kept`` leading tokens of the history before it stay."""

    num_kept: int
    token_ids: tuple[int, ...]
    """Tokens after them: the rest of the prompt, and what was drawn."""
    messages: tuple[Message, ...] = ()
    """New messages of a chat, and the answer."""
    spelled: Spelled | None = None
    """Text of all of a chat's tokens. None if it isn't known."""


@dataclass(frozen=True)
class History:
    """A conversation after a turn: its tokens, as they were run and drawn. It is never changed."""

    begun: datetime
    """Date for the chat template in all of its turns."""
    token_ids: Sequence[int] = field(default_factory=lambda: array("i"))
    messages: tuple[Message, ...] = ()
    spelled: Spelled | None = None

    def then(self, step: HistoryStep) -> History:
        token_ids = array("i", self.token_ids[: step.num_kept])
        token_ids.extend(step.token_ids)
        return History(self.begun, token_ids, self.messages + step.messages, step.spelled)


def digest_of(text: str) -> bytes:
    """Return 16 bytes of a text, or of the id of a conversation that is over."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class TurnPrompt:
    """A turn's prompt: all tokens of the conversation. The leading ``num_past`` are its history."""

    token_ids: tuple[int, ...]
    num_past: int
    answered: Callable[[Completion], HistoryStep]
    """Returns what an answered turn adds to the conversation."""
    text: str | None = None
    """The prompt, or the chat as its template writes it. None if token ids were given."""


Prompter: TypeAlias = Callable[[History], TurnPrompt]
"""Makes a turn's prompt. It raises RequestError if there is no such turn after a history."""


@dataclass(frozen=True)
class Turn:
    """A request that continues a conversation. Raises RequestError: (code ``invalid_conversation``)
    If the id is invalid, or several answers are requested."""

    request_id: str
    conversation_id: str
    prompter: Prompter
    params: SamplingParams
    cache: CacheUse = SHARED
    name: str = ""
    """Name of the turn in a store: a batch line's number."""

    def __post_init__(self) -> None:
        check_turn(self.conversation_id, self.params, 1)
        new = getattr(self.prompter, "new", None)
        if not isinstance(new, Chat):
            return
        if not self.params.detokenize:
            raise _invalid(
                "detokenize is false, but a chat's next turn needs the text of this answer: leave "
                "detokenize out, or give prompts instead of messages"
            )
        if new.how.continue_final_message:
            remedy = "leave conversation_id out, and give all messages"
            why = f": a conversation keeps whole messages: {remedy}"
            raise _invalid(Given("continue_final_message"), why)


def as_turn_error(error: FastDecodeError) -> FastDecodeError:
    """Return an error of a turn's request, as one of its conversation."""
    if error.code != "prompt_too_long":
        return error
    text = f"the conversation has become too long ({error}), or begin another one"
    return RequestError(text, code="conversation_too_long")


def check_id(conversation_id: object) -> str:
    """Return a conversation's id. Raises: RequestError: If it is invalid."""
    if not isinstance(conversation_id, str) or not 1 <= len(conversation_id) <= MAX_ID_CHARS:
        why = f": must be a string of 1 to {MAX_ID_CHARS} characters"
        raise _invalid(Given("conversation_id"), why)
    return conversation_id


def check_turn(conversation_id: object, params: SamplingParams, num_prompts: int) -> str | None:
    """Return the conversation that a request names, if it does. Raises RequestError: If such a
    request hasn't one prompt, or wants more than one answer."""
    if conversation_id is None:
        return None
    for name, why in _NOT_IN_TURNS.items():
        value = getattr(params, name)
        if value is not None:
            raise _invalid(Given(name, value), f": {why}: leave it out")
    if num_prompts != 1 or params.n > 1:
        why = ": a conversation continues with one prompt and one answer: ask for others without it"
        raise _invalid(Given("conversation_id"), why)
    return check_id(conversation_id)


def after_a_failed_turn() -> RequestError:
    """Return the error of turns after one that has failed."""
    text = "an earlier turn of its conversation has failed: ask that one again, and this one after"
    return RequestError(f"{text} it", code=PREVIOUS_FAILED)


@dataclass(frozen=True)
class TurnPrompter:
    """Continues a conversation with a prompt, or with a chat's new messages."""

    new: PromptOrChat
    codec: TextCodec
    template: ChatTemplate | None = None

    def __call__(self, history: History) -> TurnPrompt:
        new, past, text = self.new, history.token_ids, None
        if isinstance(new, Chat):
            if past and not history.messages:
                raise _mixed("prompts", "a prompt")
            assert self.template is not None, "chats are refused without a template"
            text = rest = self.template.render(
                [*history.messages, *new.messages], history.begun, new.how
            )
            more = None if history.spelled is None else history.spelled.rest_of(text)
            past, rest = ((), text) if more is None else (past, more)
            added: Sequence[int] = self.codec.encode(rest, add_special_tokens=False)
        else:
            if history.messages:
                raise _mixed("a chat", "messages")
            checked = check_prompt(new)
            if isinstance(checked, str):
                text = checked
                checked = self.codec.encode(text, add_special_tokens=not past)
            added = checked
        token_ids = (*past, *added)

        def answered(completion: Completion) -> HistoryStep:
            drawn = (*added, *completion.token_ids)
            if not isinstance(new, Chat):
                return HistoryStep(len(past), drawn)
            spelled = _spelled(self.codec, token_ids, text or "", completion)
            asked = [deepcopy(dict(each)) for each in new.messages]  # callers may change theirs
            answer = {"role": "assistant", "content": completion.text}
            return HistoryStep(len(past), drawn, (*asked, answer), spelled)

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
    remedy = f"continue with {wanted}, or under another conversation_id"
    return _invalid(f"the conversation began as {begun}: {remedy}")


def _invalid(*words: str | Given) -> RequestError:
    return RequestError(*words, code="invalid_conversation")


def why_no_reuse(config: EngineConfig) -> str:
    """Return why no turn reuses KV of earlier turns, and what to do. "" if turns reuse it."""
    if config.cache.prefix_cache == "off":
        return "prefix_cache is off. To reuse KV, remove prefix_cache=off"
    return ""


def no_reuse_warning(why: str, cache: CacheUse = SHARED) -> str:
    """Return the warning of a turn with this ``cache``, where ``why`` is ``why_no_reuse``; "" if
    it reuses KV."""
    if not why and cache.is_off:
        why = "this request's cache is off. To reuse KV, leave cache out"
    turn = "conversation_id is given, but this turn computes the whole conversation again"
    return f"{turn}, and so will the next: {why}" if why else ""
