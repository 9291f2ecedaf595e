"""Between text and token ids: the tokenizer of a model directory, and the text
of a sequence as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.begun_stop import BegunStop
from fastdecode.text.detokenizer import Detokenizer, NoDetokenizer, Vocabulary, detokenizer_for
from fastdecode.text.encoder import Encoder
from fastdecode.text.reasoning import ReasoningFormat, ReasoningSplitter, prompt_state
from fastdecode.text.tokenizer_files import TokenizerFiles, find_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_NUM_END: Final = 32
"""Tokens of a prompt's end: more than a template writes after a mark."""


def lacks_tokenizer(model_dir: Path) -> bool:
    """Whether a model directory serves token ids only.

    Raises:
        CheckpointError: as ``find_tokenizer``.
    """
    return model_dir.is_dir() and find_tokenizer(model_dir) is None


class TextCodec:
    """A model's tokenizer, or the lack of one: a model without serves token ids
    only.

    Args:
        tokenizer: None if the model has none.
        encoder: encodes prompts, since the tokenizer here only decodes; None:
            nobody does.
        eos_token_id: what the tokenizer's config names as the end of a text, if
            it does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        encoder: Encoder | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        self._encoder = encoder
        self.eos_token_id = eos_token_id
        self._vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        self._whole = None if tokenizer is None else Vocabulary(tokenizer, skips_special=False)

    @classmethod
    def load(cls, model_dir: str | Path, max_model_len: int | None = None) -> TextCodec:
        """Read a model directory's tokenizer, which may be absent.

        Args:
            max_model_len: what no prompt that is encoded may exceed; None:
                whatever can be encoded.

        Raises:
            CheckpointError: a file is there but can't be used, or is of a kind
                that has to be converted.
            MissingExtraError: the model has a tokenizer, but the package
                ``tokenizers`` isn't installed.
        """
        files = TokenizerFiles.read(Path(model_dir))
        if files.path is None:
            return cls(None)
        # The child has loaded it, and decoded each of its tokens, before it is loaded here.
        encoder = Encoder(files.path, max_model_len, added=files.added)
        tokenizer, eos = files.load(), files.names.get("eos_token")
        return cls(tokenizer, encoder, None if eos is None else tokenizer.token_to_id(eos))

    @property
    def has_tokenizer(self) -> bool:
        return self._vocabulary is not None

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens' texts; None without a tokenizer."""
        return self._vocabulary

    def vocabulary_of(self, params: SamplingParams) -> Vocabulary | None:
        """The tokens' texts in this request's answers; None without a tokenizer."""
        return self._vocabulary if params.skip_special_tokens else self._whole

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Name → id; none without a tokenizer."""
        return {} if self._vocabulary is None else self._vocabulary.special_tokens

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's last tokens, names of special tokens too; empty
        without a tokenizer."""
        return "" if self._whole is None else self._whole.text(token_ids[-_NUM_END:])

    def close(self) -> None:
        """End the process that encodes. Safe to call twice."""
        if self._encoder is not None:
            self._encoder.close()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids, with the special tokens that the tokenizer
        puts around a text.

        Raises:
            RequestError: there is no tokenizer (code ``no_tokenizer``), the
                text can't be encoded (``invalid_prompt``), or has more bytes
                than the longest prompt's tokens hold (``prompt_too_long``).
        """
        if self._encoder is None:
            raise RequestError(
                "the prompt is text, but the model directory has no tokenizer.json: give "
                "prompt_token_ids, or add the model's tokenizer.json",
                code="no_tokenizer",
            )
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, special tokens left out; empty without a tokenizer."""
        return "" if self._vocabulary is None else self._vocabulary.text(token_ids)

    def sequence_text(
        self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> SequenceText:
        """A new sequence's text; none where only token ids are wanted. It
        continues the prompt's: a first word keeps the space before it.

        Raises:
            RequestError: (code ``no_tokenizer``) stop strings, but no tokenizer
                to make text of tokens.
        """
        if not params.detokenize:
            return NoText()
        vocabulary = self.vocabulary_of(params)
        if vocabulary is not None:
            detokenizer = detokenizer_for(vocabulary, prompt_token_ids)
            specials = vocabulary.special_tokens if params.skip_special_tokens else {}
            # The name of a special token that is skipped never appears in a text.
            stop_ids = {specials[stop]: stop for stop in params.stop if stop in specials}
            return SequenceText(
                detokenizer,
                params.stop,
                params.min_tokens,
                stop_ids,
                keeps_stop=params.include_stop_str_in_output,
                reasoning=self._reasoning(params, prompt_token_ids),
            )
        if params.stop:
            raise RequestError(
                "stop strings need text, but the model directory has no tokenizer.json: use "
                "stop_token_ids, or add the model's tokenizer.json",
                code="no_tokenizer",
            )
        return NoText()

    def _reasoning(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> ReasoningSplitter | None:
        """Return what finds the end of the reasoning, in which stop strings don't count."""
        if params.reasoning_marks is None or not params.stop:
            return None
        begin, end = params.reasoning_marks
        family = ReasoningFormat("", begin, end, state=None if begin else "inside")
        state = prompt_state(family, self.prompt_end(prompt_token_ids))
        return None if state == "after" else ReasoningSplitter(family, state == "inside")


class SequenceText:
    """What one sequence has said so far, and whether it has said a stop string.

    A token that ends the sequence by its id (EOS, ``stop_token_ids``) is given
    to ``append_last``.

    Args:
        detokenizer: the sequence's own.
        stop: end the text before the first of these to appear.
        min_tokens: a stop string that is complete before this many tokens
            doesn't count.
        stop_ids: tokens without text, and the stop string that names each.
        keeps_stop: the text has the stop string that ended it, and what
            ``append_last`` adds.
        reasoning: no stop string counts in what it finds; None: there is none.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        stop_ids: Mapping[int, str] = MappingProxyType({}),
        *,
        keeps_stop: bool = False,
        reasoning: ReasoningSplitter | None = None,
    ) -> None:
        self._keeps_stop = keeps_stop
        self._reasoning = reasoning
        self._undecided = ""
        """Text that may become the mark of reasoning."""
        self.stopped_by: str | None = None
        """The stop string that it has said."""
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._tail = ""
        """The end of the text, in which a stop string may have begun."""
        self._num_peeked = 0
        """Characters of the text that is held back that earlier tokens have
        already been judged by."""
        self._max_tail = max(map(len, stop), default=1) - 1
        self._is_over = False
        # Of the text that was taken:
        self._begun = BegunStop(() if keeps_stop else stop)
        self._num_seen = 0  # pieces looked at
        self._num_taken = 0  # characters given
        self._untaken = ""  # looked at, and not given

    @property
    def text(self) -> str:
        """The text that is final so far; all of it after ``finish`` or after a stop string."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> bool:
        """One more token. True if it completed a stop string: the text is cut
        and over.

        Of several stop strings that one token completes, the one that begins
        first counts.
        """
        assert not self._is_over, "no token follows the end of a text"
        self._num_tokens += 1
        is_thinking = self._reasoning is not None and self._reasoning.mode != "start"
        is_stop = token_id in self._stop_ids and self._num_tokens >= self._min_tokens
        if is_stop and not is_thinking:
            self.finish()
            self.stopped_by = self._stop_ids[token_id]
            if self._keeps_stop:
                self._pieces.append(self.stopped_by)
            return True
        if self._add(self._detokenizer.append(token_id)):
            return True
        if self._reasoning is not None or not (self._stop and self._detokenizer.can_peek):
            return False
        # A stop string may be complete in text that is held back only because
        # later bytes might spoil it.
        held = self._detokenizer.peek()
        if self._find(held) is not None:
            return self._add(self._detokenizer.flush())
        self._num_peeked = len(held)
        return False

    def append_last(self, token_id: int) -> None:
        """The token whose id ends the sequence: its text is there if stops are kept."""
        if self._keeps_stop:
            self.append(token_id)

    def take(self) -> str:
        """What is new of the text since the last call, but for an end that may
        become a stop string or part of one. Nothing that was taken is cut off
        later; all that was taken, after the end, is the text."""
        fresh = "".join(self._pieces[self._num_seen :])
        self._num_seen = len(self._pieces)
        num_held = self._begun.feed(fresh)
        untaken = self._untaken + fresh
        num_safe = len(untaken) - (0 if self._is_over else num_held)
        self._num_taken += num_safe
        self._untaken = untaken[num_safe:]
        return untaken[:num_safe]

    def finish(self) -> str:
        """No token follows: adds what was held back, and returns the whole text."""
        if not self._is_over:
            self._add(self._detokenizer.flush())
            self._reasoning, undecided = None, self._undecided
            self._add(undecided)
            self._is_over = True
        return self.text

    def _past_reasoning(self, reasoning: ReasoningSplitter, piece: str) -> str:
        """Take the reasoning into the text. Return what stop strings count in."""
        held = self._undecided + piece
        reasoning.feed(piece)
        self._undecided = held if reasoning.mode == "start" else ""
        if reasoning.mode == "start":
            return ""
        num_answer_chars = 0
        if reasoning.mode != "reasoning":
            self._reasoning = None
            num_answer_chars = reasoning.num_fed - reasoning.num_chars
        thought = held[: len(held) - num_answer_chars]
        if thought:
            self._pieces.append(thought)
        return held[len(thought) :]

    def _add(self, piece: str) -> bool:
        """Append to the text, or cut it at a stop string and return True."""
        if self._reasoning is not None:
            piece = self._past_reasoning(self._reasoning, piece)
        if not piece:
            return False
        found = self._find(piece) if self._stop else None
        self._num_peeked = 0
        if found is None:
            self._pieces.append(piece)
            if self._max_tail:
                self._tail = (self._tail + piece)[-self._max_tail :]
            return False
        if self._keeps_stop:
            self._pieces.append(piece[: found - len(self._tail)])
        elif found < len(self._tail):
            # It began in earlier pieces: take that much of them back.
            self._pieces = [self.text[: found - len(self._tail)]]
            self._num_seen, self._untaken = 1, self._pieces[0][self._num_taken :]
        else:
            self._pieces.append(piece[: found - len(self._tail)])
        self._is_over = True
        return True

    def _find(self, piece: str) -> int | None:
        """Where in tail + piece the text ends, as this token has completed a stop
        string: where the first one begins, or where it ends if it is kept; None
        if there is none."""
        if self._num_tokens < self._min_tokens:
            return None
        text, seen = self._tail + piece, len(self._tail) + self._num_peeked
        places = [text.find(stop, max(0, seen - len(stop) + 1)) for stop in self._stop]
        found = [
            (place, stop) for place, stop in zip(places, self._stop, strict=True) if place >= 0
        ]
        if not found:
            return None
        place, stop = min(found, key=lambda each: (each[0], len(each[1])))
        self.stopped_by = stop
        return place + len(stop) if self._keeps_stop else place


class NoText(SequenceText):
    """What a sequence has said, where nobody wants text or there is no tokenizer: nothing,
    and nothing is looked at."""

    def __init__(self) -> None:
        super().__init__(NoDetokenizer())

    def append(self, token_id: int) -> bool:
        return False
