"""From what was configured to a replanner that looks now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from cost_model.goodput.replanning import TrafficWatch, WatchRules
from cost_model.goodput.slo import Slo
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import Instances
from fastdecode.engine.instances.controller import Controller
from fastdecode.engine.replanning.replanner import Replanner, Ticking

ATTAINMENT: Final = 0.9  # share of requests that are to keep the limits
Post = Callable[[Callable[[Any], None]], None]
"""Has something done by the thread that owns the controller."""


def slo_of(wanted: Instances) -> Slo:
    """What requests are to keep. Raises ConfigError: it is none."""
    assert wanted.replan_slo is not None
    return Slo.parse(wanted.replan_slo, ATTAINMENT, option="replan_slo")


def start_replanning(
    config: EngineConfig,
    controller: Controller,
    token_bytes: int,
    tell: Callable[[str], None],
    post: Post,
) -> contextlib.ExitStack:
    """Have roles looked at, if that is wanted. Close what it returns to end that.

    Args:
        controller: gets the replanner as its observer.
        token_bytes: K and V of a token, all layers.
    """
    stack, wanted = contextlib.ExitStack(), config.instances
    if wanted.replan_slo is None:
        return stack
    replanner = Replanner(
        controller,
        TrafficWatch(slo_of(wanted), WatchRules(), time.monotonic()),
        batch_tokens=controller.router.dispatcher.prefill[0].batch_tokens,
        token_bytes=token_bytes,
        tell=tell,
        clock=time.monotonic,
    )
    controller.observer = replanner
    stack.callback(replanner.close)
    ticking = Ticking(lambda: post(lambda running: replanner.look()))
    ticking.start()
    stack.callback(ticking.close)
    return stack
