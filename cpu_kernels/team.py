# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""A team of threads that runs the units of one call at a time, and never needs the GIL for it.

Its helpers are Python threads that enter compiled code once and stay there: they spin for a little
while, then sleep on a futex. The caller publishes a call, works on it as each helper does (units
are claimed one by one from a shared counter), closes the call when no unit is left, and waits for
the helpers that are still at work; a helper that hasn't woken up by then is not waited for. OpenMP
would do as much, but its runtime isn't on every host, and Numba's own fallback aborts when two
Python threads call at once.

Where the calling thread runs other OpenMP regions between our calls (those of torch's matrix
products), two sets of threads would spin on the same cores. There an ``OpenMPTeam`` has the
threads of that runtime run the units."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.types import boolean, int64

from cpu_kernels.codegen.compiled import address_of, entry, part
from cpu_kernels.codegen.memory import load_i64, store_i64
from cpu_kernels.codegen.simd import I8, I32, I64, call, pointer
from cpu_kernels.codegen.translate import Emitter
from cpu_kernels.layout import aligned_bytes

# Fields of the shared memory, in bytes; those that are written during a call
# have cache lines of their own.
_GATE = 0  # generation << 17 | open << 16 | helpers at work
_WAKE, _SLEEPERS = 64, 128
_STOP = 192
_NEXT_UNIT = 256
_ENTRY, _JOB, _NUM_UNITS = 320, 328, 336
_BUSY = 384
_RUNTIME, _HELP, _NUM_THREADS, _SCRATCHES = 448, 456, 464, 472  # of an OpenMP team
_NUM_ARRIVED = 512
_CALLER_SLEEPS = 576
_SHARED_BYTES = 640
_AT_WORK = 0xFFFF
_OPEN = 1 << 16
_GENERATION = 17
_SPINS = 1500  # about 20 to 50 µs of ``pause``: the gap between two layers is often shorter
SCRATCH_BYTES = 2 << 20
"""Memory of each thread's own; pages that a kernel doesn't touch cost nothing."""
MAX_THREADS = 1024

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0


@Emitter
def fetch_add(builder, address: int64, amount: int64) -> int64:
    """Atomic; returns the old int64."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), amount, "seq_cst")


@Emitter
def _atomic_load(builder, address: int64) -> int64:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


@Emitter
def _exchange_if(builder, address: int64, expected: int64, value: int64) -> boolean:
    """Store ``value`` if ``expected`` is there; returns whether it was."""
    target = pointer(builder, address, I64)
    pair = builder.cmpxchg(target, expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 1)


@Emitter
def _pause(builder):
    """Tell the core that this is a spin loop."""
    if platform.machine() in ("x86_64", "AMD64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@Emitter
def _system_call(builder, number: int64, a: int64, b: int64, c: int64) -> int64:
    """The C library's ``syscall``."""
    return call(builder, "syscall", I64, [number, a, b, c, I64(0), I64(0), I64(0)])


@Emitter
def call_entry(builder, entry: int64, job: int64, unit: int64, scratch: int64):
    """Call a compiled (variant, job, unit, scratch) kernel by address, by
    Numba's own calling convention."""
    _call_compiled(builder, entry, [ir.Constant(I8.as_pointer(), None), job, unit, scratch])


def _call_compiled(builder, address, args):
    """Call a compiled function that returns nothing by Numba's own calling convention."""
    byte = I8.as_pointer()
    kind = ir.FunctionType(I32, [byte.as_pointer(), byte.as_pointer(), *[arg.type for arg in args]])
    function = builder.inttoptr(address, kind.as_pointer())
    spare = cgutils.alloca_once(builder, byte), cgutils.alloca_once(builder, byte)  # in a loop, too
    builder.call(function, [*spare, *args])


@Emitter
def _run_region(builder, shared: int64):
    """``GOMP_parallel``, which is what compilers turn a parallel region into:
    every thread of it calls the team's ``help_once``."""
    outlined = ir.FunctionType(ir.VoidType(), [I64])  # C's void (*)(void *)
    name = builder.module.get_unique_name("fastdecode.region")
    region = ir.Function(builder.module, outlined, name)
    region.linkage = "internal"
    inner = ir.IRBuilder(region.append_basic_block())
    _call_compiled(inner, inner.load(pointer(inner, region.args[0], I64, _HELP)), region.args)
    inner.ret_void()
    parallel = ir.FunctionType(ir.VoidType(), [outlined.as_pointer(), I64, I32, I32])
    address = builder.load(pointer(builder, shared, I64, _RUNTIME))
    num_threads = builder.trunc(builder.load(pointer(builder, shared, I64, _NUM_THREADS)), I32)
    builder.call(
        builder.inttoptr(address, parallel.as_pointer()), [region, shared, num_threads, I32(0)]
    )


@part
def _work(shared, scratch):
    """Claim units until none is left."""
    entry = load_i64(shared + _ENTRY)
    job = load_i64(shared + _JOB)
    num_units = load_i64(shared + _NUM_UNITS)
    while True:
        unit = fetch_add(shared + _NEXT_UNIT, 1)
        if unit >= num_units:
            return
        call_entry(entry, job, unit, scratch)


@entry
def _serve(shared, scratch):
    """A helper's life: wait for a call, help, until the team stops."""
    last, spins = np.int64(0), 0
    while _atomic_load(shared + _STOP) == 0:
        gate = _atomic_load(shared + _GATE)
        if (gate & _OPEN) != 0 and (gate >> _GENERATION) != last:
            if _exchange_if(shared + _GATE, gate, gate + 1):
                last, spins = gate >> _GENERATION, 0
                _work(shared, scratch)
                left = fetch_add(shared + _GATE, -1) & (_OPEN | _AT_WORK)
                if left == 1 and _atomic_load(shared + _CALLER_SLEEPS) != 0:  # the last one
                    _system_call(_FUTEX, shared + _GATE, 129, 1)  # FUTEX_WAKE_PRIVATE
            continue
        spins += 1
        if spins < _SPINS:
            _pause()
            continue
        spins = 0
        wake = _atomic_load(shared + _WAKE)
        fetch_add(shared + _SLEEPERS, 1)
        gate = _atomic_load(shared + _GATE)
        if ((gate & _OPEN) == 0 or (gate >> _GENERATION) == last) and _atomic_load(
            shared + _STOP
        ) == 0:
            _system_call(_FUTEX, shared + _WAKE, 128, wake & 0xFFFFFFFF)  # FUTEX_WAIT_PRIVATE
        fetch_add(shared + _SLEEPERS, -1)


@entry
def help_once(shared):
    """What each thread of an OpenMP region does."""
    index = fetch_add(shared + _NUM_ARRIVED, 1)
    _work(shared, load_i64(shared + _SCRATCHES) + index * SCRATCH_BYTES)


@part
def _wake(shared):
    fetch_add(shared + _WAKE, 1)
    if _atomic_load(shared + _SLEEPERS) > 0:
        _system_call(_FUTEX, shared + _WAKE, 129, 1 << 30)  # FUTEX_WAKE_PRIVATE


@entry
def _wake_helpers(shared):
    _wake(shared)


@part
def _await_helpers(shared):
    """Until none is at work. One that has lost its core may be long: then
    whoever has that core needs this one."""
    spins = 0
    while (_atomic_load(shared + _GATE) & _AT_WORK) != 0:
        spins += 1
        if spins < _SPINS:
            _pause()
            continue
        _exchange_if(shared + _CALLER_SLEEPS, 0, 1)
        gate = _atomic_load(shared + _GATE)
        if (gate & _AT_WORK) != 0:  # the system looks at the gate's lower half once more
            _system_call(_FUTEX, shared + _GATE, 128, gate & 0xFFFFFFFF)  # FUTEX_WAIT_PRIVATE
    if spins >= _SPINS:
        _exchange_if(shared + _CALLER_SLEEPS, 1, 0)


@part
def run_units(shared, entry, job, num_units, scratch):
    """Run ``entry(job, unit, scratch)`` for every unit, with the team at ``shared`` (0: alone)."""
    alone = shared == 0 or num_units == 1
    if not alone:
        # Another call has the team: don't wait for it.
        alone = not _exchange_if(shared + _BUSY, 0, 1)
    if alone:
        for unit in range(num_units):
            call_entry(entry, job, unit, scratch)
        return
    store_i64(shared + _ENTRY, entry)
    store_i64(shared + _JOB, job)
    store_i64(shared + _NUM_UNITS, num_units)
    store_i64(shared + _NEXT_UNIT, 0)
    if load_i64(shared + _RUNTIME) != 0:
        store_i64(shared + _NUM_ARRIVED, 0)
        _run_region(shared)
        fetch_add(shared + _BUSY, -1)
        return
    gate = _atomic_load(shared + _GATE)  # closed, nobody at work
    _exchange_if(shared + _GATE, gate, (((gate >> _GENERATION) + 1) << _GENERATION) | _OPEN)
    _wake(shared)
    _work(shared, scratch)
    fetch_add(shared + _GATE, -_OPEN)
    _await_helpers(shared)
    fetch_add(shared + _BUSY, -1)


class Team:
    """``num_threads - 1`` helpers beside the thread that calls.

    Args:
        cores: pin helper i to ``cores[i + 1]``; ``cores[0]`` is the caller's,
            whom we leave where it is.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] | None = None) -> None:
        _check_size(num_threads)
        if cores is not None and len(cores) != num_threads:
            raise ValueError(f"{len(cores)} cores for {num_threads} threads")
        self.num_threads = num_threads
        self._shared = aligned_bytes(_SHARED_BYTES)
        self._shared[:] = 0
        self.address = 0  # what ``run_units`` takes; 0 for a team of one
        self._helpers: list[threading.Thread] = []
        if num_threads == 1 or not _FUTEX:
            return
        self.address = self._shared.ctypes.data
        for index in range(1, num_threads):
            core = None if cores is None else cores[index]
            helper = threading.Thread(
                target=self._help, args=(core,), name=f"attention-{index}", daemon=True
            )
            helper.start()
            self._helpers.append(helper)
        atexit.register(self.close)  # the compiled code must not go before the threads that run it

    def _help(self, core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        scratch = aligned_bytes(SCRATCH_BYTES)
        _serve(self._shared.ctypes.data, scratch.ctypes.data)

    def close(self) -> None:
        """Stop the helpers. Calls with ``address`` after this are an error."""
        if self._helpers:
            self._shared[_STOP] = 1
            _wake_helpers(self.address)
            for helper in self._helpers:
                helper.join()
            self._helpers.clear()
            atexit.unregister(self.close)
        self.address = 0


class OpenMPTeam:
    """The threads of an OpenMP runtime that is in this process: those of its regions in the
    calling thread.

    They don't have to be woken where that thread has just left a region of as many threads. Of
    another size, runtimes end threads and start new ones, again and again.

    Args:
        num_threads: as many as the regions that run between our calls.
        library: the runtime, GNU's or one that knows its entry points (LLVM's, Intel's): the path
            of the very file that is loaded.

    Raises:
        ValueError: the number is out of range.
        OSError: there is no such library, or it isn't an OpenMP runtime.
    """

    def __init__(self, num_threads: int, library: str) -> None:
        _check_size(num_threads)
        runtime = ctypes.CDLL(library)
        if not hasattr(runtime, "GOMP_parallel"):
            raise OSError(
                f"{library} has no GOMP_parallel: it isn't an OpenMP runtime that this can use"
            )
        self.num_threads = num_threads
        self._runtime = runtime
        self._scratches = aligned_bytes(SCRATCH_BYTES * num_threads)
        self._shared = aligned_bytes(_SHARED_BYTES)
        self._shared[:] = 0
        fields = self._shared.view(np.int64)
        fields[_RUNTIME // 8] = ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
        fields[_HELP // 8] = address_of(help_once, types.int64)
        fields[_NUM_THREADS // 8] = num_threads
        fields[_SCRATCHES // 8] = self._scratches.ctypes.data
        self.address = self._shared.ctypes.data  # what ``run_units`` takes


def _check_size(num_threads: int) -> None:
    if not 1 <= num_threads <= MAX_THREADS:
        raise ValueError(f"num_threads={num_threads} is not within 1..{MAX_THREADS}")
