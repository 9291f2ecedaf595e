"""An R-worker's host, and a planner's laptop, have no torch: these packages
must import without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PACKAGES = (
    "rworker",
    "cpu_kernels",
    "cost_model",
    "fastdecode.core",
    "fastdecode.wire",
    "fastdecode.schedule",
    "fastdecode.text",
    "fastdecode.openai",
    "fastdecode.jobs",
    "fastdecode.server",
    # One way into an engine, also of a server that has none of its own.
    "fastdecode.engine.service",
    "fastdecode.engine.instances.cluster",
    "fastdecode.engine.llm",
)

FORBIDDEN = ("torch", "safetensors", "transformers", "tokenizers")

SCRIPT = """
import importlib, pkgutil, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ImportError(f"{name} is not for this package")

sys.meta_path.insert(0, Forbidden())
package = importlib.import_module(sys.argv[1])
path = getattr(package, "__path__", None)
names = [sys.argv[1]]
if path is not None:
    names = [module.name for module in pkgutil.walk_packages(path, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_without_torch(package: str) -> None:
    # Which is where tokenizers are read.
    forbidden = FORBIDDEN[: 3 if package == "fastdecode.text" else 4]
    command = [sys.executable, "-c", SCRIPT, package, *forbidden]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "the package has no modules: the test looks at nothing"


def test_the_test_would_notice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "sworker", *FORBIDDEN],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "torch is not for this package" in done.stderr


@pytest.mark.parametrize("module", ["engine.instances.cluster", "engine.setup.launch", "cli.main"])
def test_whoever_runs_no_mpi_job_does_not_join_one(module: str) -> None:
    """MPI's library would take over signals, and may be missing."""
    code = f"import sys, fastdecode.{module}; assert 'mpi4py' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
