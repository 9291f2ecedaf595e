"""What holders are to be told about kept blocks, until it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from fastdecode.core.holders import HolderId
from fastdecode.schedule.plan import DropCopies, Forget, Keep, Offload, Restore

Order: TypeAlias = "Keep | Forget | Offload | DropCopies"


class Orders:
    """Of all holders, in the order in which they are to hear of it."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._fetches: list[Restore] = []

    def add(self, order: Order) -> None:
        self._orders.append(order)

    def forget(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """A holder keeps these blocks no more, if these are any."""
        gone = tuple(keys)
        if gone:
            self._orders.append(Forget(holder, gone))

    def fetch(self, order: Restore) -> None:
        """To be told once there is room for it."""
        self._fetches.append(order)

    def take(self) -> list[Order]:
        """All but fetches."""
        orders, self._orders = self._orders, []
        return orders

    def take_fetches(self) -> list[Restore]:
        fetches, self._fetches = self._fetches, []
        return fetches

    def lose(self, holder: HolderId) -> None:
        """There is nobody to be told."""
        self._orders = [order for order in self._orders if order.holder != holder]
        self._fetches = [fetch for fetch in self._fetches if fetch.holder != holder]
