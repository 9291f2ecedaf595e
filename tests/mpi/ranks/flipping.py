"""``fastdecode`` as ranks, whose controller gives its instances other roles all the
time: one after the other, as often as they say something of requests."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from instance_runs import role_turns  # noqa: E402

from fastdecode.cli.main import main  # noqa: E402
from fastdecode.core.delta import Delta  # noqa: E402
from fastdecode.engine.instances.cluster import ClusterEngine  # noqa: E402

EVERY = 5


class Flipping(ClusterEngine):
    """Gives roles between what is heard."""

    _numbers: itertools.count[int] | None = None

    def heard(self, number: int, deltas: Sequence[Delta]) -> None:
        super().heard(number, deltas)
        if self._numbers is None:
            self._numbers = itertools.count(1)
            self._turns = role_turns([each.name for each in self.remote])
        if next(self._numbers) % EVERY == 0:
            self.set_role(*next(self._turns))


if __name__ == "__main__":
    from fastdecode.engine.instances import cluster

    cluster.ClusterEngine = Flipping  # type: ignore[misc]
    sys.exit(main())
