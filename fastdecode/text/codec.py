"""Between text and token ids: a model's tokenizer, and the text of a sequence as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastdecode.core.errors import CheckpointError, RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.child import ChildDiedError, ChildFailedError, LimitedChild, Limits
from fastdecode.text.detokenizer import Detokenizer, Vocabulary, detokenizer_for
from fastdecode.text.reasoning import ReasoningFormat, ReasoningSplitter, num_begun
from fastdecode.text.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES_PER_TOKEN = 128
"""Texts of up to this many bytes per token of the model's limit are encoded whole."""
ENCODE_CPU_S = 30  # a million tokens of prose take 5 s
LOAD_CPU_S = 60
BASE_MEMORY_BYTES = 1 << 30
MEMORY_PER_FILE_BYTE = 24  # a loaded tokenizer takes twelve times its file's size
_NUM_END: Final = 32
"""Tokens of a prompt's end: more than a template writes after a mark."""


class TextCodec:
    """A model's tokenizer, or the lack of one: such a model serves token ids only. ``encoder`` is
    the process that encodes. No prompt may reach ``max_model_len``."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        encoder: LimitedChild | None = None,
        eos_token_id: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._max_model_len = max_model_len
        self.eos_token_id = eos_token_id
        """None if the tokenizer's files name no end of a text."""
        self.vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        self.whole = None if tokenizer is None else Vocabulary(tokenizer, skips_special=False)

    @classmethod
    def load(
        cls, model_dir: Path, max_model_len: int | None = None, limits: Limits | None = None
    ) -> TextCodec:
        """Read a model directory's tokenizer, which may be absent. Raises CheckpointError: If a
        file can't be used, or hits a limit on an ordinary text. MissingExtraError: If the package
        ``tokenizers`` isn't installed."""
        files = TokenizerFiles.read(model_dir)
        path = files.path
        if path is None:
            return cls(None)
        memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_FILE_BYTE * path.stat().st_size
        limits = limits or Limits(memory_bytes, cpu_s=ENCODE_CPU_S, open_cpu_s=LOAD_CPU_S)
        given = {"path": str(path.resolve()), "added": list(files.added)}
        # The child has loaded it, and decoded each of its tokens, before it is loaded here.
        encoder = LimitedChild("tokenizer", given, limits)
        try:
            encoder.open()
        except ChildFailedError as error:
            is_none = "is not a tokenizer that the package tokenizers can read"
            what = is_none if error.refused else "can't be loaded and encode an ordinary text"
            remedy = "fetch the file again, or remove it to serve token ids only"
            raise CheckpointError(f"{path} {what} ({error}): {remedy}") from None
        tokenizer, eos = files.load(), files.names.get("eos_token")
        eos_token_id = None if eos is None else tokenizer.token_to_id(eos)
        return cls(tokenizer, encoder, eos_token_id, max_model_len)

    def vocabulary_of(self, params: SamplingParams) -> Vocabulary | None:
        """Return the vocabulary for a request's answers, or None without a tokenizer."""
        return self.vocabulary if params.skip_special_tokens else self.whole

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {} if self.vocabulary is None else self.vocabulary.special_tokens

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, names of special ones too."""
        return "" if self.whole is None else self.whole.text(token_ids[-_NUM_END:])

    def close(self) -> None:
        """End the process that encodes. Safe to call twice."""
        if self._encoder is not None:
            self._encoder.close()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a prompt's token ids. Raises RequestError: (code ``no_tokenizer``) If there is no
        tokenizer. (``invalid_prompt``) If the text can't be encoded within the limits.
        (``prompt_too_long``) If its beginning alone is too long for the model. (``child_died``) If
        the child was ended from outside."""
        if self._encoder is None:
            raise no_tokenizer("the prompt is text", "give prompt_token_ids, or ")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            where = f"half a surrogate pair at character {error.start}"
            why = f"the prompt holds {where}, which is no text: write the whole character"
            raise RequestError(why, code="invalid_prompt") from None
        limit = self._max_model_len
        if limit is not None and num_bytes > limit * MAX_BYTES_PER_TOKEN:
            start = text[: limit * MAX_BYTES_PER_TOKEN // 4]
            num_tokens = len(_encoded(self._encoder, start, add_special_tokens=False))
            if num_tokens > 2 * limit:  # a cut changes the tokens beside it, not half of them
                raise RequestError(
                    f"the prompt is too long: this model's maximum context length is {limit} "
                    f"tokens, and the first {len(start)} of the prompt's {len(text)} characters "
                    f"have {num_tokens}: shorten the prompt",
                    code="prompt_too_long",
                )
        return _encoded(self._encoder, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens at once, without special ones."""
        return "" if self.vocabulary is None else self.vocabulary.text(token_ids)

    def sequence_text(
        self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> SequenceText:
        """Return a sequence's text. Raises RequestError: If its stop strings need a tokenizer."""
        vocabulary = self.vocabulary_of(params)
        if params.detokenize and params.stop and vocabulary is None:
            raise no_tokenizer("stop strings need text", "use stop_token_ids, or ")
        if not params.detokenize or vocabulary is None:
            return SequenceText(Detokenizer())
        specials = vocabulary.special_tokens if params.skip_special_tokens else {}
        reasoning = None
        if params.reasoning_marks is not None and params.stop:
            begin, end = params.reasoning_marks
            family = ReasoningFormat("", begin, end, state=None if begin else "inside")
            state = family.prompt_state(self.prompt_end(prompt_token_ids))
            reasoning = None if state == "after" else ReasoningSplitter(family, state)
        return SequenceText(
            detokenizer_for(vocabulary, prompt_token_ids),
            params.stop,
            params.min_tokens,
            # The name of a special token that is skipped never appears in a text.
            {specials[stop]: stop for stop in params.stop if stop in specials},
            keeps_stop=params.include_stop_str_in_output,
            reasoning=reasoning,
        )


def no_tokenizer(why: str, remedy: str = "") -> RequestError:
    what = "but the model directory has no tokenizer.json"
    add = "add the model's tokenizer.json"
    return RequestError(f"{why}, {what}: {remedy}{add}", code="no_tokenizer")


def _encoded(encoder: LimitedChild, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return list(encoder.ask({"sequence": text, "add_special_tokens": add_special_tokens}))
    except ChildDiedError as error:
        raise error.as_request_error() from None
    except ChildFailedError as error:
        why = f"the tokenizer can't encode the prompt: {error}; give prompt_token_ids"
        raise RequestError(why, code="invalid_prompt") from None


@dataclass(eq=False)
class SequenceText:
    """The text that one sequence has generated, and whether it has a stop string. A token that ends
    the sequence by its id (EOS, ``stop_token_ids``) goes to ``append_last``."""

    detokenizer: Detokenizer
    stop: Sequence[str] = ()  # the text ends before the first of these to appear
    min_tokens: int = 0
    """A stop string that is complete before this many tokens doesn't count."""
    stop_ids: Mapping[int, str] = field(default_factory=dict)
    """Tokens without text, and the stop string that names each."""
    _: KW_ONLY
    keeps_stop: bool = False
    """The text has the stop string that ended it, and what ``append_last`` adds."""
    reasoning: ReasoningSplitter | None = None
    """Finds the reasoning, in which no stop string counts. None after its end."""
    stopped_by: str | None = None  # the stop string that ended the text
    _undecided: str = ""  # text that may become the mark of reasoning
    _num_tokens: int = 0
    _pieces: list[str] = field(default_factory=list)
    _tail: str = ""  # the text's end, in which a stop string may have begun
    _num_peeked: int = 0
    """Characters of the text that is held back that earlier tokens have been judged by."""
    _is_over: bool = False
    # Of the text that was taken:
    _num_seen: int = 0  # pieces looked at
    _num_taken: int = 0  # characters given
    _untaken: str = ""  # looked at, and not given

    def __post_init__(self) -> None:
        self._max_tail = max(map(len, self.stop), default=1) - 1
        self._begun = [0] * len(self.stop)  # characters at the text's end that begin each one

    @property
    def text(self) -> str:
        """The text that is final so far; all of it after ``finish`` or after a stop string."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> bool:
        """Take one more token. Return True if it completed a stop string: the text is then over.
        Of several stop strings that one token completes, the one that begins first counts."""
        assert not self._is_over, "no token follows the end of a text"
        self._num_tokens += 1
        is_thinking = self.reasoning is not None and self.reasoning.state != "before"
        is_stop = token_id in self.stop_ids and self._num_tokens >= self.min_tokens
        if is_stop and not is_thinking:
            self.finish()
            self.stopped_by = self.stop_ids[token_id]
            if self.keeps_stop:
                self._pieces.append(self.stopped_by)
            return True
        if self._add(self.detokenizer.append(token_id)):
            return True
        if self.reasoning is not None or not self.stop:
            return False
        # A stop string may be complete in text that later bytes might spoil.
        held = self.detokenizer.peek()
        if not held:
            return False
        if self._find(held) is not None:
            return self._add(self.detokenizer.flush())
        self._num_peeked = len(held)
        return False

    def append_last(self, token_id: int) -> None:
        """Take the token whose id ends the sequence: its text counts if stops are kept."""
        if self.keeps_stop:
            self.append(token_id)

    def take(self) -> str:
        """Return what is new of the text, but for an end that may become a stop string. Nothing
        that was taken is cut off later."""
        fresh = "".join(self._pieces[self._num_seen :])
        untaken = self._untaken + fresh
        self._num_seen, num_safe = len(self._pieces), len(untaken)
        if self.stop and not (self._is_over or self.keeps_stop):
            for i, stop in enumerate(self.stop):
                # An end that begins a stop string grows by no more than what is fresh.
                end = untaken[len(self._untaken) - self._begun[i] :]
                self._begun[i] = num_begun(end, stop)
            num_safe -= max(self._begun)
        self._num_taken += num_safe
        self._untaken = untaken[num_safe:]
        return untaken[:num_safe]

    def finish(self) -> str:
        """Return the whole text, with what was held back: no token follows."""
        if not self._is_over:
            self._add(self.detokenizer.flush())
            self.reasoning, undecided = None, self._undecided
            self._add(undecided)
            self._is_over = True
        return self.text

    def _past_reasoning(self, reasoning: ReasoningSplitter, piece: str) -> str:
        """Take the reasoning into the text. Return what stop strings count in."""
        held = self._undecided + piece
        reasoning.feed(piece)
        if reasoning.state == "before":
            self._undecided = held
            return ""
        self._undecided, end = "", len(held)
        if reasoning.state != "inside":
            self.reasoning = None
            end -= reasoning.num_fed - reasoning.num_chars
        self._pieces.append(held[:end])
        return held[end:]

    def _add(self, piece: str) -> bool:
        """Append to the text, or cut it at a stop string and return True."""
        if self.reasoning is not None:
            piece = self._past_reasoning(self.reasoning, piece)
        if not piece:
            return False
        found = self._find(piece) if self.stop else None
        self._num_peeked = 0
        if found is None:
            self._pieces.append(piece)
            if self._max_tail:
                self._tail = (self._tail + piece)[-self._max_tail :]
            return False
        if self.keeps_stop or found >= len(self._tail):
            self._pieces.append(piece[: found - len(self._tail)])
        else:
            # It began in earlier pieces: take that much of them back.
            self._pieces = [self.text[: found - len(self._tail)]]
            self._num_seen, self._untaken = 1, self._pieces[0][self._num_taken :]
        self._is_over = True
        return True

    def _find(self, piece: str) -> int | None:
        """Return where in tail + piece the text ends by a stop string that this token completes:
        where the first one begins, or where it ends if it is kept."""
        if self._num_tokens < self.min_tokens:
            return None
        text, seen = self._tail + piece, len(self._tail) + self._num_peeked
        places = [(text.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self.stop]
        found = [each for each in places if each[0] >= 0]
        if not found:
            return None
        place, stop = min(found, key=lambda each: (each[0], len(each[1])))
        self.stopped_by = stop
        return place + len(stop) if self.keeps_stop else place
