"""What R-workers say without having been asked."""

from __future__ import annotations

from collections.abc import Callable

from fastdecode.core.errors import ProtocolError
from fastdecode.engine.fleet.keepers import Keepers
from fastdecode.wire.kv.exporting import MoveNews
from fastdecode.wire.kv.replicating import ReplicationNews


class Unasked:
    """News of replicas and of lower tiers, in the order in which they came. Each
    is told once, if whoever said it keeps the holder that it is about.

    Args:
        keepers: who keeps which.
        give_up: an R-worker, by its index, has said what can't be: what that is,
            behind its name.
    """

    def __init__(self, keepers: Keepers, give_up: Callable[[int, str], None]) -> None:
        self._keepers = keepers
        self._give_up = give_up
        self._of_replicas: list[tuple[int, ReplicationNews]] = []
        self._of_tiers: list[tuple[int, MoveNews]] = []

    def hear_replica(self, index: int, news: ReplicationNews) -> None:
        """An R-worker speaks of a replica."""
        self._of_replicas.append((index, news))

    def hear_tier(self, index: int, news: MoveNews) -> None:
        """An R-worker speaks of its lower tier."""
        try:
            news.check()
        except ProtocolError as error:
            self._give_up(index, error.message)
        else:
            self._of_tiers.append((index, news))

    def forget(self, index: int) -> None:
        """An R-worker is lost, with its lower tier."""
        self._of_tiers = [(one, news) for one, news in self._of_tiers if one != index]

    @property
    def of_tiers(self) -> list[MoveNews]:
        """What was said of lower tiers, and wasn't taken."""
        return [news for _, news in self._of_tiers]

    def take_replicas(self) -> list[ReplicationNews]:
        """What was said of replicas. A holder may have been taken over meanwhile,
        unknown to who kept it before: that one's news are passed over."""
        heard, self._of_replicas = self._of_replicas, []
        told = []
        for index, news in heard:
            if self._keepers.keeps(index, news.holder):
                told.append(news)
            elif not self._keepers.kept_once(index, news.holder):
                self._give_up(index, f"speaks of holder {news.holder}, which isn't its")
        return told

    def take_tiers(self) -> list[MoveNews]:
        """What was said of lower tiers."""
        heard, self._of_tiers = self._of_tiers, []
        told = []
        for index, news in heard:
            if self._keepers.keeps(index, news.holder):
                told.append(news)
            else:
                self._give_up(index, f"speaks of holder {news.holder}, which isn't its")
        return told
