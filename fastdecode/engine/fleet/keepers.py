"""Which R-worker keeps which holder."""

from __future__ import annotations

from collections.abc import Iterator

from fastdecode.core.holders import HolderId


class Keepers:
    """At first an R-worker keeps the holder of its own number; it may take over
    others'.

    Args:
        num_holders: as many as there are R-workers.
    """

    def __init__(self, num_holders: int) -> None:
        self._peer_of = {HolderId(index): index for index in range(num_holders)}
        self._former: set[tuple[int, HolderId]] = set()
        self.has_moved = False
        """An R-worker may keep several holders, or another than its own."""

    def __len__(self) -> int:
        return len(self._peer_of)

    def __iter__(self) -> Iterator[HolderId]:
        return iter(self._peer_of)

    def __getitem__(self, holder: HolderId) -> int:
        """The index of the R-worker that keeps a holder."""
        return self._peer_of[holder]

    def kept_by(self, index: int) -> list[HolderId]:
        """The holders that an R-worker keeps."""
        return [holder for holder, keeper in self._peer_of.items() if keeper == index]

    def keeps(self, index: int, holder: int) -> bool:
        """Whether the R-worker keeps the holder; there needn't be one of that number."""
        return self._peer_of.get(HolderId(holder)) == index

    def kept_once(self, index: int, holder: int) -> bool:
        """Whether the R-worker kept the holder, and does no more: it may not
        know that yet."""
        return (index, holder) in self._former

    def move(self, holder: HolderId, to: HolderId) -> None:
        """From now on the R-worker that keeps ``to`` keeps a lost holder, too:
        it has a cache under that name."""
        self._peer_of[holder] = self._peer_of[to]
        self.has_moved = True

    def give_back(self, holder: HolderId) -> None:
        """A holder is kept in its own place again: whoever took it over is lost,
        has nothing left of it, or has handed it over."""
        self._former.add((self._peer_of[holder], holder))
        self._peer_of[holder] = holder
