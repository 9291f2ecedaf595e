"""Requests, and what they say, in JSON's types: as they go from one process to
another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import Any, Final

from fastdecode.core.delta import Delta
from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import MAX_N, CacheUse, Request, SamplingParams, TokenLogprob
from fastdecode.core.spec import MAX_HEADS, MAX_LAYERS, MAX_SEQUENCE_TOKENS
from fastdecode.wire.json_fields import AsJson
from fastdecode.wire.kv.exporting import MAX_SOURCES, check_ticket

_ERRORS: Final[Mapping[str, type[FastDecodeError]]] = {
    kind.__name__: kind
    for kind in (FastDecodeError, RequestError, CapacityError, WorkerError, ConfigError)
}
_MAX_TOKEN: Final = 1 << 31
_MAX_ADDRESS_CHARS: Final = 1 << 16
"""Of all sources of a prompt: they travel in one message's head."""
_REASONS: Final = (None, "stop", "length")
_NOT_AS_EXPECTED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def request_to_json(request: Request) -> list[Any]:
    assert not request.params.logits_processors, "functions go to no other process"
    params = {f.name: getattr(request.params, f.name) for f in fields(SamplingParams)}
    if request.params.structured_outputs is not None:
        params["structured_outputs"] = request.params.structured_outputs.to_json()
    return [
        request.request_id, request.prompt_token_ids, params, request.max_tokens, request.seed,
        request.cache.is_off, request.cache.salt, request.cache.turn,
        list(request.drawn.items()), [astuple(source) for source in request.sources],
        request.hands_over, request.bad_words, request.only_kept,
    ]  # fmt: skip


def request_from_json(said: Any) -> Request:
    """Raises ProtocolError: it is no request."""
    try:
        request_id, token_ids, params, max_tokens, seed, is_off, salt, turn, *more = said
        drawn, sources, hands_over, bad_words, only_kept = more
        return Request(
            _text(request_id),
            _tokens(token_ids),
            SamplingParams(**params),
            _whole(max_tokens, 1, 1 << 24),
            _whole(seed, -(1 << 63), (1 << 64) - 1),
            CacheUse(is_off is True, salt, turn if turn is None else _whole(turn, 0, 1 << 31)),
            {_whole(index, 0, MAX_N): _tokens(tokens) for index, tokens in drawn},
            _sources(sources),
            hands_over is True,
            _words(bad_words),
            only_kept is True,
        )
    except (*_NOT_AS_EXPECTED, FastDecodeError) as error:
        raise ProtocolError(f"what should be a request is none: {error}") from None


def delta_to_json(delta: Delta) -> list[Any]:
    error = delta.error and [_name_of(delta.error), delta.error.message, delta.error.code]
    logprobs = delta.logprobs and [_step(step) for step in delta.logprobs]
    return [
        delta.request_id, delta.index, delta.text, delta.token_ids, logprobs, delta.finish_reason,
        error, delta.num_cached_tokens, [astuple(source) for source in delta.sources],
        delta.has_fetched, delta.fetch_failed, delta.stop_reason,
        delta.prompt_logprobs and [step and _step(step) for step in delta.prompt_logprobs],
    ]  # fmt: skip


def _step(step: TokenLogprob) -> list[Any]:
    return [step.token_id, step.logprob, step.top, step.rank]


def delta_from_json(said: Any) -> Delta:
    """Raises ProtocolError: it is none."""
    try:
        request_id, index, text, token_ids, logprobs, reason, error, num_cached, *more = said
        sources, has_fetched, fetch_failed, stop_reason, of_prompt = more
        if reason not in _REASONS:
            raise ValueError(f"nothing finishes for {reason!r}")
        return Delta(
            _text(request_id),
            _whole(index, 0, MAX_N - 1),
            _readable(text),
            _tokens(token_ids),
            None if logprobs is None else tuple(map(_logprob, logprobs)),
            reason,
            None if error is None else _error(*error),
            _whole(num_cached, 0, 1 << 31),
            _sources(sources),
            has_fetched is True,
            fetch_failed is True,
            _stop_reason(stop_reason),
            of_prompt and tuple(None if step is None else _logprob(step) for step in of_prompt),
        )
    except (*_NOT_AS_EXPECTED, FastDecodeError) as error:
        raise ProtocolError(f"what should be news of a request is none: {error}") from None


def _name_of(error: FastDecodeError) -> str:
    """Of the closest class that the other side knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)


def _error(name: str, message: str, code: str) -> FastDecodeError:
    return _ERRORS[name](_text(message), code=_text(code))


def _stop_reason(said: Any) -> int | str | None:
    if said is None or isinstance(said, str):
        return said if said is None else _readable(said)
    return _whole(said, 0, _MAX_TOKEN)


def _logprob(said: Any) -> TokenLogprob:
    token, logprob, top, rank = said
    likeliest = tuple((_whole(one, 0, _MAX_TOKEN), _log(p)) for one, p in top)
    return TokenLogprob(
        _whole(token, 0, _MAX_TOKEN), _log(logprob), likeliest, _whole(rank, 0, _MAX_TOKEN)
    )


def _log(value: Any) -> float:
    """Of a probability, which may be 0; rounding may take it a little above 1."""
    if type(value) not in (int, float) or not value <= 1.0:
        raise ValueError(f"{value!r:.80} is no logarithm of a probability")
    return float(value)


def _sources(said: Any) -> tuple[KVSource, ...]:
    """As R-workers take them: these refuse others, and the S-worker that sends them."""
    if len(said) > MAX_SOURCES:
        raise ValueError(f"a prompt has {MAX_SOURCES} sources at most, not {len(said)}")
    sources = tuple(_source(*each) for each in said)
    if sum(len(source.address) for source in sources) > _MAX_ADDRESS_CHARS:
        raise ValueError("the addresses of its sources are too long")
    return sources


def _source(
    address: Any,
    line: Any,
    ticket: Any,
    first: Any,
    count: Any,
    head: Any,
    heads: Any,
    layer: Any,
) -> KVSource:
    return KVSource(
        _plain(address),
        _whole(line, 0, MAX_SEQUENCE_TOKENS),
        check_ticket(_text(ticket)),
        _whole(first, 0, MAX_SEQUENCE_TOKENS),
        _whole(count, 1, MAX_SEQUENCE_TOKENS),
        _whole(head, 0, MAX_HEADS),
        _whole(heads, 1, MAX_HEADS),
        _whole(layer, 0, MAX_LAYERS),
    )


def _tokens(said: Any) -> tuple[int, ...]:
    tokens = tuple(said)
    if not all(type(token) is int and 0 <= token < _MAX_TOKEN for token in tokens):
        raise ValueError("what should be token ids are none")
    return tokens


def _words(said: Any) -> tuple[tuple[int, ...], ...]:
    words = tuple(_tokens(word) for word in said)
    if not all(words):
        raise ValueError("a bad word has no tokens")
    return words


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r:.80} is not a whole number from {low} to {high}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _readable(value: Any) -> str:
    """Text that can be written as UTF-8."""
    _text(value).encode()
    return str(value)


def _plain(value: Any) -> str:
    """An address."""
    if not _text(value).isprintable():  # nor half a pair of surrogates
        raise ValueError(f"{value!r:.80} is no address")
    return str(value)


def _figures(said: Any) -> Mapping[str, Any]:
    if not isinstance(said, dict):
        raise ValueError("what should be figures are none")
    return said


REQUESTS: Final = AsJson.listed(request_to_json, request_from_json)
DELTAS: Final = AsJson.listed(delta_to_json, delta_from_json)
NAMES: Final = AsJson.listed(_text, _text)
TOKENS: Final = AsJson(list, _tokens)
FIGURES: Final = AsJson(dict, _figures)
