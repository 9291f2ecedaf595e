"""A lane's staging on a CPU, where every copy is over at once; the ring and its
events are tests/gpu's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sworker.buffers import Staging, _Room


def test_rooms_grow_and_stay() -> None:
    room = _Room(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    a, b = room.take([torch.Size((3, 5)), torch.Size((7,))], torch.float32)
    assert a.shape == (3, 5) and b.shape == (7,)
    assert b.data_ptr() - a.data_ptr() == 64
    smaller, _ = room.take([torch.Size((2, 5)), torch.Size((7,))], torch.bfloat16)
    assert smaller.data_ptr() == a.data_ptr()
    before = room.nbytes
    room.take([torch.Size((before // 4 + 1,))], torch.float32)
    assert room.nbytes == before * 3 // 2
    a.zero_()
    assert torch.isfinite(a).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_out_and_back(dtype: torch.dtype) -> None:
    staging = Staging()
    q, k, v = (torch.randn(9, heads, 4).to(dtype) for heads in (6, 2, 2))
    wide = torch.cat((q, k), dim=1)  # views of one tensor, as the S-part makes them
    staged = staging.send(wide[:, :6], wide[:, 6:], v)
    assert staged.done
    staged.wait()
    o = staging.begin_layer(q.shape, dtype)
    staging.receive(staged.q[:5], o, slice(0, 5))
    staging.receive(np.ascontiguousarray(staged.q[5:]), o, slice(5, 9))
    staging.join()
    assert torch.equal(o, q)
    assert torch.equal(torch.from_numpy(staged.k).view(dtype), k) and staged.v.shape == (9, 2, 4)
    assert staging.begin_layer(q.shape, dtype).data_ptr() == o.data_ptr()
