"""The functions that a plain decode step, or the loss of an R-worker, enters."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trouble import Trouble, crash, give

from fastdecode import LLM, SamplingParams
from fastdecode.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fastdecode", "rworker", "sworker", "cpu_kernels", "cost_model")
STEP = 12  # prompts are over by then, and no request has ended
PROMPTS = ["Once upon a time", "The old map showed", "On a stormy night"]
LAYERS_BEFORE_LOSS = 40
"""Layers that an R-worker attends before it crashes. All sequences decode by then."""


class Entered:
    """Calls of the product's functions in all threads: their order, and their number in a step."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()  # while the watched step ran
        self.is_counting = False
        self.is_listening = False
        self._order: dict[tuple[str, str], int] = {}
        self._order_in_step: dict[tuple[str, str], int] = {}

    def listen(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function, for ``threading.setprofile``."""
        if event != "call" or not self.is_listening:
            return
        code = frame.f_code
        called = _file(code), code.co_qualname
        self._order.setdefault(called, len(self._order))
        if self.is_counting:
            self._order_in_step.setdefault(called, len(self._order_in_step))
            self.calls[code] += 1

    def first_call(self, file: str, function: str, *, in_step: bool) -> int:
        """Return a function's place in the order of first calls, in the run or in the step."""
        order = self._order_in_step if in_step else self._order
        assert (file, function) in order, f"{function} of {file} was not entered"
        return order[file, function]

    @contextlib.contextmanager
    def profiling(self) -> Iterator[None]:
        """Profile every thread that starts inside the context."""
        threading.setprofile(self.listen)
        sys.setprofile(self.listen)
        try:
            yield
        finally:
            threading.setprofile(None)
            sys.setprofile(None)

    @property
    def functions(self) -> dict[tuple[str, str], int]:
        """(file, qualified name) of those that the step entered, and their lines."""
        return {
            (_file(code), code.co_qualname): _num_lines(code)
            for code in self.calls
            if _file(code).split("/")[0] in PACKAGES
        }


@cache
def _file(code: CodeType) -> str:
    """Relative to the repository; a bare name outside of it."""
    path = Path(code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _num_lines(code: CodeType) -> int:
    """From its first line to its last, functions inside it included."""
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return max(lines) - code.co_firstlineno + 1 if lines else 1


def entered_by_a_decode_step(model: str, monkeypatch: Any, **options: Any) -> Entered:
    """Run three requests and record one step that only decodes."""
    entered, number = Entered(), 0
    step = Engine.step

    def counted(engine: Engine, *arguments: Any, **named: Any) -> Any:
        nonlocal number
        number += 1
        entered.is_counting = number == STEP
        try:
            return step(engine, *arguments, **named)
        finally:
            entered.is_counting = False

    monkeypatch.setattr(Engine, "step", counted)
    with entered.profiling(), LLM(model, **options) as llm:
        gc.collect()  # what others have left runs no finalizers in the step
        entered.is_listening = True
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert number > STEP
    return entered


def entered_by_a_loss(model: str, monkeypatch: Any, *, is_lost: bool, **options: Any) -> Entered:
    """Run three requests and record the whole run. R-worker ``r1`` crashes if ``is_lost``.

    What a loss alone enters is the difference of the two runs. The one without records its start,
    too: replicas begin in the background, and may do so before or after the first request."""
    entered = Entered()
    entered.is_listening = entered.is_counting = not is_lost
    after = LAYERS_BEFORE_LOSS if is_lost else sys.maxsize
    lost: list[str] = []

    def lose() -> None:
        lost.append("r1")
        crash()

    give(monkeypatch, {"r1": lambda: Trouble(after, lose)})
    with entered.profiling(), LLM(model, **options) as llm:
        gc.collect()
        entered.is_listening = entered.is_counting = True
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        entered.is_listening = False
    assert bool(lost) == is_lost
    return entered
