"""Reading tensors of a checkpoint, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.tensor_entry import TensorEntry
from sworker.device import Event, Gpu
from sworker.load.decoding import decode

PLAIN_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Dtypes of tensors that are read as they are."""

_MAX_OPEN_FILES = 16


class TensorReader:
    """Reads tensors into a buffer. Quantised ones come out decoded: a caller sees names and shapes
    of weights, not formats.

    One buffer for all: an allocator may keep freed blocks of a tensor's size, which would take a
    second tensor's room. For a device there are two, pinned: one is filled while the device copies
    from the other. Files stay open until ``close``: some checkpoints hold 40,000 tensors.

    Args:
        entries: All tensors that will be read.
        dtype: The dtype that encoded ones are decoded to.
        gpu: Copies what is read to itself, on its current stream, without a wait of the host.
            None lets the host copy.
    """

    def __init__(
        self, entries: Iterable[TensorEntry], dtype: torch.dtype, gpu: Gpu | None = None
    ) -> None:
        self.dtype = dtype
        self._gpu = gpu
        size = max((self._num_bytes(entry) for entry in entries), default=0)
        if gpu is None:
            self._buffers = [torch.empty(size, dtype=torch.uint8)]
        else:
            self._buffers = [gpu.pinned(size), gpu.pinned(size)]
        self._copied: list[Event | None] = [None] * len(self._buffers)
        self._place = 0
        """Of the buffer that was filled last."""
        self._codes = torch.empty(0, dtype=torch.uint8)
        self._files: dict[Path, FileIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Once the device has copied all that was read."""
        if self._gpu is not None:
            self._gpu.current_stream().record_event().synchronize()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor, contiguous, of ``entry.shape``, in the dtype that it has
        on disk, or ``dtype`` if it is encoded. Valid until the next is read;
        for copies of the device until they are done.

        Raises:
            CheckpointError: the file can't be read, ends too early, or holds
                scales that make no sense.
        """
        out = self._next_buffer()[: self._num_bytes(entry)]
        if entry.encoding is None:
            self._fill(out, entry, 0)
            return out.view(PLAIN_DTYPES[entry.dtype]).view(entry.shape)
        weights = out.view(self.dtype).view(entry.shape)
        decode(entry, self._read_codes, weights)
        return weights

    def _next_buffer(self) -> Tensor:
        if self._gpu is not None:
            self._copied[self._place] = self._gpu.current_stream().record_event()
            self._place = (self._place + 1) % len(self._buffers)
            copied = self._copied[self._place]
            if copied is not None:
                copied.synchronize()
        return self._buffers[self._place]

    def _num_bytes(self, entry: TensorEntry) -> int:
        if entry.encoding is None:
            return entry.num_bytes
        count, rows, columns = entry.encoding.matrix
        return count * rows * columns * self.dtype.itemsize

    def _read_codes(self, entry: TensorEntry, start: int, count: int) -> Tensor:
        """Some bytes of a tensor, which are valid until the next are read."""
        if self._codes.numel() < count:
            self._codes = torch.empty(count, dtype=torch.uint8)
        data = self._codes[:count]
        self._fill(data, entry, start)
        return data

    def _fill(self, data: Tensor, entry: TensorEntry, start: int) -> None:
        try:
            file = self._open(entry.file)
            file.seek(entry.offset + start)
            view, filled = memoryview(data.numpy()), 0
            while filled < len(view):  # one call reads 2 GiB at most
                count = file.readinto(view[filled:])
                if not count:
                    raise CheckpointError(
                        f"{entry.file} ended while {entry.name!r} was read: is something writing "
                        "to it?"
                    )
                filled += count
        except OSError as error:
            why = error.strerror or error
            raise CheckpointError(f"{entry.file} can't be read: {why}.") from error

    def _open(self, path: Path) -> FileIO:
        if path not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:
                self._close_files()
            self._files[path] = path.open("rb", buffering=0)
        return self._files[path]
