"""Requests, their sampling parameters, and what comes back.

A **request** is what a user asks; it becomes ``n`` **sequences** (its tokens and their state),
each of which becomes one ``Completion``."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, cast

from msgspec import Meta

from fastdecode.core.errors import FastDecodeError, Given, RequestError
from fastdecode.core.holders import KVSource, Residence, SequenceId, of_first_tokens
from fastdecode.core.model.block_keys import MAX_SALT_CHARS
from fastdecode.core.structured import StructuredOutputs
from fastdecode.core.vllm_names import supported_sampling
from fastdecode.core.words import is_unicode

LogitsProcessor: TypeAlias = Callable[..., Any]
"""``f(output_token_ids, logits)`` or ``f(prompt_token_ids, output_token_ids, logits)``, lists and
a float32 tensor [V]; returns logits, the same tensor or another."""
FinishReason = Literal["stop", "length"]

MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 100
MAX_BAD_WORDS = 1024
MAX_TOKENS = 1 << 24
_SWITCHES = "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"
_NUMBERS: Final = (  # name, lowest, highest, and whether the lowest is excluded
    ("temperature", 0, 100, False),
    ("min_p", 0, 1, False),
    ("presence_penalty", -100, 100, False),
    ("frequency_penalty", -100, 100, False),
    ("top_p", 0, 1, True),
    ("repetition_penalty", 0, 100, True),
)
_OPTIONAL_INTEGERS: Final = (  # name, lowest and highest
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("max_tokens", 1, MAX_TOKENS),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_STOP_RULE: Final = (
    f"a string or a list of at most {MAX_STOP_STRINGS} non-empty strings of at most "
    f"{MAX_STOP_CHARS} characters"
)
_WORDS_RULE: Final = (
    f"a list of at most {MAX_BAD_WORDS} words of at most {MAX_STOP_CHARS} characters, "
    "none of them empty"
)

# Types of what travels between processes. What a peer sent is held to their bounds.
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds: TypeAlias = tuple[TokenId, ...]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]
Sources: TypeAlias = Annotated[tuple[KVSource, ...], Meta(max_length=1 << 10)]
"""One fetch reads no more."""
Log: TypeAlias = Annotated[float, Meta(le=1.0)]
"""Logarithm of a probability, which may be 0. Rounding may take it a little above 1."""


def _refuse(name: str, value: object, rule: str) -> RequestError:
    return RequestError(Given(name, value), f": must be {rule}", code="invalid_sampling_params")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    # The comparison also refuses NaN, infinities, and whole numbers too great for a float.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        within = f"above {low} and at most {high}" if open_low else f"from {low} to {high}"
        raise _refuse(name, value, f"a number {within}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(name, value, f"a whole number from {low} to {high}")
    return value


def _reasoning_marks(marks: object) -> tuple[str, str] | None:
    if marks is None:
        return None
    match marks:
        case [str(begin), str(end)] if end and len(begin) + len(end) <= MAX_STOP_CHARS:
            return begin, end
    raise _refuse("reasoning_marks", marks, "two strings, the second one not empty")


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    """None is an empty list."""
    if token_ids is None:
        return ()
    if isinstance(token_ids, str) or not isinstance(token_ids, abc.Sequence):
        raise _refuse(name, token_ids, "a list of token ids")
    return tuple(_integer(name, token, 0, 1 << 31) for token in token_ids)


def _strings(name: str, given: object, most: int, rule: str) -> tuple[str, ...]:
    """None is an empty list."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, abc.Sequence) or len(given) > most:
        raise _refuse(name, given, rule)
    for text in given:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise _refuse(name, text, rule)
        if not is_unicode(text):
            raise _refuse(name, text, "text without a lone surrogate")
    return tuple(given)


def _logits_processors(functions: object) -> tuple[LogitsProcessor, ...]:
    """None is an empty list."""
    rule = "a list of functions of the output's token ids and a row of logits"
    if functions is None:
        return ()
    if not isinstance(functions, abc.Sequence) or not all(map(callable, functions)):
        raise _refuse("logits_processors", functions, rule)
    return tuple(functions)


class _TakesOtherNames(type):
    """Leaves out arguments that vLLM has, and that ask for nothing."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **given: Any) -> Any:
            said = supported_sampling(given, cls.__dataclass_fields__)
            return super().__call__(*args, **said)


@dataclass
class SamplingParams(metaclass=_TakesOtherNames):
    """How to choose the next token, and when to stop. Validated at construction and at every
    assignment; the names are OpenAI's and vLLM's. A request keeps the values of the moment at
    which it is given.

    The order of operations for one row of logits: ``logits_processors``, ``structured_outputs``,
    ``allowed_token_ids``, ``bad_words``, ``logit_bias``, the penalties, ``min_tokens`` (EOS and
    stop ids masked), then greedy if ``temperature == 0``, else ``/ temperature``, ``top_k``,
    ``top_p``, ``min_p``, draw.

    Raises:
        RequestError: (code ``invalid_sampling_params``) If a value is invalid; names the field,
            its value and what it must be. (code ``unsupported_field``) If a field is unknown.
    """

    if TYPE_CHECKING:  # wider than the fields, which hold what was checked

        def __init__(
            self,
            *,
            temperature: float = 1.0,
            top_k: int = 0,
            top_p: float = 1.0,
            min_p: float = 0.0,
            repetition_penalty: float = 1.0,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            logit_bias: Mapping[int, float] | None = None,
            allowed_token_ids: abc.Sequence[int] | None = None,
            bad_words: abc.Sequence[str] | None = None,
            logits_processors: abc.Sequence[LogitsProcessor] | None = None,
            structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
            seed: int | None = None,
            stop: str | abc.Sequence[str] | None = None,
            stop_token_ids: abc.Sequence[int] | None = None,
            include_stop_str_in_output: bool = False,
            reasoning_marks: abc.Sequence[str] | None = None,
            max_tokens: int | None = 16,
            min_tokens: int = 0,
            ignore_eos: bool = False,
            detokenize: bool = True,
            skip_special_tokens: bool = True,
            truncate_prompt_tokens: int | None = None,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            n: int = 1,
        ) -> None: ...

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt
    or the output; 1 does nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for every occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → added to its logit, -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens can be drawn; EOS only if it is one of them. None allows all."""
    bad_words: tuple[str, ...] = ()
    """Words that can't be generated: the token that would complete one, with or
    without a space before the word, is masked."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Functions that change a row of logits before everything else, in turn. In
    Python only, and where the sampler is in this process."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must be: JSON of a schema, a match of a regular expression, one of
    some choices, a text of a grammar; an object of its fields is taken, too. The
    sequence ends when nothing but EOS may follow."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch (docs/design/sampling.md says
    how far). None draws a fresh seed."""
    stop: tuple[str, ...] = ()
    """Stop when the text contains one of these; it is cut off the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these; it stays in token_ids, its text is cut off."""
    include_stop_str_in_output: bool = False
    """The text keeps the stop string, or the text of the token, that ended it."""
    reasoning_marks: tuple[str, str] | None = None
    """Stop strings don't count between these two at the text's beginning; an empty first one: the
    prompt ends inside. Chats set it by the model's reasoning format."""
    max_tokens: int | None = 16
    """Most tokens to generate. None allows as many as the model's limit leaves."""
    min_tokens: int = 0
    """EOS and stop ids can't be drawn before this many tokens; stop strings
    don't end the text before it."""
    ignore_eos: bool = False
    detokenize: bool = True
    """False: only token ids are wanted; every text is empty, and none is made.
    Without text there are no stop strings, but ``stop_token_ids``."""
    skip_special_tokens: bool = True
    """False: the text has the names of special tokens."""
    truncate_prompt_tokens: int | None = None
    """Keep only this number of the prompt's last tokens. -1 keeps as many as the model's limit
    leaves beside ``max_tokens``. None keeps all, and a prompt that is too long is an error."""
    logprobs: int | None = None
    """None: no logprobs; k >= 0: the drawn token's, and the k likeliest tokens', at every step."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, by the model's own distribution. The whole
    prompt is run: no KV block of another request is reused, or left for others."""
    n: int = 1
    """Completions of the one prompt; the prompt is prefilled once."""

    def __setattr__(self, name: str, value: object) -> None:
        if "n" not in self.__dict__:  # it is being made: ``n`` is set last
            object.__setattr__(self, name, value)
            return
        if not supported_sampling({name: value}, self.__dataclass_fields__):
            return
        before = dict(self.__dict__)
        object.__setattr__(self, name, value)
        try:
            self.__post_init__()
        except RequestError:
            self.__dict__.update(before)
            raise

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("top_k", 0 if self.top_k == -1 else _integer("top_k", self.top_k, 0, 1 << 30))
        for name, low, high, open_low in _NUMBERS:
            put(name, _number(name, getattr(self, name), low, high, open_low=open_low))
        put("logit_bias", self._checked_logit_bias())
        for name, low, high in _OPTIONAL_INTEGERS:
            if (given := getattr(self, name)) is not None:
                _integer(name, given, low, high)
        stop: object = self.stop
        stop = (stop,) if isinstance(stop, str) else stop
        put("stop", _strings("stop", stop, MAX_STOP_STRINGS, _STOP_RULE))
        put("reasoning_marks", _reasoning_marks(self.reasoning_marks))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", [], "a list of at least one token id")
        put("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, _WORDS_RULE))
        for word in self.bad_words:
            if not word.strip():
                raise _refuse("bad_words", word, _WORDS_RULE)
        put("logits_processors", _logits_processors(self.logits_processors))
        if self.truncate_prompt_tokens not in (None, -1):
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKENS)
        put("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        _integer("n", self.n, 1, MAX_N)
        self._check_together()

    def _check_together(self) -> None:
        if self.structured_outputs is not None:
            for name, nothing in (("ignore_eos", False), ("min_tokens", 0), ("detokenize", True)):
                if getattr(self, name) != nothing:
                    rule = f"{nothing} beside structured_outputs, which say where the text ends"
                    raise _refuse(name, getattr(self, name), rule)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            rule = "true where stop strings are given, which need text: or use stop_token_ids"
            raise _refuse("detokenize", self.detokenize, rule)

    def _checked_logit_bias(self) -> dict[int, float]:
        given: object = self.logit_bias
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise _refuse("logit_bias", given, "an object of token id to bias")
        checked: dict[int, float] = {}
        pairs: Iterable[tuple[object, object]] = given.items()
        for key, bias in pairs:
            try:
                number = int(key) if isinstance(key, str) else key  # JSON object keys are strings
            except ValueError:
                raise _refuse("logit_bias", key, "an object whose keys are token ids") from None
            token = _integer("logit_bias token id", number, 0, 1 << 31)
            checked[token] = _number(f"logit_bias[{token}]", bias, -100, 100)
        return checked


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Check what ``SamplingParams`` couldn't check without knowing the model.

    Raises:
        RequestError: (code ``invalid_sampling_params``) If a token id in ``logit_bias``,
            ``stop_token_ids`` or ``allowed_token_ids`` is not one of the model's.
    """
    for name, token_ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token in token_ids:
            if token >= vocab_size:
                raise RequestError(
                    Given(name),
                    f" names token {token}, but the model's token ids end at {vocab_size - 1}: "
                    "leave it out, or check that the ids are this model's",
                    code="invalid_sampling_params",
                )


Prompt: TypeAlias = "str | abc.Sequence[int]"
"""Text, or token ids."""


def check_prompt(prompt: object) -> Prompt:
    """A text or a list of what may be token ids. Raises RequestError: it is
    neither, or an empty text."""
    if isinstance(prompt, str) and not prompt:
        raise RequestError("the prompt is empty: give at least one character", code="empty_prompt")
    if isinstance(prompt, bytes) or not isinstance(prompt, abc.Sequence):
        raise RequestError(
            f"a prompt is a string or a list of token ids, not {type(prompt).__name__}",
            code="invalid_prompt",
        )
    return prompt


@dataclass(frozen=True)
class CacheUse:
    """What a request has to do with the KV cache of others.

    Raises:
        RequestError: (code ``invalid_cache``).
    """

    is_off: bool = False  # it leaves no blocks behind, and uses none that other requests left
    salt: str = ""  # it shares blocks with requests of the same salt only
    turn: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    """Leading tokens of its prompt that earlier turns of its conversation cached: its own last
    block is kept though it isn't full. None if it is not a turn of a conversation."""

    def __post_init__(self) -> None:
        salt: object = self.salt
        if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS or not is_unicode(salt):
            why = f": must be a string of at most {MAX_SALT_CHARS} characters, no lone surrogates"
            raise RequestError(Given("cache_salt"), why, code="invalid_cache")

    @classmethod
    def of(cls, cache: object, salt: object) -> CacheUse:
        """Read a request's fields ``cache`` and ``cache_salt``. None stands for a missing one."""
        if cache not in (None, "on", "off"):
            raise RequestError(
                Given("cache", cache), ': must be "on" or "off"', code="invalid_cache"
            )
        return cls(cache == "off", "" if salt is None else cast(str, salt))


SHARED = CacheUse()  # shares blocks with all requests that have no salt


@dataclass(frozen=True)
class PromptRequest:
    """A request as it arrives: its prompt not yet tokenised or checked."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    cache: CacheUse = SHARED


@dataclass(frozen=True)
class Request:
    """A prompt that has been tokenised and found valid for the model, and how to continue it."""

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """``params.max_tokens`` with None resolved and the model's limit applied."""
    seed: int
    """``params.seed``, or the fresh seed drawn in its place."""
    cache: CacheUse = SHARED
    drawn: Mapping[Annotated[int, Meta(ge=0, le=MAX_N)], TokenIds] = field(default_factory=dict)
    """By sequence: tokens that an earlier run has drawn for it, fewer than
    ``max_tokens``, and none that ends it."""
    sources: Sources = ()
    """Where K and V of its prompt may be fetched."""
    hands_over: bool = False
    """Its sequences continue elsewhere after ``max_tokens``, unless they are over
    by then: K and V of the prompt are kept, and offered, until it is cancelled."""
    bad_words: tuple[Annotated[TokenIds, Meta(min_length=1)], ...] = ()
    """The tokens of ``params.bad_words``, a tuple for each way to write a word."""


@dataclass(frozen=True)
class Logprob:
    """What is known of one token at one step, as vLLM tells it."""

    logprob: float
    rank: int | None = None
    """1 is the likeliest."""
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenLogprob(Mapping[int, Logprob]):
    """One step's log-probabilities, of the distribution after penalties and
    bias, before temperature and truncation. It is also a mapping of token id to
    ``Logprob``: the drawn token first, then the likeliest."""

    token_id: TokenId
    logprob: Log
    top: tuple[tuple[TokenId, Log], ...] = ()
    """The likeliest tokens and their logprobs, likeliest first; as many as
    ``SamplingParams.logprobs``."""
    rank: Count = 0
    """Of the drawn token; 1 is the likeliest, 0 isn't known."""
    texts: tuple[str, ...] = ()
    """Of the drawn token and of ``top``; none if nobody has decoded them."""

    @cached_property
    def _by_id(self) -> dict[int, Logprob]:
        texts = self.texts or (None,) * (1 + len(self.top))
        of_drawn = Logprob(self.logprob, self.rank or None, texts[0])
        by_id = {self.token_id: of_drawn}
        for place, (token, logprob) in enumerate(self.top):
            by_id[token] = Logprob(logprob, place + 1, texts[place + 1])
        return by_id

    def __getitem__(self, token_id: int) -> Logprob:
        return self._by_id[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an answer asks for."""

    id: str
    name: str
    arguments: str
    """JSON text of an object, as the model wrote it: it may be cut off, or be no JSON."""

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: int | str | None = None
    """The stop string or the token of ``stop_token_ids`` that ended it; None: EOS, or
    its length."""
    content: str | None = None
    """Of an answer to a chat with tools, or of a model that marks its reasoning: the text
    without calls and reasoning."""
    reasoning_content: str | None = None
    """And the reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    """And the calls."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' logprobs; None if they weren't asked for."""
        return None if self.logprobs is None else sum(step.logprob for step in self.logprobs)

    def finished(self) -> bool:
        """Always: outputs are given once they are complete."""
        return True


@dataclass(frozen=True)
class RequestOutput:
    """What one request gave: its completions, or the error that it alone met."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...] = ()
    error: FastDecodeError | None = None
    num_cached_tokens: int = 0
    """Of the prompt, tokens that weren't run, since the KV blocks of an earlier
    request were reused."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One a token of the prompt, the first of which is None, if they were asked for."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def finished(self) -> bool:
        """Always: outputs are given once they are complete."""
        return True

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The completions, by vLLM's name; raises the request's own error if it failed."""
        if self.error is not None:
            raise self.error
        return self.completions

    @property
    def text(self) -> str:
        """The first completion's text; raises the request's own error if it failed."""
        return self.outputs[0].text


COMING = -1
"""In place of a token that was drawn, and isn't known yet."""

NOTHING: Final = range(0)
"""Of a sequence's tokens."""


def shifted(tokens: range, by: int) -> range:
    """The same, counted from elsewhere; nothing stays nothing."""
    return range(tokens.start + by, tokens.stop + by) if tokens else NOTHING


@dataclass(eq=False)
class Sequence:
    """One continuation in the making: its tokens, how many of them are cached, and where.

    A sequence is always continued the same way: run the tokens that aren't cached yet, and once
    all are, draw the next one. So a first prefill, a chunk of one, a decode step (one token to
    run) and a recomputation after the cache was lost (prompt and generated tokens to run) are the
    same operation everywhere."""

    sequence_id: SequenceId
    request: Request
    index: int
    """Which of the request's ``n``."""
    num_cached: int = 0
    """Leading tokens whose K and V are cached."""
    behind_gap: range = NOTHING
    """Tokens whose K and V are cached, too, though some before them aren't:
    those between, its **gap**, are run first."""
    residence: Residence | None = None
    """Where they are, and where there is room for more; None while waiting."""
    num_reused: int = 0
    """Tokens that it didn't run when it started first, since others had: those
    whose KV blocks were kept."""
    sources: tuple[KVSource, ...] = ()
    """Where K and V of its first tokens may be fetched when it starts."""
    is_spoilt: bool = False
    """It came to logits that are not finite: its KV blocks are not reused."""

    @classmethod
    def of(cls, sequence_id: SequenceId, request: Request, index: int) -> Sequence:
        sources = of_first_tokens(request.sources, len(request.prompt_token_ids))
        return cls(sequence_id, request, index, sources=sources)

    @cached_property
    def token_ids(self) -> list[int]:
        """The prompt, then what was generated; its last may be ``COMING``.

        The list is copied at the first use: thousands of sequences may wait, whose tokens the
        request keeps. Use ``num_tokens`` for those."""
        return [*self.request.prompt_token_ids, *self.request.drawn.get(self.index, ())]

    @property
    def num_tokens(self) -> int:
        if "token_ids" in self.__dict__:
            return len(self.token_ids)
        return self.num_prompt_tokens + len(self.request.drawn.get(self.index, ()))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_coming(self) -> bool:
        """Whether its last token was drawn, and isn't known yet."""
        return "token_ids" in self.__dict__ and self.token_ids[-1] == COMING

    @property
    def gap(self) -> range:
        """Tokens that aren't cached, with cached ones behind them."""
        return range(self.num_cached, self.behind_gap.start) if self.behind_gap else NOTHING

    @property
    def num_present(self) -> int:
        """Tokens whose K and V are cached, those behind a gap included."""
        return self.num_cached + len(self.behind_gap)

    @property
    def num_uncached(self) -> int:
        """Tokens to run before the next one can be drawn; 1 when decoding."""
        return self.num_tokens - self.num_present

    def pass_gap(self) -> None:
        """More of its tokens are cached, which end with its gap at the latest: if they do,
        what is behind it is cached, too."""
        if self.num_cached == self.behind_gap.start:
            self.num_cached = self.behind_gap.stop
            self.behind_gap = NOTHING

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that will ever be cached: the last one drawn is never run."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens - 1
