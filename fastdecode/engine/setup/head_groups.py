"""R-workers that have been reached, as a group that shares out the heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.heads.hub import HeadsHub
from fastdecode.engine.fleet.heads.replicas import replicate_heads
from fastdecode.engine.fleet.heads.resharing import Resharing
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.setup.workers import Reached
from fastdecode.wire.messages import Hello


def share_out_heads(workers: Reached) -> Reached:
    """R-workers that share the heads, in the place of those that each have
    their own sequences. The group is there; who of it isn't, its hub knows."""
    hub = HeadsHub(workers.hub, workers.absent)

    def close(lost: Collection[int], timeout_s: float) -> None:
        if lost:  # the engine may have given up waiting before anybody asked for whom
            hub.give_up_the_slowest()
        workers.close(hub.members.gone, timeout_s)

    return replace(
        workers,
        hub=hub,
        close=close,
        absent={},
        replacements=partial(_make_resharing, workers, hub),
        replicate=partial(replicate_heads, hub),
        group=workers.hub,
        group_lost=hub.members.gone,
        give_up_heads=hub.give_up_heads,
        shares=lambda: hub.shares,
    )


def _make_resharing(
    workers: Reached, hub: HeadsHub, hello: Hello, deadlines: Deadlines
) -> Resharing:
    places = workers.replacements and workers.replacements(hello, deadlines)
    assert places is None or isinstance(places, HubReplacements)
    return Resharing(hub, hello, deadlines, places)
