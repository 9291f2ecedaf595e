"""Run a load, and search for the greatest rate that keeps an SLO."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastdecode.measure.serving.client import Endpoint, Record
from fastdecode.measure.serving.load import Planned

_MAX_DOUBLINGS = 12
_HALVINGS = 5


async def run_open(endpoint: Endpoint, model: str, load: Sequence[Planned]) -> list[Record]:
    """Send every request when it is due, without waiting for answers."""
    async with endpoint.keeping_connections():
        start_s = time.monotonic()
        tasks = []
        for planned in load:
            wait_s = planned.due_s - (time.monotonic() - start_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(endpoint.run(planned, model, start_s)))
        return list(await asyncio.gather(*tasks))


async def run_closed(
    endpoint: Endpoint, model: str, load: Sequence[Planned], concurrency: int
) -> list[Record]:
    """Run ``concurrency`` clients, each of which sends the next request after its answer."""
    start_s = time.monotonic()
    records: list[Record] = []
    waiting = iter(load)

    async def client() -> None:
        for planned in waiting:
            record = await endpoint.run(planned, model, start_s)
            record.due_s = record.sent_s
            records.append(record)

    async with endpoint.keeping_connections():
        await asyncio.gather(*[client() for _ in range(concurrency)])
    return records


def find_goodput(
    measure: Callable[[float], dict[str, Any]],
    measure_alone: Callable[[], dict[str, Any]],
    first_rate: float,
    attainment: float,
    tell: Callable[[str], None],
) -> tuple[float, dict[str, Any] | None]:
    """Find the greatest rate, within 3%, at which ``attainment`` of the requests keep the SLO.

    Args:
        measure: Returns the figures at a rate.
        measure_alone: Returns the figures of requests that run one after the other. Called once,
            if the first rate is too great: if those don't keep the SLO, no rate does, and a
            search at ever lower ones would take hours.

    Returns:
        The rate, or 0 if there is none. The figures at it, or those of ``measure_alone`` if not
        even they keep the SLO.
    """
    best, figures = 0.0, None
    bad: float | None = None
    rate = first_rate
    for _ in range(_MAX_DOUBLINGS + _HALVINGS):
        now = measure(rate)
        is_good = now["attainment"] >= attainment
        tell(f"{rate:.3g} requests/s: {now['attainment']:.1%} kept the SLO")
        if is_good:
            best, figures = rate, now
            if now["client_was_the_limit"]:
                break
        else:
            if bad is None and not best:
                alone = measure_alone()
                tell(f"one request at a time: {alone['attainment']:.1%} kept the SLO")
                if alone["attainment"] < attainment:
                    return 0.0, alone
            bad = rate
        if bad is not None and bad - best <= 0.03 * bad:
            break
        if bad is None:
            rate *= 2
        else:
            rate = (best + bad) / 2 if best else bad / 2
            if rate < first_rate / 2**_MAX_DOUBLINGS:
                break
    return best, figures
