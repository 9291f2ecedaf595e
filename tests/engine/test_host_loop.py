"""How much Python the engine's own thread runs for each lane and layer. Where a
GPU computes a unit in 200 us, this is what keeps it waiting. Calls are counted,
which no other load on the machine changes; ``benchmarks/host_loop.py`` times
the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def host_loop() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import host_loop

        return host_loop


@pytest.mark.parametrize(("num_r_workers", "most_calls"), [(1, 112), (4, 198), (16, 498)])
def test_calls_a_lane_and_layer(host_loop: ModuleType, num_r_workers: int, most_calls: int) -> None:
    """They grow by what each R-worker's own message and answer take, and by
    nothing that looks at all R-workers for every answer."""
    assert 100 < host_loop.count_calls(num_r_workers) <= most_calls


def test_calls_a_message_are_as_many_for_any_number_of_r_workers(host_loop: ModuleType) -> None:
    """Beside the codec's: the fleet's, for one message and its answer."""
    one, sixteen = (host_loop.count_message_calls(number) for number in (1, 16))
    assert 20 < sixteen <= one + 1 <= 80
