"""What a row of logits gave, as the host is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import TokenLogprob
from sworker.sampling.sampling_state import SamplingState

NON_FINITE = "non_finite_logits"
"""The error code of a row that holds NaN or Inf."""


@dataclass(frozen=True)
class SampledToken:
    """What one row gave: a token, or the error that this row alone met."""

    token_id: int
    """-1 if there is an error."""
    logprob: TokenLogprob | None = None
    """None unless the request asked for logprobs."""
    error: RequestError | None = None


def sampled_token(
    state: SamplingState, token: int, greatest: float, logprobs: list[float] | None
) -> SampledToken:
    """Of one row.

    Args:
        greatest: of its logits; not finite if there is nothing to draw from.
        logprobs: the token's, its rank, then ids of the likeliest, then theirs;
            None: the request doesn't ask for them.
    """
    if state.failure is not None:
        return SampledToken(-1, error=state.failure)
    if not math.isfinite(greatest):
        return SampledToken(-1, error=_row_error(greatest, state.num_generated))
    if logprobs is None:
        return SampledToken(token)
    count = (len(logprobs) - 2) // 2
    wanted = min(count, state.params.logprobs or 0)
    ids, values = logprobs[2 : 2 + wanted], logprobs[2 + count : 2 + count + wanted]
    # A masked token isn't likely, however few others there are.
    top = tuple((int(i), value) for i, value in zip(ids, values, strict=True) if value > -math.inf)
    return SampledToken(token, TokenLogprob(token, logprobs[0], top, int(logprobs[1])))


def _row_error(greatest: float, num_generated: int) -> RequestError:
    if greatest == -math.inf:
        return RequestError(
            f"after {num_generated} generated tokens every token is masked: min_tokens, "
            "allowed_token_ids, bad_words and structured_outputs together forbid all that the "
            "model could say; lower min_tokens, allow more tokens, or give fewer stop_token_ids "
            "or bad_words",
            code="no_token_left",
        )
    return RequestError(
        f"the model's logits hold NaN or Inf after {num_generated} generated tokens: the weights "
        "are damaged or overflow their dtype; try dtype float32 or bfloat16",
        code=NON_FINITE,
    )
