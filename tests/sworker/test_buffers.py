"""A lane's way to R-workers and back: on a CPU, where every copy is over at
once, and over a recorded GPU's pinned memory."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu

from sworker.buffers import KEPT_ROWS, LENT_LAYERS, GpuStaging, Room, Share, Staging


def test_rooms_grow_and_stay() -> None:
    room = Room(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), 100)
    a = room.take(torch.Size((3, 5)), torch.float32)
    assert a.shape == (3, 5) and room.nbytes == 100
    smaller = room.take(torch.Size((2, 5)), torch.bfloat16)
    assert smaller.data_ptr() == a.data_ptr()
    room.take(torch.Size((26,)), torch.float32)
    assert room.nbytes == 150
    a.zero_()
    assert torch.isfinite(a).all()


SHARES = (
    Share(slice(0, 3), (), slice(0, 5), slice(0, 3)),  # two rows are only stored
    Share(slice(5, 8), (np.array([8, 1]),), slice(5, 8), slice(5, 8)),
    Share(slice(8, 9), (), slice(8, 9), slice(8, 9)),
)


@pytest.mark.parametrize("direct_bytes", [None, 0, 100, 1 << 20], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_out_and_back(dtype: torch.dtype, direct_bytes: int | None) -> None:
    """Each share is sent its rows, several layers at a time; and what comes
    back goes where it belongs, and nowhere else."""
    staging = Staging()
    if direct_bytes is not None:  # on a GPU: all answers from where they are, some, or none
        staging = GpuStaging(RecordedGpu(), 1000, direct_bytes)
    staging.begin_step(SHARES)
    layers = [[torch.randn(9, heads, 4).to(dtype) for heads in (6, 2, 2)] for _ in range(4)]
    sent = []
    for q, k, v in layers:
        wide = torch.cat((q, k), dim=1)  # views of one tensor, as the S-part makes them
        sent.append(staging.send(wide[:, :6], wide[:, 6:], v))
    for staged, (q, k, v) in zip(sent, layers, strict=True):
        staged.wait()
        assert staged.done
        for share, (sent_q, sent_k, sent_v) in zip(SHARES, staged.shipments, strict=True):
            rows = torch.cat([torch.arange(9)[share.queries], *map(torch.tensor, share.closed)])
            assert torch.equal(as_sent(sent_q, dtype), q[rows])
            assert torch.equal(as_sent(sent_k, dtype), k[share.rows])
            assert torch.equal(as_sent(sent_v, dtype), v[share.rows])
    place = torch.zeros_like(q)
    o = staging.begin_layer(q.shape, dtype, place)
    assert o is place
    for share, (sent_q, _, _) in zip(SHARES, sent[-1].shipments, strict=True):
        own = share.queries.stop - share.queries.start
        staging.receive(sent_q[:own], o, share.answered)
    staging.join()
    expected = q.clone()
    expected[3:5] = 0
    assert torch.equal(o, expected)
    own = staging.begin_layer(q.shape, dtype)
    assert staging.begin_layer(q.shape, dtype).data_ptr() == own.data_ptr()


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
    gone = [weakref.ref(x) for x in _send_layers(staging, 2 * LENT_LAYERS)]
    assert sum(x() is not None for x in gone) <= 3 * LENT_LAYERS


def _send_layers(staging: Staging, num_layers: int) -> list[torch.Tensor]:
    """Send so many layers, each in other memory."""
    layers = [torch.zeros(9, 6, 4) for _ in range(3 * num_layers)]
    for layer in range(num_layers):
        staging.send(*layers[3 * layer : 3 * layer + 3])
    return layers


@torch.inference_mode()
def test_an_answer_is_kept_until_the_next_layer_has_been_computed() -> None:
    """Whoever received it lends its memory to somebody else when nobody looks
    into it any more."""
    gpu = RecordedGpu()
    staging = GpuStaging(gpu, 1000, direct_bytes=0)
    staging.begin_step(SHARES[2:])
    refs = []
    for _ in range(3):
        o = staging.begin_layer(torch.Size((9, 6, 4)), torch.float32)
        answer = gpu.host(np.ones((1, 6, 4), np.float32)).numpy()
        gpu._kept.clear()
        refs.append(weakref.ref(answer))
        staging.receive(answer, o, slice(8, 9))
        del answer
        staging.join()
    assert [ref() is None for ref in refs] == [True, True, False]


def as_sent(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(dtype)


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
