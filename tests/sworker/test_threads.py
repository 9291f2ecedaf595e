"""Which OpenMP runtime is torch's, and the threads of a thread's own regions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_native_id

import pytest
import torch

from fastdecode import LLM, SamplingParams
from sworker.kernels.threads import end_own_threads, openmp_library

OWN = Path(torch.__file__).parent / "lib" / "libgomp.so.1"


@pytest.mark.parametrize(
    ("loaded", "found"),
    [
        (("/usr/lib/libgomp.so.1", OWN, "/usr/lib/libm.so.6"), str(OWN)),
        (("/opt/conda/lib/libiomp5.so",), "/opt/conda/lib/libiomp5.so"),
        (("/opt/a/libgomp.so.1", "/opt/b/libgomp.so.1"), None),
        (("/usr/lib/libm.so.6",), None),
    ],
    ids=str,
)
def test_torchs_own_or_the_only_one(
    loaded: tuple[str | Path, ...], found: str | None, tmp_path: Path
) -> None:
    lines = ["7f00-7f01 rw-p 00000000 00:00 0", "7f02-7f03 rw-p 00000000 00:00 0   [heap]"]
    span = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 12345"
    lines += [f"{span}      {path}" for path in loaded for _ in range(2)]
    (tmp_path / "maps").write_text("\n".join(lines))
    assert openmp_library(tmp_path / "maps") == found


def test_the_one_that_is_loaded(tmp_path: Path) -> None:
    library = openmp_library()
    assert library is not None and Path(library).is_file()
    assert openmp_library(tmp_path / "nowhere") is None


def test_threads_of_own_regions_end_and_come_again() -> None:
    library = openmp_library()
    if library is None or "libgomp" not in library:
        pytest.skip("needs torch with GNU's OpenMP runtime")
    tasks = Path("/proc/self/task")
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            others = set(os.listdir(tasks))
            other.submit(run_region, library).result()
            helpers = set(os.listdir(tasks)) - others - {str(other.submit(get_native_id).result())}
            assert len(helpers) == 2
            end_own_threads()  # this thread's are not the other's
            assert helpers <= set(os.listdir(tasks))
            assert other.submit(end_own_threads).result()
            assert not helpers & set(os.listdir(tasks))


def test_an_engine_that_computes_alone_ends_those_of_its_caller(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    library = openmp_library()
    if library is None or "libgomp" not in library:
        pytest.skip("needs torch with GNU's OpenMP runtime")
    tasks = Path("/proc/self/task")

    def new_helpers() -> set[str]:
        before = set(os.listdir(tasks))
        run_region(library)
        helpers = set(os.listdir(tasks)) - before
        assert len(helpers) == 2
        return helpers

    end_own_threads()
    helpers = new_helpers()
    with LLM(str(tiny_checkpoint("llama")), kv_memory_gb=0.01, device="cpu") as llm:
        assert not helpers & set(os.listdir(tasks))
        helpers = new_helpers()  # the script uses torch between two batches
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        assert not helpers & set(os.listdir(tasks))


def run_region(library: str) -> None:
    """A parallel region of three threads, which do nothing."""
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    ctypes.CDLL(library).GOMP_parallel(nothing, None, 3, 0)
