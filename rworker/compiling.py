"""A second process that compiles kernels while this one does: Numba compiles in one thread.

The locks of the machine code on disk have one process wait for what the other compiles.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Final

from cpu_kernels import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId
from fastdecode.core.host.cpus import usable_cpus
from fastdecode.core.host.processes import end_with, python_command
from fastdecode.core.spec import AttentionSpec
from rworker.instructions import Prepare

_BOOT: Final = "from rworker.compiling import main; main(given)"
ROW_LOOPS: Final = "sworker.kernels.row_loops"  # what an S-worker on a CPU needs


@contextlib.contextmanager
def compiled_by_two(prepare: Prepare) -> Iterator[None]:
    """Start the second process if, within, a kernel turns out not to be on disk."""
    from cpu_kernels.codegen import kept

    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        if not started and len(usable_cpus()) > 1:
            with contextlib.suppress(OSError):  # then this process compiles everything
                started.append(_start(prepare))

    was_collecting = gc.isenabled()
    gc.disable()  # compilers make many objects, and keep nearly all of them
    token = kept.on_missing.set(start)
    try:
        yield
    finally:
        kept.on_missing.reset(token)
        if was_collecting:
            gc.enable()
        for process in started:
            process.kill()
            process.wait()


def _start(prepare: Prepare) -> subprocess.Popen[bytes]:
    has_loops = "sworker" in sys.modules and prepare.activation_dtype is not DType.FLOAT16
    work = {
        "modules": [ROW_LOOPS] * has_loops,
        "layout": asdict(prepare.layout),
        "groups": sorted({x.num_q_heads // x.num_kv_heads for x in prepare.attention}),
        "source": prepare.activation_dtype.value,
    }
    return subprocess.Popen(
        python_command(_BOOT, json.dumps(work)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(text: str) -> None:
    """Compile the S-worker's loops, and attention of several queries a sequence.

    The process that asks compiles the rest: about half, and no part of a kernel twice.
    """
    from cpu_kernels.dispatch import plan_attend
    from cpu_kernels.kernels import compare_levels

    end_with(os.getppid(), "the process that compiles kernels")
    gc.disable()
    work = json.loads(text)
    for name in work["modules"]:
        importlib.import_module(name).compiled(is_wide=work["source"] == "float32")
    for group in work["groups"]:
        layout = BlockLayout(**work["layout"])
        plan_attend(layout, group, work["source"], True, None, compare_levels)


def prepared(layout: BlockLayout, heads: Iterable[int], dtype: DType) -> Prepare:
    """Return what has the kernels compiled for a layout and these numbers of query heads."""
    specs = [AttentionSpec(n, layout.num_kv_heads, layout.head_dim, scale=1.0) for n in heads]
    return Prepare(HolderId(0), layout, 1, tuple(specs), dtype)
