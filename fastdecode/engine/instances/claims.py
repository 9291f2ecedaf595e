"""What an instance claims of a request that it runs, held against what it was
asked: nothing that can't be true is stored, or given to another instance."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.delta import Delta
from fastdecode.core.errors import ProtocolError
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request


@dataclass
class _Claim:
    """Of one sequence, so far."""

    num_tokens: int = 0
    num_logprobs: int = 0
    is_over: bool = False


class Claims:
    """Of one run of a request at one instance.

    Args:
        asked: what the instance was asked to run.
    """

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._claims: dict[int, _Claim] = {}
        self._has_offered = False
        self._has_fetched = False

    def add(self, delta: Delta, spec: ModelSpec) -> None:
        """Hold one more delta against what was asked, and keep count.

        Raises:
            ProtocolError: it can't be true.
        """
        if delta.index >= self._asked.params.n:
            raise _lie(f"sequence {delta.index} of {self._asked.params.n}")
        if delta.error is None:
            claim = self._claims.setdefault(delta.index, _Claim())
            self._add_tokens(claim, delta, spec.vocab_size)
            self._add_logprobs(claim, delta)
            self._check_prompt_logprobs(delta)
            self._add_end(claim, delta)
            self._add_hand_over(delta, spec)

    def check_offer(self) -> None:
        """All of a message has been added. Raises ProtocolError: a prompt is on
        offer of which a sequence has no token yet."""
        begun = sum(claim.num_tokens > 0 for claim in self._claims.values())
        if self._has_offered and begun < self._asked.params.n:
            raise _lie("a prompt is on offer before its first tokens are drawn")

    def _add_tokens(self, claim: _Claim, delta: Delta, vocab_size: int) -> None:
        first, end = claim.num_tokens, claim.num_tokens + len(delta.token_ids)
        if end > self._asked.max_tokens:
            raise _lie(f"{end} tokens, {self._asked.max_tokens} were asked for")
        if claim.is_over and (delta.token_ids or delta.text or delta.finish_reason):
            raise _lie("a sequence goes on after its end")
        if any(token >= vocab_size for token in delta.token_ids):
            raise _lie(f"a token beyond the vocabulary of {vocab_size}")
        known = self._asked.drawn.get(delta.index, ())[first:end]
        if delta.token_ids[: len(known)] != known:
            raise _lie("other tokens than the ones it was given")
        claim.num_tokens = end

    def _add_logprobs(self, claim: _Claim, delta: Delta) -> None:
        """One a token that was drawn there, where they were asked for."""
        logprobs = delta.logprobs or ()
        claim.num_logprobs += len(logprobs)
        num_drawn = claim.num_tokens - len(self._asked.drawn.get(delta.index, ()))
        is_asked = self._asked.params.logprobs is not None
        if claim.num_logprobs != (max(0, num_drawn) if is_asked else 0):
            raise _lie(f"{claim.num_logprobs} logprobs of {num_drawn} tokens")
        drawn = delta.token_ids[len(delta.token_ids) - len(logprobs) :]
        if any(step.token_id != token for step, token in zip(logprobs, drawn, strict=True)):
            raise _lie("logprobs of other tokens")

    def _check_prompt_logprobs(self, delta: Delta) -> None:
        if delta.prompt_logprobs is None:
            return
        prompt = self._asked.prompt_token_ids
        claimed = [None if step is None else step.token_id for step in delta.prompt_logprobs]
        if self._asked.params.prompt_logprobs is None or claimed != [None, *prompt[1:]]:
            raise _lie("logprobs of another prompt")

    def _add_end(self, claim: _Claim, delta: Delta) -> None:
        reason, params = delta.finish_reason, self._asked.params
        if reason is None:
            return
        claim.is_over = True
        is_parked = self._asked.hands_over  # at its last token, it waits to be fetched
        if reason == "length" and (claim.num_tokens < self._asked.max_tokens or is_parked):
            raise _lie(f"a sequence is as long as it may be, with {claim.num_tokens} tokens")
        may_stop = not params.ignore_eos or params.stop or params.stop_token_ids
        if reason == "stop" and (not may_stop or claim.num_tokens < max(1, params.min_tokens)):
            raise _lie("a sequence stops where it can't")
        known = len(self._asked.prompt_token_ids) + self._asked.max_tokens
        if delta.num_cached_tokens > known:
            raise _lie(f"{delta.num_cached_tokens} tokens were cached of a request of {known}")

    def _add_hand_over(self, delta: Delta, spec: ModelSpec) -> None:
        num_prompt = len(self._asked.prompt_token_ids)
        is_held = any(source.is_held for source in delta.sources)
        if is_held and (not self._asked.hands_over or self._has_offered):
            raise _lie("a prompt is on offer that isn't to be handed over")
        self._has_offered |= is_held
        most = num_prompt if is_held else num_prompt + self._asked.max_tokens
        for source in delta.sources:
            if source.end > most or source.is_held != is_held:
                raise _lie(f"more is on offer than {most} tokens")
            if source.first_head + source.num_heads > spec.num_kv_heads:
                raise _lie("more heads are on offer than the model has")
            if source.first_layer + source.num_layers > spec.num_layers:
                raise _lie("layers are on offer that the model does not have")
        if delta.has_fetched:
            if not self._asked.sources or self._has_fetched:
                raise _lie("a prompt is fetched that wasn't on offer")
            self._has_fetched = True


def _lie(what: str) -> ProtocolError:
    return ProtocolError(f"says of a request what can't be: {what}")
