"""Where the rows of a step go in a KV cache on a device, as arrays of the host: what
``PagedStep`` is uploaded from, and what S-workers that act as one are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.buffers import to_device
from sworker.device import Gpu
from sworker.paged import PagedStep, Prompt

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class StepTables:
    """Of T rows, of which the first N are decoded tokens."""

    slots: Ids  # [T]
    tables: NDArray[np.int32]  # [N, W]
    context_lens: NDArray[np.int32]  # [N]
    later: tuple[tuple[slice, Ids], ...]
    """Of each later chunk its rows, and the slots [L] of all of its sequence so far."""
    first_rows: slice
    first_starts: tuple[int, ...]
    copy_sources: Ids  # [C]
    copy_targets: Ids  # [C]
    """Blocks to copy before the step."""

    def upload(self, device: torch.device, gpu: Gpu | None = None) -> PagedStep:
        """The same on a device."""

        def there(array: NDArray[np.int32] | Ids) -> Tensor:
            return to_device(torch.from_numpy(array), device, gpu)

        return PagedStep(
            slots=there(self.slots),
            tables=there(self.tables),
            context_lens=there(self.context_lens),
            context_lens_host=self.context_lens,
            later=tuple(Prompt(rows, there(slots)) for rows, slots in self.later),
            first_rows=self.first_rows,
            first_starts=self.first_starts,
        )

    def pack(self) -> Ids:
        """All of it as one array; ``unpack`` reads it."""
        sizes = [len(self.slots), *self.tables.shape, self.first_rows.start, self.first_rows.stop]
        sizes += [len(self.first_starts), len(self.copy_sources), len(self.later)]
        for rows, slots in self.later:
            sizes += [rows.start, rows.stop, len(slots)]
        starts = np.array(self.first_starts, np.int64)
        arrays = [self.slots, self.tables.ravel(), self.context_lens, starts]
        arrays += [self.copy_sources, self.copy_targets, *(slots for _, slots in self.later)]
        return np.concatenate([np.array(sizes, np.int64), *arrays], dtype=np.int64)

    @classmethod
    def unpack(cls, packed: Ids) -> StepTables:
        """What ``pack`` has packed."""
        sizes, at = packed[:_NUM_SIZES].tolist(), _NUM_SIZES
        num_rows, num_decoded, width, start, stop, num_first, num_copies, num_later = sizes
        bounds = packed[at : at + 3 * num_later].reshape(-1, 3).tolist()
        counts = [num_rows, num_decoded * width, num_decoded, num_first, num_copies, num_copies]
        ends = np.cumsum(counts + [count for _, _, count in bounds])[:-1]
        parts = np.split(packed[at + 3 * num_later :], ends)
        slots, tables, context_lens, first_starts, sources, targets, *later = parts
        return cls(
            slots,
            tables.reshape(num_decoded, width).astype(np.int32),
            context_lens.astype(np.int32),
            tuple((slice(a, b), own) for (a, b, _), own in zip(bounds, later, strict=True)),
            slice(start, stop),
            tuple(first_starts.tolist()),
            sources,
            targets,
        )


_NUM_SIZES = 8


@dataclass(frozen=True)
class StepInputs:
    """What a step begins with that attends on the S-worker's own device."""

    lane: int
    rows: Tensor  # token ids and positions, int64 [2, T], on the host
    tables: StepTables
    x: Tensor | None = None  # output [T, hidden] of the stage before, on the host, for token ids
