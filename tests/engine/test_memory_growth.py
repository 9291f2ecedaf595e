"""Memory doesn't grow with steps, on any device: staging, lanes' fixed memory,
what sequences leave behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import prompts
from trouble import crash_after

from examples import examples
from fastdecode import LLM, SamplingParams
from fastdecode.engine.setup import resolve, s_worker
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model


def live_tensor_bytes() -> int:
    """Of all tensors that can be reached from Python, views counted once;
    packed weights show no storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_mkldnn]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def test_later_steps_take_no_more_than_the_first(tiny_checkpoint: Callable[..., Path]) -> None:
    path = str(tiny_checkpoint("llama", num_hidden_layers=1))
    asked = prompts((20, 33, 7), seed=1)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in (180, 90, 40)
    ]
    with (
        # Units in fixed memory, not captured.
        mock.patch.object(resolve, "uses_graphs", return_value=True),
        mock.patch.object(
            s_worker,
            "StepGraphs",
            lambda model, device, **_: StepGraphs(model, device, capture=False),
        ),
        LLM(
            path,
            lanes=2,
            r_threads=1,
            kv_memory_gb=0.01,
            prefill_chunk=9,
            dtype="float32",
            prompt_attention="s",
        ) as llm,
    ):
        llm.generate(asked, params)
        engine = llm._running.engine
        first, first_steps = live_tensor_bytes(), llm.stats.num_steps
        while llm.stats.num_steps < first_steps + examples(2000):
            llm.generate(asked, params)
        assert live_tensor_bytes() <= first
        assert not engine.requests and not engine.num_unfinished_sequences
        assert not engine._lifecycle.sequences.by_sequence and not engine._lifecycle.grants.asked


@pytest.mark.parametrize(
    "crashes", [{}, {"r1": 7}, {"r0": 7, "r1": 7}], ids=["none lost", "one lost", "all lost"]
)
def test_a_closed_engine_leaves_no_weights(
    crashes: dict[str, int], monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Without the garbage collector, which may come after the next engine was refused for want of
    memory; also while somebody keeps the outputs, and the errors that they carry."""
    crash_after(monkeypatch, crashes)
    path = str(tiny_checkpoint("llama", num_hidden_layers=1))
    layers: list[weakref.ref[object]] = []

    def load(*args: Any, **options: Any) -> Any:
        spec, model = load_model(*args, **options)
        layers.append(weakref.ref(model.layers[0]))
        return spec, model

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(s_worker, "load_model", load):
            llm = LLM(path, r_workers=2, r_threads=1, kv_memory_gb=0.01, dtype="float32")
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate([*prompts((5, 9, 3), seed=1), []], params)
        assert llm.snapshot().engine.num_live_r_workers == 2 - len(crashes)
        assert sum(output.ok for output in outputs) == (0 if len(crashes) == 2 else 3)
        llm.close()
        assert layers[0]() is not None
        del llm
        assert layers[0]() is None
    finally:
        gc.enable()


OPTIONS = {"r_threads": 1, "kv_memory_gb": 0.01}


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """As in a process that only has an engine (see ``pytest_collection_finish``)."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("nothing_is_frozen")
def test_an_open_engine_is_left_out_of_collections(llama: str) -> None:
    garbage = weakref.ref(Node())
    with LLM(llama, **OPTIONS) as llm:
        assert garbage() is None, "what was garbage before isn't kept"
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
        assert llm.generate([[3, 4]], SamplingParams(max_tokens=2))[0].ok
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    assert gc.get_freeze_count() == 0, "a closed engine may be collected"


@pytest.mark.usefixtures("nothing_is_frozen")
def test_objects_that_others_froze_stay_frozen(llama: str) -> None:
    """The application's, and those of an engine that is still open."""
    with LLM(llama, **OPTIONS):
        frozen = gc.get_freeze_count()
        with LLM(llama, **OPTIONS):
            pass
        assert 10_000 < gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() == 0
