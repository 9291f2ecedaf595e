"""Columns of which an R-worker is lost in some stage: for good, or until its
neighbour there goes on for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId


class ColumnLosses:
    """What later stages have lost, as the first one knows it.

    A column that is lost is told once, and over then, unless the stages keep
    replicas (``may_recover``): then every stage's loss of its R-worker is told,
    until the column is given up.
    """

    def __init__(self) -> None:
        self.may_recover = False
        self.void: dict[HolderId, WorkerError] = {}
        """Columns of which nothing is to be had, because of later stages, and why."""
        self.over: set[HolderId] = set()
        """Columns that are lost for good."""
        self.r_workers: dict[tuple[int, int], WorkerError] = {}
        """R-workers of later stages that were ever lost, by stage and column, and why."""
        self._stages: dict[HolderId, dict[int, bool]] = {}  # that lost it, and can go on
        self._untold: list[tuple[HolderId, WorkerError, bool]] = []

    def lose(self, stage: int, column: HolderId, error: WorkerError, *, is_kept: bool) -> bool:
        """A later stage has lost its R-worker of a column, which its neighbour
        there can go on for, or not (``is_kept``). Whether anybody is told."""
        if column in self.over:
            return False
        self.void[column] = error
        self._stages.setdefault(column, {})[stage] = is_kept
        self._untold.append((column, error, False))
        return True

    def lose_own(self, losses: Iterable[tuple[HolderId, WorkerError]]) -> None:
        """The first stage has lost R-workers, and why."""
        self._untold += [(column, error, True) for column, error in losses]

    def take(self) -> dict[HolderId, tuple[WorkerError, bool]]:
        """What has been lost, why, and whether the first stage's R-worker is.
        Told once."""
        told: dict[HolderId, tuple[WorkerError, bool]] = {}
        for column, error, own in self._untold:
            if column not in self.over:
                first_error, was_own = told.get(column, (error, False))
                told[column] = first_error, own or was_own
        self._untold.clear()
        if not self.may_recover:
            self.over.update(told)
        return told

    def of_r_workers(
        self, own: Collection[tuple[int, int]], stages: Collection[int]
    ) -> dict[tuple[int, int], WorkerError]:
        """Why those are lost that these stages have lost, by stage and column.
        ``own``: those of the first one. A prompt stage speaks of others' R-workers:
        it counts where these haven't noticed by now."""
        lost = {each: error for each, error in self.r_workers.items() if each[0] in stages}
        columns = {column for _, column in (*own, *lost)}
        others = {(0, column): error for (_, column), error in self.r_workers.items()}
        return {**lost, **{each: x for each, x in others.items() if each[1] not in columns}}

    def stages_of(self, column: HolderId) -> dict[int, bool]:
        """Later stages that have lost their R-worker of a column, and whether
        the neighbour there can go on for it."""
        return self._stages.get(column, {})

    def go_on(self, column: HolderId) -> None:
        """Neighbours are asked to go on for it."""
        self.void.pop(column, None)
        self._stages.pop(column, None)

    def give_up(self, column: HolderId) -> None:
        """It is lost for good."""
        self.over.add(column)
        self._stages.pop(column, None)
        for (_, lost), error in self.r_workers.items():
            if lost == column:
                self.void[column] = error
