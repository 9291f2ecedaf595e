"""Any requests, and what they say, for tests of how they travel."""

from __future__ import annotations

from hypothesis import strategies as st

from fastdecode.core.delta import Delta
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import CacheUse, Request, SamplingParams, TokenLogprob

TOKENS = st.lists(st.integers(0, 1 << 30), max_size=5).map(tuple)
TEXTS = st.text(max_size=20)
FLOATS = st.floats(-1e9, 0)
SOURCES = st.builds(
    KVSource,
    TEXTS.filter(str.isprintable),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 20),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 9),
    st.booleans(),
)
LOGPROBS = st.builds(
    TokenLogprob,
    st.integers(0, 99),
    FLOATS,
    st.lists(st.tuples(st.integers(0, 9), FLOATS)).map(tuple),
)
REQUESTS = st.builds(
    Request,
    TEXTS,
    TOKENS,
    st.builds(
        SamplingParams,
        n=st.integers(1, 9),
        seed=st.none() | st.integers(0, 1 << 63),
        stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
        temperature=st.floats(0, 2),
        allowed_token_ids=st.none() | TOKENS.filter(bool),
        bad_words=st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
    ),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 63),
    st.builds(CacheUse, st.booleans(), TEXTS, st.none() | st.integers(0, 9)),
    st.dictionaries(st.integers(0, 9), TOKENS, max_size=2),
    st.lists(SOURCES, max_size=2).map(tuple),
    st.booleans(),
    st.lists(TOKENS.filter(bool), max_size=2).map(tuple),
)
DELTAS = st.builds(
    Delta,
    TEXTS,
    st.integers(0, 9),
    TEXTS,
    TOKENS,
    st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    st.sampled_from([None, "stop", "length"]),
    st.none(),
    st.integers(0, 9),
    st.lists(SOURCES, max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
)
