"""CUDA tensors that have no memory (``FakeTensorMode``): every operator checks that its tensors
are on one device, and none computes. A GPU that isn't there.

What the host makes (NumPy's arrays, pinned memory) is real. ``FakeGpu`` is the driver (see
``sworker.device.Gpu``), and watches: a copy to memory that isn't pinned, a value that the host
asks for, and CPU indices into a CUDA tensor all make the host wait for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
_TAKEN_AT_ONCE = 64 << 10  # of memory that isn't pinned CUDA takes so many bytes without a wait
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class FakeGpu(TorchDispatchMode):
    """Entered as a context, with ``with_fakes``."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=False)
        self.waits: list[str] = []
        """What made the host wait for the device."""
        self.num_operators = 0
        """On the device."""
        self._pinned: list[Tensor] = []

    def new_stream(self) -> Any:
        return SimpleNamespace(
            wait_stream=lambda stream: None, wait_event=lambda event: None,
            record_event=lambda: SimpleNamespace(query=lambda: True, synchronize=lambda: None),
        )  # fmt: skip

    current_stream = new_stream

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Any:
        return SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 1.0)

    def pinned(self, num_bytes: int) -> Tensor:
        self._pinned.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self._pinned[-1]

    def reads(self, array: np.ndarray) -> bool:
        self._pinned.append(torch.from_numpy(array.view(np.uint8).reshape(-1)))
        return True

    def mapped(self, host: Tensor) -> None:
        return None

    def upload(self, host: Tensor) -> Tensor:
        assert not isinstance(host, FakeTensor)
        return torch.empty(host.shape, dtype=host.dtype, device=CUDA)

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=CUDA)

    def new_pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], None], pool: object) -> Any:
        run()
        return SimpleNamespace(replay=run)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if x.device.type == "cuda"]
        device = kwargs.get("device")
        goes_there = device is not None and torch.device(device).type == "cuda"
        if not on_device and not goes_there:
            with _disable_current_modes():
                return func(*args, **kwargs)
        self.num_operators += 1
        self._watch(func, args, None if device is None else torch.device(device).type)
        fake_args, fake_kwargs = tree_map(self._as_fake, (args, kwargs))
        result = func(*fake_args, **fake_kwargs)
        return args[0] if func._schema.name == "aten::copy_" else result

    def _watch(self, func: Any, args: Any, goes_to: str | None) -> None:
        name = func._schema.name
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            indices = [x for x in args[1] if x is not None]
            if any(x.device.type == "cpu" for x in indices):
                self.waits.append(f"{name} by indices on the host")
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.waits.append(f"{name} by a mask")
        elif not _ASKING.isdisjoint(func.tags):
            self.waits.append(name)
        elif name == "aten::copy_" and args[0].device.type == "cpu":
            if not self._is_pinned(args[0]):
                self.waits.append("a copy to memory that isn't pinned")
        elif name == "aten::copy_" and args[1].device.type == "cpu":
            if args[1].dim() and not self._is_pinned(args[1]):
                self.waits.append("a copy from memory that isn't pinned")
        elif name == "aten::_to_copy" and goes_to == "cpu":
            self.waits.append("a copy to the host")
        elif name == "aten::_to_copy" and not args[0].is_cuda and args[0].nbytes > _TAKEN_AT_ONCE:
            self.waits.append("a large copy from memory that isn't pinned")

    def _is_pinned(self, x: Tensor) -> bool:
        first = x.data_ptr()
        return any(m.data_ptr() <= first < m.data_ptr() + max(1, m.nbytes) for m in self._pinned)

    def _as_fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        return self.fakes.from_tensor(x)


class Indexing(TorchFunctionMode):
    """Indexing and copies by operators: torch's own ways ask CUDA for its device
    first, which a torch without CUDA refuses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.__getitem__:
            x, indices = _part(args[0], args[1])
            return torch.ops.aten.index.Tensor(x, indices) if indices else x
        if func is Tensor.__setitem__:
            (x, indices), value = _part(args[0], args[1]), args[2]
            if indices:
                value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype)
                torch.ops.aten.index_put_.default(x, indices, value)
            elif isinstance(value, Tensor):
                torch.ops.aten.copy_.default(x, value)
            else:
                x.fill_(value)
            return None
        if func is Tensor.nonzero:
            return torch.ops.aten.nonzero.default(args[0])
        if func is Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(args[0])
        if func is Tensor.contiguous:
            form = torch.contiguous_format
            x = args[0]
            return x if x.is_contiguous() else torch.ops.aten.clone.default(x, memory_format=form)
        if func is Tensor.copy_:
            is_async = bool(kwargs and kwargs.get("non_blocking"))
            return torch.ops.aten.copy_.default(args[0], args[1], is_async)
        return func(*args, **(kwargs or {}))


def _part(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """A view by numbers and slices, and the tensors that are left to index by."""
    parts = index if isinstance(index, tuple) else (index,)
    num_dims = sum(part is not None and part is not Ellipsis for part in parts)
    dim, indices = 0, []
    for part in parts:
        if part is Ellipsis:
            dim += x.dim() - num_dims
        elif part is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, (Tensor, list, np.ndarray)):
            found = part if isinstance(part, Tensor) else torch.tensor(part)
            indices.append((dim, found))
            dim += 1
        else:
            x = torch.ops.aten.select.int(x, dim, int(part))
    of_dims: list[Tensor | None] = [None] * dim
    for at, found in indices:
        of_dims[at] = found
    return x, of_dims if indices else []


@contextlib.contextmanager
def with_fakes(gpu: FakeGpu) -> Iterator[FakeGpu]:
    with gpu.fakes, gpu, Indexing():
        yield gpu


def moved(model: nn.Module) -> None:
    """A model as if it were on the device: all of its tensors, buffers or not."""

    def there(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=CUDA) if isinstance(x, Tensor) else x

    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[name] = nn.Parameter(there(value), requires_grad=False)
        for held in (module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = there(value)
