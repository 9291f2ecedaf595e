"""How long idle OpenMP threads spin: bounded before torch is imported, unless
the user has decided."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastdecode.core.host.openmp import (
    bound_spinning,
    is_spinning_chosen,
    spin_longer,
    spins_long,
    spins_on,
)


def test_bounds_both_runtimes() -> None:
    environ: dict[str, str] = {}
    assert spins_on(environ)
    bound_spinning(environ, modules=())
    assert sorted(environ) == ["GOMP_SPINCOUNT", "KMP_BLOCKTIME"]
    assert not spins_on(environ)
    assert not spins_long(environ)
    assert not is_spinning_chosen(environ)
    spin_longer(environ, modules={"torch": None})  # too late
    assert not spins_long(environ)
    spin_longer(environ, modules=())
    assert spins_long(environ)
    assert environ["GOMP_SPINCOUNT"] == "300000"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
def test_the_users_word_stands(name: str) -> None:
    environ = {name: "7"}
    bound_spinning(environ, modules=())
    assert environ[name] == "7"
    assert name != "OMP_WAIT_POLICY" or environ == {name: "7"}
    assert not spins_on(environ)
    spin_longer(environ, modules=())
    assert environ[name] == "7"
    assert spins_long(environ) == (name == "KMP_BLOCKTIME")
    assert is_spinning_chosen(environ) == (name != "KMP_BLOCKTIME")


def test_too_late_with_torch() -> None:
    environ: dict[str, str] = {}
    bound_spinning(environ, modules={"torch": None})
    assert not environ
    assert spins_on(environ)
    assert spins_long(environ)


@pytest.mark.parametrize("module", ["sworker.load.weights", "rworker.worker"])
def test_every_way_in(module: str) -> None:
    decided = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    environ = {name: value for name, value in os.environ.items() if name not in decided}
    code = f"import os, {module}; print(os.environ['GOMP_SPINCOUNT'])"
    command = [sys.executable, "-c", code]
    done = subprocess.check_output(command, env=environ, text=True, timeout=120)
    assert int(done) < 300_000  # GNU's own
