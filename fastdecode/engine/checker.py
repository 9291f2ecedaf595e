"""From a request as it arrives to one that is valid for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random, SystemRandom
from typing import Final

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.resuming import BegunRequest
from fastdecode.core.sequence import (
    Prompt,
    PromptRequest,
    Request,
    SamplingParams,
    check_prompt,
    validate_for_vocab,
)
from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.codec import TextCodec, no_tokenizer
from fastdecode.text.grammars import check_structured
from fastdecode.text.reasoning import REASONING_FORMATS

MOST_SOUND: Final = 1024  # structured outputs that are known to be sound

MOST_PROMPT_LOGPROBS: Final = 2_000_000
"""Most log-probabilities of one request's prompt: its answer is one message between processes."""


class RequestChecker:
    """Tokenises prompts, and refuses what a model can't do.

    Args:
        begun: What an earlier run has drawn for requests of the same ids.
        seeds: Gives seeds, in turn, to requests without one. None for random ones.
    """

    def __init__(
        self,
        codec: TextCodec,
        vocab_size: int,
        max_model_len: int,
        begun: Mapping[str, BegunRequest] | None = None,
        seeds: Random | None = None,
    ) -> None:
        self._seeds = seeds or SystemRandom()
        self._begun = begun or {}
        self._codec = codec
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._sound: set[StructuredOutputs] = set()
        self._latest_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = (), ()

    def tokenise(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's token ids. Raises RequestError."""
        prompt = check_prompt(prompt)
        if isinstance(prompt, str):
            return self._checked(
                self._codec.encode(prompt), "the tokenizer and the model don't match: "
            )
        return self._checked(prompt)

    def _checked(self, token_ids: Sequence[int], why: str = "") -> tuple[int, ...]:
        vocab_size = self._vocab_size
        for place, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{why}token {place} of the prompt, {token!r}, is not a token id of this model "
                    f"(0 to {vocab_size - 1})",
                    code="invalid_token_id",
                )
        return tuple(token_ids)

    def check(self, arrived: PromptRequest, token_ids: tuple[int, ...]) -> Request:
        """Return the request, with its prompt's tokens. Raises RequestError."""
        params = arrived.params
        validate_for_vocab(params, self._vocab_size)
        limit = self._max_model_len
        token_ids = self._truncated(token_ids, params)
        if not token_ids:
            raise RequestError("the prompt has no tokens: give at least one", code="empty_prompt")
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt is too long: this model's maximum context length is {limit} tokens "
                f"for prompt and completion together, and the prompt has {len(token_ids)}, of "
                f"which at most {limit - 1} leave room for an answer: shorten the prompt",
                code="prompt_too_long",
            )
        count = params.prompt_logprobs
        if count is not None and len(token_ids) * (1 + count) > MOST_PROMPT_LOGPROBS:
            raise _too_many_prompt_logprobs(count, len(token_ids))
        if params.structured_outputs is not None:
            params = self._structured(params, params.structured_outputs, token_ids)
        room = limit - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return Request(
            request_id=arrived.request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            # A prompt whose logprobs are wanted is run whole.
            cache=replace(arrived.cache, is_off=True)
            if params.prompt_logprobs is not None
            else arrived.cache,
            drawn=self._drawn(arrived, token_ids, max_tokens),
            bad_words=self._bad_words(params.bad_words),
        )

    def _truncated(self, token_ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """Return the end of a prompt that is to be cut, or all of another."""
        most = params.truncate_prompt_tokens
        if most == -1:
            room = self._max_model_len - min(params.max_tokens or 1, self._max_model_len - 1)
            return token_ids[-room:]
        return token_ids if most is None else token_ids[-most:]

    def _structured(
        self, params: SamplingParams, wanted: StructuredOutputs, token_ids: tuple[int, ...]
    ) -> SamplingParams:
        """Return the parameters with checked structured outputs, which begin where this prompt
        leaves the reasoning."""
        family = REASONING_FORMATS.get(wanted.reasoning or "")
        if family is not None and not wanted.in_reasoning:
            state = family.prompt_state(self._codec.prompt_end(token_ids))
            reasoning = None if state == "after" else wanted.reasoning
            wanted = replace(wanted, reasoning=reasoning, in_reasoning=state == "inside")
            params = replace(params, structured_outputs=wanted)
        if wanted not in self._sound:  # requests of one file mostly want the same
            if self._codec.vocabulary is None:
                raise no_tokenizer("structured outputs need text")
            check_structured(wanted, self._codec.special_tokens)
            if len(self._sound) >= MOST_SOUND:
                self._sound.clear()
            self._sound.add(wanted)
        return params

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return each word's tokens, as they begin a text and as they follow a space."""
        if not words or words == self._latest_words[0]:  # requests of one file mostly have the same
            return self._latest_words[1] if words else ()
        if self._codec.vocabulary is None:
            raise RequestError(
                Given("bad_words"),
                " need the model's tokenizer.json: add it, or give a logit_bias of -100",
                code="no_tokenizer",
            )
        spellings = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        tokens = [self._codec.encode(text, add_special_tokens=False) for text in spellings]
        self._latest_words = words, tuple(dict.fromkeys(tuple(each) for each in tokens if each))
        return self._latest_words[1]

    def _drawn(
        self, arrived: PromptRequest, token_ids: tuple[int, ...], max_tokens: int
    ) -> dict[int, tuple[int, ...]]:
        """Return what an earlier run has drawn for each sequence of this very request. If
        logprobs are wanted, which were not kept, all is drawn again."""
        begun = self._begun.get(arrived.request_id)
        params = arrived.params
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if begun is None or begun.prompt_token_ids != token_ids or wants_logprobs:
            return {}
        return {
            index: drawn[: max_tokens - 1]
            for index, drawn in begun.drawn.items()
            if index < params.n and all(0 <= token < self._vocab_size for token in drawn)
        }


def _too_many_prompt_logprobs(count: int, num_tokens: int) -> RequestError:
    fit = MOST_PROMPT_LOGPROBS // num_tokens - 1
    mend = f"give {fit} or less, or shorten the prompt" if fit >= 0 else "shorten the prompt"
    return RequestError(
        Given("prompt_logprobs", count),
        f" of a prompt of {num_tokens} tokens are {num_tokens * (1 + count)} log-probabilities, "
        f"and a request can have {MOST_PROMPT_LOGPROBS} at most: {mend}",
        code="invalid_sampling_params",
    )
