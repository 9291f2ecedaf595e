"""Runs a load, and looks for the greatest one that is still good."""

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
    """Every request when it is due, whatever has become of the others."""
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
    """So many clients, each of which sends the next request once it has its answer."""
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
    """The greatest rate, within 3%, at which this part of the requests keep the
    SLO: by doubling and halving.

    Args:
        measure: the figures at a rate.
        measure_alone: the figures of requests that have the server for
            themselves, one after the other. Asked once, where the first rate is
            too great: if those don't keep the SLO, no rate does, and to look for
            it at ever lower ones would take hours.

    Returns:
        The rate, 0 if there is none, and the figures at it or, if not even
        requests alone keep the SLO, theirs.
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
