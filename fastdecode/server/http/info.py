"""Routes that tell how the server is: models, health, version, metrics, status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib import resources
from typing import Any

from fastdecode import __version__
from fastdecode.server.front import Front
from fastdecode.server.http.errors import HttpRefusal
from fastdecode.server.http.exchange import Exchange
from fastdecode.server.messages import StatusReport
from fastdecode.server.metrics import CONTENT_TYPE, exposition

PAGE: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


async def models(front: Front, exchange: Exchange) -> None:
    """All names that the model goes by."""
    every = [_model(front, name) for name in front.names]
    await exchange.answer_json({"object": "list", "data": every})


async def model(front: Front, exchange: Exchange) -> None:
    """One of them."""
    name = exchange.scope["path_params"]["model"]
    if name not in front.names:
        raise HttpRefusal(404, f"the model {name[:256]!r} isn't served here", "model_not_found")
    await exchange.answer_json(_model(front, name))


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.started_s,
        "owned_by": "fastdecode",
        "root": front.opening.model,
        "parent": None,
        "max_model_len": front.opening.max_model_len,
    }


async def version(front: Front, exchange: Exchange) -> None:
    """The program's."""
    await exchange.answer_json({"version": __version__})


async def live(front: Front, exchange: Exchange) -> None:
    """This process answers; that says nothing of the engine."""
    await exchange.answer_json({"status": "ok"})


async def health(front: Front, exchange: Exchange) -> None:
    """200 only if a token could come out."""
    trouble, seen = front.trouble(), front.outlook.seen
    body: dict[str, Any] = {"status": "ok" if trouble is None else "unavailable"}
    if trouble is not None:
        body["reason"] = trouble
    elif seen is not None and seen.num_live_r_workers < seen.num_r_workers:
        body["degraded"] = f"{seen.num_live_r_workers} of {seen.num_r_workers} R-workers are there"
    await exchange.answer_json(body, 200 if trouble is None else 503, cache_control="no-store")


async def metrics(front: Front, exchange: Exchange) -> None:
    """Prometheus's text."""
    labels = {"model_name": front.names[0], "engine": "0"}
    text = exposition(front.observations.families(front.outlook.seen), labels)
    await exchange.answer(text.encode(), CONTENT_TYPE)


async def status(front: Front, exchange: Exchange) -> None:
    """What the status page shows."""
    await exchange.answer_json(_status(front), cache_control="no-store")


async def history(front: Front, exchange: Exchange) -> None:
    """How the server was in the last ten minutes."""
    columns = front.observations.history.columns(time.monotonic())
    await exchange.answer_json(columns, cache_control="no-store")


def _status(front: Front) -> dict[str, Any]:
    seen, observed, now_s = front.outlook.seen, front.observations, time.monotonic()
    return {
        "model": front.names[0],
        "version": __version__,
        "state": front.trouble() or "ready",
        "time_s": now_s,
        "uptime_s": now_s - front.began_s,
        "num_tasks": len(asyncio.all_tasks()),
        "num_open": front.client.num_open,
        "num_queued": front.admission.num_requests,
        **(seen or StatusReport()).fields,
        "generation_tokens": observed.generation_tokens.total,
        "num_succeeded": observed.succeeded.total,
        "num_failed": observed.ended.of("error"),
        "num_aborted": observed.ended.of("abort"),
        "num_rejected": observed.rejected.total,
        "prompt_tokens": observed.prompt_tokens.total,
        "cached_tokens": observed.cached_tokens.total,
        "ttft_s": observed.lately_ttft.quantiles(now_s, 0.5, 0.99),
        "tpot_s": observed.lately_tpot.quantiles(now_s, 0.5, 0.99),
    }


async def page(front: Front, exchange: Exchange) -> None:
    """The status page's files."""
    name, kind = PAGE[exchange.scope["path"]]
    content = resources.files(f"{__package__}.page").joinpath(name).read_bytes()
    await exchange.answer(content, kind, headers={"cache-control": "no-cache"})
