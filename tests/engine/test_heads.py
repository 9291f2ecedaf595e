"""R-workers that share out the KV heads: the tokens of R-workers that each have
whole sequences, also after a loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import prompts
from trouble import Trouble, crash_after, give

from fastdecode import LLM, SamplingParams
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.fleet.heads.hub import HeadsHub, share_heads
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    Refused,
    ToRWorker,
    Welcome,
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)
SHAPES: dict[str, dict[str, Any]] = {
    # 5 KV heads: uneven among 2 and 3.
    "qwen3": {"num_attention_heads": 10, "num_key_value_heads": 5},
    "bloom": {},  # a slope for each head
    "gemma2": {},
}


def tokens(path: Path, **options: Any) -> tuple[list[list[tuple[int, ...]]], LLM]:
    """Everybody's tokens, and the closed LLM."""
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8}
    with LLM(str(path), **shared, **options) as llm:
        outputs = llm.generate(
            prompts([3, 30, 11, 1, 19, 8, 5], seed=2), [GREEDY] * 5 + [FORKED] * 2
        )
        return [[c.token_ids for c in output.completions] for output in outputs], llm


@cache
def whole(path: Path) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens from one R-worker that has all heads."""
    return tokens(path)[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"r_workers": 2}, "greeting 2 R-worker(s): R-worker r0, R-worker r1"),
        (
            {"r_workers": 2, "r_partition": "heads"},
            "greeting 2 R-worker(s): R-worker r0, R-worker r1",
        ),
        ({"kv_placement": "gpu"}, "no R-workers: the KV cache on cpu"),
    ],
)
def test_who_is_greeted(
    options: dict[str, Any], line: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    told: list[str] = []
    LLM(str(tiny_checkpoint("llama")), kv_memory_gb=0.01, progress=told.append, **options).close()
    assert told[1:] == [line]


@pytest.mark.parametrize(
    ("family", "num_workers"),
    [("qwen3", 1), ("qwen3", 2), ("qwen3", 3), ("bloom", 3), ("gemma2", 2)],
)
def test_tokens_are_those_of_whole_sequences(
    family: str, num_workers: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family, **SHAPES[family])
    expected = whole(path)
    assert tokens(path, r_workers=num_workers, r_partition="heads", lanes=2)[0] == expected


@pytest.mark.parametrize("crashes", [{"r1": 0}, {"r1": 33, "r2": 90}])
def test_those_that_are_left_share_the_heads_anew(
    crashes: dict[str, int], tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPES["qwen3"])
    expected = whole(path)
    crash_after(monkeypatch, crashes)
    found, llm = tokens(path, r_workers=3, r_partition="heads", lanes=2)
    assert found == expected
    assert llm.snapshot().engine.num_live_r_workers == 3 - len(crashes)
    assert llm.stats.num_recomputed > 0


def test_one_that_hangs_is_given_up(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPES["qwen3"])
    expected = whole(path)
    woken = threading.Event()

    def hang() -> None:
        assert woken.wait(60)

    give(monkeypatch, {"r1": lambda: Trouble(13, hang)})
    try:
        found, llm = tokens(path, r_workers=3, r_partition="heads", worker_timeout_s=3.0)
    finally:
        woken.set()
    assert found == expected
    assert (
        llm.snapshot().engine.num_live_r_workers == 2 and llm.snapshot().engine.has_hung_r_workers
    )


def test_when_all_are_lost_every_request_says_so(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_after(monkeypatch, {"r0": 20, "r1": 20})
    options = {
        "dtype": "float32",
        "r_threads": 1,
        "kv_memory_gb": 0.01,
        "r_workers": 2,
        "r_partition": "heads",
    }
    with LLM(str(tiny_checkpoint("qwen3", **SHAPES["qwen3"])), **options) as llm:
        (output,) = llm.generate(prompts([4]), GREEDY)
    assert isinstance(output.error, WorkerError) and "no more memory" in str(output.error)


def test_more_r_workers_than_heads_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="can't share 1 KV heads"):
        LLM(str(tiny_checkpoint("mistral")), r_workers=2, r_partition="heads", kv_memory_gb=0.01)


def test_shares_are_even_and_cover_all_heads() -> None:
    shares = share_heads(20, 10, 4)
    assert [s.kv for s in shares] == [slice(0, 2), slice(2, 5), slice(5, 7), slice(7, 10)]
    assert [s.q for s in shares] == [slice(0, 4), slice(4, 10), slice(10, 14), slice(14, 20)]
    spec = AttentionSpec(20, 10, 8, 1.0, alibi_slopes=tuple(np.arange(20.0)))
    assert [s.of(spec).alibi_slopes for s in shares][1] == (4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


def test_a_sequence_that_one_refuses_is_closed_on_the_others() -> None:
    parts: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [connect(parts, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1] for i in range(2)]
    hub = HeadsHub(parts)
    hub.begin(dict(enumerate(share_heads(4, 2, 2))))
    hub.send(OpenSequence(7, 100))
    refused = Refused(7, "out_of_capacity", "full")
    peers[0].send(Accepted(7))
    assert hub.poll() is None
    peers[1].send(refused)
    assert hub.receive_any(5.0) == (0, refused)
    assert [peer.poll() for peer in peers] == [OpenSequence(7, 100)] * 2
    assert [peer.poll() for peer in peers] == [CloseSequence(7), None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Accepted(8), "answered OpenSequence for sequence_id=8, where 7 was due"),
        (Welcome("r1", 20, 16, 1), "sent Welcome, which nobody asked for"),
    ],
)
def test_an_answer_to_something_else_is_one_members_alone(answer: FromRWorker, reason: str) -> None:
    parts: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [connect(parts, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1] for i in range(3)]
    hub = HeadsHub(parts)
    hub.begin(dict(enumerate(share_heads(6, 3, 3))))
    hub.send(OpenSequence(7, 100))
    for peer, said in zip(peers, (Accepted(7), answer, Accepted(7)), strict=True):
        peer.send(said)
    with pytest.raises(WorkerError, match=f"r1 {reason}"):
        hub.receive_any(5.0)
    assert list(hub.members.gone) == [1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"o": np.zeros((2, 2, 8), np.uint16)}, "answered o of uint16, where float32 was agreed"),
        ({"o": np.zeros((2, 3, 8), np.float32)}, r"answered o of shape \(2, 3, 8\), not"),
        ({"o": np.zeros((2, 2, 7), np.float32)}, r"answered o of shape \(2, 2, 7\), not"),
        ({"o": np.zeros((1, 2, 8), np.float32)}, r"answered o of shape \(1, 2, 8\), not"),
        ({"lse": None}, r"answered lse of shape None, where \(2, 2\) was asked"),
        ({"lse": np.zeros((2, 3), np.float32)}, r"answered lse of shape \(2, 3\), where"),
        ({"layer": 1}, "answered Attend for layer=1, where 0 was due"),
        ({"step": 8}, "answered Attend for step=8, where 9 was due"),
    ],
)
def test_arrays_that_nobody_asked_for_are_one_members_alone(
    changes: dict[str, Any], reason: str
) -> None:
    parts: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [connect(parts, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1] for i in range(3)]
    hub = HeadsHub(parts)
    hub.begin(dict(enumerate(share_heads(6, 3, 3))))
    one = np.ones(1, np.int64)
    two = np.full(1, 2, np.int32)
    hub.send(BeginStep(9, 1, one, 0 * two, two, two, two, want_lse=True))
    q, kv = (np.zeros((2, heads, 8), np.float32) for heads in (6, 3))
    hub.send(Attend(9, 1, 0, q, kv, kv))
    honest = AttendResult(9, 1, 0, q[:, :2], np.zeros((2, 2), np.float32), 0.1)
    for peer, said in zip(peers, (honest, replace(honest, **changes), honest), strict=True):
        peer.send(said)
    with pytest.raises(WorkerError, match=f"r1 {reason}"):
        hub.receive_any(5.0)
    assert list(hub.members.gone) == [1]


def test_who_is_greeted_twice_is_heard_once() -> None:
    """Another one is lost while the heads are shared anew: what comes of the
    first greeting isn't for the second."""
    parts: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [connect(parts, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1] for i in range(2)]
    hub = HeadsHub(parts)
    kv, spec = KVSpec(1, 2, 16, DType.FLOAT32, 16), AttentionSpec(4, 2, 16, 1.0)
    hello = Hello(PROTOCOL_VERSION, "model", kv, (spec,), DType.FLOAT32)
    hub.begin(dict(enumerate(share_heads(4, 2, 2))))
    hub.send(OpenSequence(7, 100))
    hub.send(hello)
    peers[1].close()
    with pytest.raises(WorkerError):
        hub.receive_any(5.0)
    hub.send(hello)
    peers[0].send(Accepted(7))
    peers[0].send(Welcome("r0", 20, 16, 1))
    assert hub.poll() is None
    peers[0].send(Welcome("r0", 10, 16, 1))
    assert hub.receive_any(5.0) == (0, Welcome("r0", 10, 16, 1))
    hub.send(OpenSequence(8, 100))
    peers[0].send(Accepted(8))
    assert hub.receive_any(5.0) == (0, Accepted(8))
