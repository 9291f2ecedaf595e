"""What the stages' R-workers of a column say of what they have moved, as one: a
block is on disk, or back, where every stage has its layers of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.joined_moves import JoinedMoves
from fastdecode.engine.fleet.pool import WorkerEvents
from fastdecode.engine.stages.rooms import FIRST, Tell
from fastdecode.wire.kv.exporting import MoveNews
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import DropBlocks, Fetching, Moved, Stocked, StoreBlocks
from fastdecode.wire.messages import ToRWorker

StageMoved: TypeAlias = Moved | Stocked
"""What a later stage tells of its R-workers. How far a fetch has come it keeps to
itself: nobody begins before all is there."""


class ColumnTiers:
    """Joins what the stages say. Blocks that some stage lacks are given up in the
    others, whose disks would fill with them.

    Args:
        stages: that have R-workers; the first is 0.
        tell: tells a stage's R-worker of a column something.
        own: what the first stage's R-workers say.
    """

    def __init__(self, stages: Sequence[int], tell: Tell, own: WorkerEvents) -> None:
        self._stages = tuple(stages)
        self._tell = tell
        self._own = own
        self._columns: dict[HolderId, JoinedMoves] = {}
        self._stores: dict[HolderId, set[int]] = {}  # jobs
        self._failed: dict[tuple[HolderId, int], dict[int, set[bytes]]] = {}  # of stores, by stage
        self._over: set[HolderId] = set()
        self._news: list[MoveNews] = []  # what all stages have said

    @property
    def has_moves(self) -> bool:
        """Whether all stages have reported something that wasn't taken."""
        return bool(self.of_tiers)

    @property
    def of_tiers(self) -> list[MoveNews]:
        """What all stages have said of lower tiers, and wasn't taken."""
        for news in self._own.take_tiers():
            self.take(FIRST, news)
        return self._news

    def take_tiers(self) -> list[MoveNews]:
        """The same; told once."""
        told, self._news = self.of_tiers, []
        return told

    def ask(self, column: HolderId, message: ToRWorker) -> None:
        """All stages are told this."""
        if isinstance(message, StoreBlocks):
            self._stores.setdefault(column, set()).add(message.job)

    def take(self, stage: int, news: MoveNews) -> None:
        """A stage's R-worker of a column has said something."""
        column = HolderId(news.holder)
        if isinstance(news, Fetching) or column in self._over:
            return
        stages = [HolderId(each) for each in self._stages]
        tiers = self._columns.setdefault(column, JoinedMoves(column, stages))
        tiers.take(stage, news)
        if isinstance(news, Moved) and news.job in self._stores.get(column, ()):
            told = self._failed.setdefault((column, news.job), {})
            told[stage] = set(keys_of(news.failed))
        while tiers.news:
            joined = tiers.news.popleft()
            self._news.append(joined)
            if isinstance(joined, Moved):
                self._give_up(column, joined.job)
            elif isinstance(joined, Stocked):
                for each in self._stages:
                    self._drop(each, column, tiers.extras(each, joined))

    def forget(self, column: HolderId) -> None:
        """It is lost."""
        self._over.add(column)
        self._columns.pop(column, None)
        self._stores.pop(column, None)
        self._failed = {key: told for key, told in self._failed.items() if key[0] != column}
        self._news = [news for news in self._news if news.holder != column]

    def _give_up(self, column: HolderId, job: int) -> None:
        """Those of a job's blocks that some stage couldn't store."""
        told = self._failed.pop((column, job), {})
        self._stores.get(column, set()).discard(job)
        failed = set().union(*told.values())
        for stage, own in told.items():
            self._drop(stage, column, failed - own)

    def _drop(self, stage: int, column: HolderId, keys: set[bytes]) -> None:
        if keys:
            self._tell(stage, column, DropBlocks(words_of(sorted(keys))))


def check(news: StageMoved, num_columns: int) -> None:
    """
    Raises:
        ProtocolError: no stage can say that; to be said behind its name.
    """
    if not 0 <= news.holder < num_columns:
        raise ProtocolError(f"speaks of column {news.holder}, and there are {num_columns}")
    news.check()
