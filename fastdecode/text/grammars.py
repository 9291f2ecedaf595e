"""Structured outputs: grammars of the package llguidance, an extra, and masks of what they allow.

JSON schemas are Draft 2020-12, and an unknown keyword is refused. Regular expressions are those of
Rust's regex package, without look-around. Grammars are Lark's or GBNF's. Threads compile grammars
beside the prompt's prefill and fill in masks beside steps, without Python's lock.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import Given, RequestError, pip_command
from fastdecode.core.structured import StructuredOutputs, refuse
from fastdecode.text.codec import TextCodec, no_tokenizer
from fastdecode.text.detokenizer import TokenText
from fastdecode.text.lark import json_rule, quoted, reasoning_grammar, refuse_tool, tool_grammars
from fastdecode.text.reasoning import REASONING_FORMATS

_SHOWN: Final = 500
"""Characters of llguidance's message that an error repeats."""
MOST_KEPT: Final = 256
"""Compiled grammars that are kept for later requests."""
MOST_CHARS: Final = 1 << 20
"""Characters of forced texts whose tokens are kept."""
MOST_RESTS: Final = 32
"""Ends of a forced text whose tokens are kept, too."""
_MARK: Final = "\x02"


def llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        why = "structured outputs need the package 'llguidance', which is not installed here"
        install = f"Install it with: {pip_command('structured')}"
        raise RequestError(f"{why}. {install}", code="missing_extra") from None
    return llguidance


def check_structured(wanted: StructuredOutputs, special: Mapping[str, int]) -> None:
    """Raises RequestError: If the schema, expression or grammar can't be followed (code
    ``invalid_structured_outputs``), or the package is missing (``missing_extra``)."""
    why = _why_not(grammar_of(wanted, special))
    if not why:
        return
    for name, rules in tool_grammars(wanted.grammar or ""):
        if why_not := _why_not(rules):
            raise refuse_tool(name, _brief(_of_schema(why_not)))
    why = why if wanted.grammar is not None else _of_schema(why)
    raise refuse(f".{wanted.kind} can't be followed: {_brief(why)}")


def _why_not(grammar: str) -> str:
    """Return why llguidance can't follow a grammar, or an empty text if it can."""
    limits = llguidance().LLParserLimits(verbose_errors=False)
    said = str(llguidance().LLMatcher.validate_grammar(grammar, limits=limits))
    return "" if said.startswith("WARNING") else said


def _of_schema(said: str) -> str:
    return said.partition("\n   1 | ")[0].rpartition("JSON schema: ")[2]


def grammar_of(wanted: StructuredOutputs, special: Mapping[str, int]) -> str:
    """Return the grammar as llguidance takes it. Raises RequestError: See ``check_structured``."""
    grammar = _grammar_of_answer(wanted)
    if wanted.reasoning is None:
        return grammar
    family = REASONING_FORMATS.get(wanted.reasoning)
    if family is None:
        known = ", ".join(REASONING_FORMATS)
        raise refuse(f".reasoning {wanted.reasoning!r:.80} is none of {known}")
    # llguidance writes Lark's grammars as they are, others as JSON.
    is_json = grammar.lstrip().startswith("{")
    inner = json.loads(grammar) if is_json else {"grammars": [{"lark_grammar": grammar}]}
    inner["grammars"][0]["name"] = "answer"
    outer = reasoning_grammar(family, special, is_inside=wanted.in_reasoning)
    return json.dumps({**inner, "grammars": [{"lark_grammar": outer}, *inner["grammars"]]})


def _grammar_of_answer(wanted: StructuredOutputs) -> str:
    if wanted.regex is not None:
        return str(llguidance().LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return f"start: {' | '.join(map(quoted, wanted.choice))}"
    try:
        if wanted.grammar is not None:
            return str(llguidance().grammar_from("grammar", wanted.grammar))
        assert wanted.schema is not None, "one of the kinds is given"
        blanks, is_compact = wanted.whitespace_pattern, wanted.disable_any_whitespace
        return f"start: {json_rule(wanted.schema, blanks, is_compact=is_compact)}"
    except (ValueError, RecursionError) as error:
        what = "read" if wanted.grammar is not None else "followed"
        raise refuse(f".{wanted.kind} can't be {what}: {_brief(str(error))}") from None


def _brief(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class GrammarMasks:
    """Makes masks for all sequences of an engine. ``vocab_size`` is the width of the logits."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._codec = codec
        # A model without EOS is given one beyond its tokens, which is never drawn.
        self._vocab_size = vocab_size if eos_token_ids else vocab_size + 1
        self._eos_token_ids = list(eos_token_ids) or [vocab_size]
        self._num_words = -(-vocab_size // 32)
        self._compiled = lru_cache(MOST_KEPT)(self._compile)
        self._locked = threading.Lock()
        self._openers = ThreadPoolExecutor(1, "grammars")
        self._fillers = ThreadPoolExecutor(1, "grammar-masks")
        self._gathered: tuple[list[GrammarState], Future[None]] | None = None

    def state(self, wanted: StructuredOutputs, token_ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of a sequence that has generated these tokens. Raises RequestError."""
        llguidance()
        if self._codec.vocabulary is None:
            raise no_tokenizer("structured outputs need text")
        state = GrammarState(self)
        state.awaited = self._openers.submit(self._open, state, wanted, tuple(token_ids))
        return state

    def want(self, state: GrammarState) -> None:
        """Begin a state's mask, together with others that are wanted by then. Doesn't wait."""
        with self._locked:
            if self._gathered is None:
                self._gathered = [], self._fillers.submit(self._fill_gathered)
            states, state.awaited = self._gathered
            states.append(state)

    def close(self) -> None:
        self._openers.shutdown()
        self._fillers.shutdown()

    def _open(
        self, state: GrammarState, wanted: StructuredOutputs, token_ids: tuple[int, ...]
    ) -> None:
        try:
            state.matcher = self._compiled(wanted).deep_copy()
        except Exception as error:  # of a library: its request ends, and no other
            state.fail(str(error))
        else:
            state.take(token_ids)
        self._fill([state])

    def _compile(self, wanted: StructuredOutputs) -> Any:
        """Return a matcher that has seen no token. It reports a failure itself."""
        limits = llguidance().LLParserLimits(verbose_errors=False)
        grammar = grammar_of(wanted, self._codec.special_tokens)
        return llguidance().LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def _fill_gathered(self) -> None:
        with self._locked:
            assert self._gathered is not None
            states, _ = self._gathered
            self._gathered = None
        self._fill(states)

    def _fill(self, states: Sequence[GrammarState]) -> None:
        rows = np.zeros((len(states), -(-self._vocab_size // 32)), np.int32)
        for row, state in zip(rows, states, strict=True):
            state.row = row[: self._num_words]
        matchers = [(state.matcher, place) for place, state in enumerate(states) if not state.error]
        if matchers:
            begin, stride = rows.ctypes.data, rows.strides[0]
            self._executor.unsafe_compute_mask_ptr(matchers, begin, stride, len(rows))

    @cached_property
    def _executor(self) -> Any:
        return llguidance().LLExecutor()

    @cached_property
    def _tokenizer(self) -> Any:
        tokens = _Tokens(self._codec, self._eos_token_ids, self._vocab_size)
        options = {"n_vocab": self._vocab_size, "eos_token": self._eos_token_ids}
        return llguidance().LLTokenizer(tokens, **options)


class GrammarState:
    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.matcher: Any = None
        self.awaited: Future[None] | None = None
        """Done once ``row`` is."""
        self.row: NDArray[np.int32] | None = None
        self.error: RequestError | None = None
        self.is_complete = False
        """Only EOS may follow. Kept, because a thread may be using the matcher."""

    def observe(self, token_id: int) -> None:
        """Take a token that ``mask`` allowed, and begin the next mask."""
        self.take((token_id,))
        if not self.is_complete:
            self._masks.want(self)

    def mask(self) -> NDArray[np.int32]:
        """Wait for the tokens that may follow: int32 [ceil(V / 32)], token t is bit t % 32 of word
        t // 32. After an error there are none."""
        assert self.awaited is not None
        self.awaited.result()
        assert self.row is not None
        return self.row

    def take(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.matcher.consume_tokens(list(token_ids))
        if self.matcher.is_error():
            self.fail(self.matcher.get_error())
        self.is_complete = self.error is None and bool(self.matcher.is_stopped())

    def fail(self, why: str) -> None:
        self.error = RequestError(
            Given("structured_outputs"),
            f" can't be followed: {' '.join(why.split()):.500}; simplify it",
            code="structured_outputs_failed",
        )


class _Tokens:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: TextCodec, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        vocabulary = codec.vocabulary
        assert vocabulary is not None
        named, specials = TokenText(vocabulary), {*vocabulary.skipped, *eos_token_ids}
        # Models have rows of logits without a token.
        specials.update(t for t in range(vocab_size) if vocabulary.tokenizer.id_to_token(t) is None)
        self.tokens = [b"" if t in specials else named.bytes_of(t) for t in range(vocab_size)]
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(t for t in specials if t < vocab_size)
        self._codec = codec
        self._by_bytes = {token: place for place, token in enumerate(self.tokens)}
        self._most_bytes = max(map(len, self.tokens))
        self._num_chars = 0
        self._kept: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text that a grammar forces. Must not raise."""
        ids = self._kept.get(text)
        if ids is None:
            ids = self._encoded(text)
            self._num_chars += len(text)
            if self._num_chars > MOST_CHARS:
                self._kept, self._num_chars = {}, len(text)
            # After each token, llguidance asks for that token's text and what follows it.
            rest = text.encode()
            for place, token in enumerate(ids[:MOST_RESTS]):
                self._kept[rest.decode(errors="replace")] = ids[place:]
                rest = rest[len(self.tokens[token]) :]
        return ids

    def _encoded(self, text: str) -> list[int]:
        """Encode as the model's tokenizer does within a text.

        Some tokenizers put a blank before a text. They encode behind a mark, whose tokens are cut
        off. Where the ids' bytes are not the text, each place gets the longest token, up to a byte
        that no token begins with.
        """
        try:
            for mark in ("", _MARK):
                num_cut = len(self._codec.encode(mark, add_special_tokens=False)) if mark else 0
                ids = self._codec.encode(mark + text, add_special_tokens=False)[num_cut:]
                spelled = b"".join(self.tokens[t] for t in ids if t < len(self.tokens))
                if spelled == text.encode() and max(ids, default=0) < len(self.tokens):
                    return ids
        except RequestError:  # the tokenizer lacks these characters, or failed
            pass
        rest, ids = text.encode(), []
        sizes = range(self._most_bytes, 0, -1)
        while rest and (size := next((n for n in sizes if rest[:n] in self._by_bytes), 0)):
            ids.append(self._by_bytes[rest[:size]])
            rest = rest[size:]
        return ids
