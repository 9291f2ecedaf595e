"""Which tokens a grammar allows next: masks of a vocabulary, made beside the
device's work.

A ``GrammarState`` belongs to one sequence and is a pure function of the tokens
that the sequence has generated, so it is made anew wherever a sequence goes on.
A grammar is compiled, and its masks are filled in, by threads of ``GrammarMasks``
that don't hold Python's lock: compiling beside the prompt's prefill, masks
beside the step that follows a token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import NO_TOKENIZER, grammar_of, llguidance
from fastdecode.text.token_text import TokenText

MOST_KEPT: Final = 256
"""Compiled grammars that are kept for requests to come."""
MOST_TEXTS: Final = 4096
"""Forced texts whose tokens are kept."""
_MARK: Final = "\x02"


class GrammarMasks:
    """Makes masks for all sequences of an engine.

    Args:
        codec: of the model.
        vocab_size: width of the logits.
        eos_token_ids: allowed where a text may end.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._codec = codec
        # A model without EOS is given one beyond its tokens, which is never drawn.
        self._vocab_size = vocab_size if eos_token_ids else vocab_size + 1
        self._eos_token_ids = list(eos_token_ids) or [vocab_size]
        self._num_words = -(-vocab_size // 32)
        self._kept: dict[StructuredOutputs, Any] = {}
        self._locked = threading.Lock()
        self._gathered: tuple[list[GrammarState], Future[None]] | None = None

    def state(self, wanted: StructuredOutputs, token_ids: Sequence[int] = ()) -> GrammarState:
        """Of a sequence that has generated these tokens. Raises RequestError: the
        package is missing, or the model has no tokenizer."""
        llguidance()
        if not self._codec.has_tokenizer:
            raise RequestError(NO_TOKENIZER, code="no_tokenizer")
        state = GrammarState(self)
        state.awaited = self._openers.submit(self._open, state, wanted, tuple(token_ids))
        return state

    def want(self, state: GrammarState) -> None:
        """Begin with a state's mask, together with others that are wanted by
        then. Doesn't wait."""
        with self._locked:
            if self._gathered is None:
                self._gathered = [], self._fillers.submit(self._fill_gathered)
            states, state.awaited = self._gathered
            states.append(state)

    def close(self) -> None:
        """End its threads. Safe to call twice."""
        for threads in (self.__dict__.get("_openers"), self.__dict__.get("_fillers")):
            if threads is not None:
                threads.shutdown()

    def _open(
        self, state: GrammarState, wanted: StructuredOutputs, token_ids: tuple[int, ...]
    ) -> None:
        try:
            state.matcher = self._compile(wanted)
        except Exception as error:  # of a library: its request ends, and no other
            state.fail(str(error))
        else:
            state.take(token_ids)
        self._fill([state])

    def _compile(self, wanted: StructuredOutputs) -> Any:
        """A matcher that has seen no token. One that has failed reports it itself."""
        kept = self._kept.pop(wanted, None)
        if kept is None:
            limits = llguidance().LLParserLimits(verbose_errors=False)
            kept = llguidance().LLMatcher(
                self._tokenizer,
                grammar_of(wanted, self._codec.special_tokens),
                log_level=0,
                limits=limits,
            )
        self._kept[wanted] = kept
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept.deep_copy()

    def _fill_gathered(self) -> None:
        with self._locked:
            assert self._gathered is not None
            states, _ = self._gathered
            self._gathered = None
        self._fill(states)

    def _fill(self, states: Sequence[GrammarState]) -> None:
        """Fill in the masks of these; by one of the threads."""
        rows = np.zeros((len(states), -(-self._vocab_size // 32)), np.int32)
        matchers = []
        for place, state in enumerate(states):
            state.row = rows[place, : self._num_words]
            if state.error is None:
                matchers.append((state.matcher, place))
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                matchers, rows.ctypes.data, rows.strides[0], len(rows)
            )

    @cached_property
    def _openers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammars")

    @cached_property
    def _fillers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")

    @cached_property
    def _executor(self) -> Any:
        return llguidance().LLExecutor()

    @cached_property
    def _tokenizer(self) -> Any:
        tokens = _Tokens(self._codec, self._eos_token_ids, self._vocab_size)
        return llguidance().LLTokenizer(
            tokens, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class GrammarState:
    """Where one sequence is in its grammar.

    Args:
        masks: makes its masks.
    """

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.matcher: Any = None
        self.awaited: Future[None] | None = None
        """Once it is done, ``row`` is."""
        self.row: NDArray[np.int32] | None = None
        self.error: RequestError | None = None
        self.is_complete = False
        """Nothing but EOS may follow. Kept: the matcher can't be asked while a
        thread fills in its mask."""

    def observe(self, token_id: int) -> None:
        """A token was appended to the output, which ``mask`` allowed."""
        self.take((token_id,))
        if not self.is_complete:
            self._masks.want(self)

    def mask(self) -> NDArray[np.int32]:
        """The tokens that may follow: int32 [ceil(V / 32)], token t is bit t % 32
        of word t // 32; none after an error. Waits until it is made."""
        assert self.awaited is not None
        self.awaited.result()
        assert self.row is not None
        return self.row

    def take(self, token_ids: Sequence[int]) -> None:
        """Give the matcher more tokens of the output."""
        if token_ids:
            self.matcher.consume_tokens(list(token_ids))
        if self.matcher.is_error():
            self.fail(self.matcher.get_error())
        self.is_complete = self.error is None and bool(self.matcher.is_stopped())

    def fail(self, why: str) -> None:
        """The grammar can't be followed any more."""
        self.error = RequestError(
            Given("structured_outputs"),
            f" can't be followed: {' '.join(why.split()):.500}; simplify it",
            code="structured_outputs_failed",
        )


class _Tokens:
    """A vocabulary as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: TextCodec, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        vocabulary = codec.vocabulary
        assert vocabulary is not None
        named, specials = TokenText(vocabulary), {*vocabulary.skipped, *eos_token_ids}
        # Models have rows of logits that are no token.
        specials.update(t for t in range(vocab_size) if vocabulary.tokenizer.id_to_token(t) is None)
        self.tokens = [b"" if t in specials else named.bytes_of(t) for t in range(vocab_size)]
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(t for t in specials if t < vocab_size)
        self._codec = codec
        self._by_bytes = {token: place for place, token in enumerate(self.tokens)}
        self._most_bytes = max(map(len, self.tokens))
        self._cached = lru_cache(MOST_TEXTS)(self._encoded)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text that a grammar forces. Must not raise."""
        return self._cached(text)

    def _encoded(self, text: str) -> list[int]:
        """Encode as the model's tokenizer does within a text. Some tokenizers put a blank before
        all of it, so they encode behind a mark, whose tokens are cut off."""
        try:
            for mark in ("", _MARK):
                num_cut = len(self._codec.encode(mark, add_special_tokens=False)) if mark else 0
                ids = self._codec.encode(mark + text, add_special_tokens=False)[num_cut:]
                if all(token < len(self.tokens) for token in ids) and text.encode() == b"".join(
                    self.tokens[token] for token in ids
                ):
                    return ids
        except RequestError:  # the tokenizer lacks these characters, or failed
            pass
        return self._longest(text.encode())

    def _longest(self, text: bytes) -> list[int]:
        """Return the longest token at each place, up to a byte that no token begins with."""
        ids: list[int] = []
        while text:
            sizes = range(min(len(text), self._most_bytes), 0, -1)
            size = next((size for size in sizes if text[:size] in self._by_bytes), 0)
            if not size:
                break
            ids.append(self._by_bytes[text[:size]])
            text = text[size:]
        return ids
