"""A lane's way to R-workers and back: on a CPU, where every copy is over at
once, and over a recorded GPU's pinned memory."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from recorded_gpu import RecordedGpu

from sworker.buffers import KEPT_ROWS, LENT_LAYERS, GpuStaging, Share, Staging

SHARES = (
    Share(slice(0, 3), (), slice(0, 5), slice(0, 3)),  # two rows are only stored
    Share(slice(5, 8), (np.array([8, 1]),), slice(5, 8), slice(5, 8)),
    Share(slice(8, 9), (), slice(8, 9), slice(8, 9)),
)


@torch.inference_mode()
def test_a_lanes_own_memory_is_cut_once_for_all_steps_that_are_alike() -> None:
    """But no more layers are kept than may be on loan, none with closed parts, none that is
    copied, and no large one: that would keep its memory."""
    staging, (q, k, v) = Staging(), (torch.randn(9, heads, 4) for heads in (6, 2, 2))
    alike = [Share(SHARES[0].queries, (), SHARES[0].rows, SHARES[0].answered)]
    staging.begin_step(alike[:])
    staged = staging.send(q, k, v)
    staging.begin_step(alike[:])
    assert staging.send(q, k, v) is staged
    assert staging.send(q, k.clone(), v) is not staged
    shipments = staging.send(q, k, v).shipments
    q.zero_()
    assert not shipments[0][0].any(), "what is kept is a view"

    staging.begin_step(SHARES[2:])
    assert staging.send(q, k, v).shipments[0][0].shape[0] == 1
    staging.begin_step(SHARES)
    assert staging.send(q, k, v) is not staging.send(q, k, v)

    staging.begin_step(alike)
    for num_rows, is_kept in ((KEPT_ROWS, True), (KEPT_ROWS + 1, False)):
        large = torch.zeros(num_rows, 6, 4)
        assert (staging.send(large, large, large) is staging.send(large, large, large)) == is_kept
    wide = torch.zeros(9, 8, 4)[:, :6]
    assert staging.send(wide, k, v) is not staging.send(wide, k, v)
    layers = [torch.zeros(9, 6, 4) for _ in range(6 * LENT_LAYERS)]
    for first in range(0, len(layers), 3):
        staging.send(*layers[first : first + 3])
    gone = [weakref.ref(x) for x in layers]
    del layers
    assert sum(x() is not None for x in gone) <= 3 * LENT_LAYERS


def test_pinned_memory_is_taken_once_and_only_what_is_asked_for_is_copied() -> None:
    """Steps of any size up to the largest; first chunks' q stays where it is."""
    gpu = RecordedGpu()
    staging = GpuStaging(gpu, 9 * 10 * 4 * 4)
    taken, q, kv = staging.nbytes, torch.zeros(9, 6, 4), torch.zeros(9, 2, 4)
    for rows in (2, 9, 4, 1, 7):
        staging.begin_step([Share(slice(0, 1), (), slice(0, rows), slice(0, 1))])
        for _ in range(6):
            staged = staging.send(q[:rows], kv[:rows], kv[:rows])
            staging.begin_layer(q[:rows].shape, q.dtype, q[:rows])
        assert [x.shape for x in staged.shipments[0]] == [(1, 6, 4), (rows, 2, 4), (rows, 2, 4)]
    assert staging.nbytes == taken and gpu.calls["pinned"] == 6
    assert max(span[1] - span[0] for span in gpu.checker.host_spans) == 9 * 10 * 4 * 4
