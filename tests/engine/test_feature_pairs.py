"""Every pair of features that the table allows: one engine with both, one R-worker of
which is lost, and its tokens are those of a plain run that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from feature_examples import EXAMPLES, pairs
from simulated_engines import (
    THREADED,
    DeviceLosses,
    Losses,
    SimulatedCluster,
    SpawnedLosses,
    ThreadLosses,
)
from trouble import Trouble, crash, give

pytest.importorskip("zmq")

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.config.features import CONTRADICTIONS, FEATURES, NOT_YET

NOT_RUN = {
    "tensor parallelism": "its S-workers are processes of an MPI job",
    "instance ranks": "instances are processes of an MPI job",
}
"""Features that one process cannot have, and why. ``tests/mpi`` runs them as jobs."""
MOST_NOT_RUN = 36
"""Pairs with one of these. Lower it where fewer are left out; a new feature is run."""
OF_A_SIDE = frozenset(("int4 KV", "hybrid KV"))
"""Tokens are those of the side that has a sequence: ``test_hybrid`` runs the pair."""
NOTHING_TO_LOSE = {
    "device KV": "the cache is on the S-worker's device",
    "swap": "the cache is on the S-worker's device, and in its host's memory",
    "host tier": "the cache is on the S-worker's device, and in its host's memory",
}
"""Features without R-workers, and why. With replicas, the device is lost."""
AFTER = 14
"""Layers that the R-worker, or the device, computes before it is lost: it decodes by then."""

SMALL: dict[str, dict[str, Any]] = {
    "host tier": {"cache_memory_gb": 0.001, "prefix_cache": "on"},
    "disk tier": {"cache_disk_gb": 0.001, "prefix_cache": "on"},
    "replicas on disk": {"cache_disk": "DIR", "cache_disk_gb": 0.001, "prefix_cache": "on"},
    "split sequences": {"split_tokens": 16},
    "load limit": {"load_limit": 700},
    "hybrid KV": {"device_kv_gb": 0.00006},
    "addresses": {"r_worker_addresses": tuple(f"tcp://127.0.0.1:{5600 + i}" for i in range(4))},
}
"""Values of options as small as the model, where the table's example has others."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.004, "block_size": 16, "r_workers": 3,
    "prefix_cache": "off", "prefill_chunk": 16, "device": "cpu",
}  # fmt: skip

Tokens = list[list[tuple[int, ...]]]


ALLOWED = [x for x in pairs() if not {frozenset(x)} & {*CONTRADICTIONS, *NOT_YET}]
PAIRS = [x for x in ALLOWED if not NOT_RUN.keys() & set(x) and set(x) != OF_A_SIDE]


def _kind_of_loss(pair: Collection[str]) -> type[Losses]:
    if NOTHING_TO_LOSE.keys() & set(pair):
        return DeviceLosses if "replicas" in pair else Losses  # nothing is lost
    return ThreadLosses if THREADED & set(pair) else SimulatedCluster


def _covering(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return every fifth pair, and more until each feature has met each kind of its losses."""
    chosen = list(pairs[::5])
    met = {(feature, _kind_of_loss(pair)) for pair in chosen for feature in pair}
    for least_new in (2, 1):
        for pair in pairs:
            new = {(feature, _kind_of_loss(pair)) for feature in pair} - met
            if len(new) >= least_new:
                chosen.append(pair)
                met |= new
    return chosen


def _options_of(pair: tuple[str, ...], directory: Path) -> dict[str, Any]:
    """The fewest options that turn all on, as small as the model."""
    options = dict(OPTIONS)
    for name in pair:
        example = {**EXAMPLES[name], **SMALL.get(name, {})}
        pp = max(options.get("pp", 1), example.get("pp", 1))
        options |= example | ({"pp": pp} if pp > 1 else {})
    if "cache_disk" in options:
        options["cache_disk"] = str(directory)
    if NOTHING_TO_LOSE.keys() & set(pair):
        for option in ("r_workers", "r_threads"):
            del options[option]
    if "addresses" in pair:
        for option in ("r_workers", "r_threads", "kv_memory_gb"):
            del options[option]  # each has memory and threads of its own
        for option in ("cache_disk", "cache_disk_gb"):
            options.pop(option, None)  # and a disk
    return options


def _asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled, several completions of one prompt, and two with one beginning.

    No draw is nearly tied: int4 rounds K and V, and where sums are added in another order the last
    bit may become a level."""
    first, *others = prompts((40, 3, 21, 33, 9, 14, 27), seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, seed=11, max_tokens=9, ignore_eos=True)
    forked = SamplingParams(temperature=0.8, seed=5, max_tokens=7, n=2, ignore_eos=True)
    asked = [first, first[:32] + others[0], *others]
    return asked, [greedy, greedy, sampled, greedy, forked, greedy, sampled, greedy]


def _tokens(llm: LLM) -> Tokens:
    outputs = llm.generate(*_asked())
    assert all(output.ok for output in outputs), outputs
    return [[each.token_ids for each in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama", num_key_value_heads=6))


@pytest.fixture(scope="module")
def plain(model: str) -> Callable[[dict[str, Any]], Tokens]:
    """What an engine with every feature off says, by the cache's dtype and, of int4, by where
    it is, since R-workers round products of whole numbers."""
    known: dict[tuple[str, str], Tokens] = {}

    def run(options: dict[str, Any]) -> Tokens:
        kv_dtype = options.get("kv_dtype", "auto")
        has_r = kv_dtype != "int4" or options.get("kv_placement", "r") == "r"
        side = "r" if has_r else "gpu"
        if (kv_dtype, side) not in known:
            alone = {"kv_dtype": kv_dtype, "kv_placement": side}
            alone |= {} if side == "r" else {"r_workers": 1, "r_threads": None}
            with LLM(model, **{**OPTIONS, **alone}) as llm:
                known[kv_dtype, side] = _tokens(llm)
        return known[kv_dtype, side]

    return run


@pytest.mark.parametrize(("one", "other"), PAIRS if TRIES_ALL else _covering(PAIRS))
def test_a_loss_changes_no_token(
    one: str,
    other: str,
    model: str,
    plain: Callable[[dict[str, Any]], Tokens],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options = _options_of((one, other), tmp_path)
    expected = plain(options)
    stage = 1 if {one, other} & {"stages", "swap"} else 0
    cluster: Losses
    kind = _kind_of_loss((one, other))
    if kind is DeviceLosses:
        cluster = DeviceLosses(monkeypatch, AFTER)
    elif kind is ThreadLosses:
        whose = f"s{stage}-r1" if stage else "r1"
        if {one, other} & {"instances", "prompt stages"}:
            cluster = SpawnedLosses(monkeypatch, f"d0-{whose}", AFTER, tmp_path)
        else:
            cluster = ThreadLosses(monkeypatch, whose, AFTER)
    elif kind is SimulatedCluster:
        has_disk = "replicas on disk" in (one, other)
        cluster = SimulatedCluster(monkeypatch, (stage, 1), AFTER, has_disk=has_disk)
    else:
        cluster = Losses()
    with LLM(model, **options) as llm:
        assert _tokens(llm) == expected
        assert bool(llm._running.num_r_workers) != (kind in (DeviceLosses, Losses))
    assert bool(cluster.num_lost) == (kind is not Losses)


WITH_SIDES_AND_HEADS = (
    "replicas", "standby", "prefix cache", "instances", "replicas on disk", "load limit",
    "addresses", "disk tier", "R-workers attend prompts",
)  # fmt: skip
"""``make test`` runs every third, of which each loses an R-worker in another way."""


@pytest.mark.parametrize("other", WITH_SIDES_AND_HEADS[:: 1 if TRIES_ALL else 3])
def test_a_loss_changes_no_token_of_a_device_beside_r_workers_that_share_heads(
    other: str,
    model: str,
    plain: Callable[[dict[str, Any]], Tokens],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The other R-workers share the heads anew; requests that fit nowhere else wait for that."""
    options = _options_of(("hybrid KV", "shared heads", other), tmp_path)
    expected = plain(options | {"kv_placement": "r"})
    cluster: Losses
    if THREADED & {other} or other == "replicas":  # simulated time passes only for who waits
        if other == "instances":
            cluster = SpawnedLosses(monkeypatch, "d0-r1", AFTER, tmp_path)
        else:
            cluster = ThreadLosses(monkeypatch, "r1", AFTER)
    else:
        has_disk = other == "replicas on disk"
        cluster = SimulatedCluster(monkeypatch, (0, 1), AFTER, has_disk=has_disk)
    with LLM(model, **options) as llm:
        assert _tokens(llm) == expected
    assert cluster.num_lost


def test_what_fits_on_lost_r_workers_alone_fails_when_none_is_left(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, {name: lambda: Trouble(AFTER, crash) for name in ("r0", "r1")})
    options = {**OPTIONS, "r_workers": 2, "kv_placement": "hybrid", "device_kv_gb": 0.00006}
    with LLM(model, **options, r_partition="heads") as llm:
        outputs = llm.generate(*_asked())
        assert any(output.ok for output in outputs), "the device is left"
        failed = [str(output.error) for output in outputs if not output.ok]
        assert failed and all("no R-worker that is left has room" in text for text in failed)


def test_every_feature_is_run_or_is_said_not_to_be() -> None:
    assert NOT_RUN.keys() <= FEATURES.keys()
    assert FEATURES.keys() >= NOTHING_TO_LOSE.keys() | THREADED
    assert len(ALLOWED) - len(PAIRS) <= MOST_NOT_RUN
    assert {name for pair in PAIRS for name in pair} | NOT_RUN.keys() == FEATURES.keys()
