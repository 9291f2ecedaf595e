"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not there where only the GPU tests are run.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # The same examples every time, and no example fails for being slow:
    # machines differ, and are busy.
    settings.register_profile(
        "everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("everywhere")

# Tests are imported by path, not as a package; this lets them import the modules that they share.
sys.path.insert(0, str(Path(__file__).parent))

from inherited_signals import hear_interrupts
from limited_steps import StepLimit

from examples import TRIES_ALL

hear_interrupts()
# Before anything imports torch or NumPy's BLAS, which read it when they are loaded. Tests' matrices
# are small: threads that wait for each other after every operator took four times the CPU.
if not TRIES_ALL:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
# Tests start a hundred processes, and to compile modules takes a fifth of a job's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# As ``fastdecode`` has it: collecting tests and compiling kernels make hardly any garbage.
gc.set_threshold(10_000)


# They take longest and begin first: some wait for jobs while others compile kernels.
LONGEST = (
    "mpi/test_placement_mpi.py",
    "mpi/test_generate_mpi.py",
    "engine/test_feature_pairs.py",
    "engine/test_placements.py",
    "cli/test_generate_zmq.py",
    "cpu_kernels/test_attend_kernels.py",
    "mpi/test_transport_mpi.py",
    "instances/test_hung_and_lying.py",
    "engine/test_tokens_equal_transformers.py",
    "server/test_server_life.py",
    "sworker/test_families.py",
    "instances/test_instance_processes.py",
    "cli/test_launch.py",
    "engine/test_independence.py",
    "instances/test_stranded.py",
    "engine/test_simulated_faults.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they stand."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep modules and tests out of collections, which took half of each engine's set-up."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take a GPU by default: only tests that are for one do here, and their processes."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What torch draws without a generator doesn't depend on which tests ran before."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture
def limit(tmp_path: Path) -> StepLimit:
    """Of a job whose processes the test signals."""
    return StepLimit(tmp_path)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, seed=None, **config) -> Path``: a small random
    model directory, made once a session."""
    from checkpoints import save_checkpoint  # needs transformers

    made: dict[str, Path] = {}

    def make(family: str, seed: int | None = None, **overrides: Any) -> Path:
        key = json.dumps([family, seed, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            save_checkpoint(made[key], family, overrides, seed)
        return made[key]

    return make
