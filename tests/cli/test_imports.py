"""A command imports what it needs: its start is most of what a short one takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastdecode.cli.main import COMMANDS, main

DECLARATIONS = {"fastdecode.core.config", "fastdecode.core.config.options"}
OURS = "fastdecode", "cost_model", "rworker", "sworker", "cpu_kernels"
SCRIPT = """
import json, sys
from fastdecode.cli.main import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
HARDWARE = "--gpu", "A10", "--cpu", "EPYC 7452"
SIZE = "size", *HARDWARE, "--model", "Llama-2 7B", "--seq-len", "1024"


def imported(*argv: str) -> set[str]:
    """All modules after the command, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(argv)], capture_output=True, text=True, check=True
    )
    assert done.stdout
    return set(json.loads(done.stderr))


def commands_of(modules: set[str]) -> set[str]:
    ours = [f"fastdecode.cli.{command.module}" for command in COMMANDS.values()]
    return {m for m in modules if any(m.startswith(each) for each in ours)}


def test_the_list_of_commands_imports_none_of_them() -> None:
    modules = imported("--help")
    assert not commands_of(modules)
    assert not modules & {"numpy", "numba", "torch", "fastdecode.core.sequence"}
    modules -= DECLARATIONS
    assert not any(m.startswith(("fastdecode.core.config", "cost_model")) for m in modules)


def test_the_end_of_a_command_looks_for_no_garbage() -> None:
    counts = "print(gc.get_freeze_count(), len(gc.get_objects()))"
    before = f"import atexit, gc\natexit.register(lambda: {counts})"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{SCRIPT}", json.dumps(["--help"])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    frozen, left = map(int, done.stdout.splitlines()[-1].split())
    assert frozen > 1000 > left


def test_the_help_of_size_imports_neither_numpy_nor_the_search() -> None:
    modules = imported("size", "--help")
    assert commands_of(modules) == {"fastdecode.cli.size"}
    heavy = {"numpy", "numba", "torch", "fastdecode.core.sequence", "cost_model.plans.search"}
    assert not modules & heavy


def test_size_imports_no_engine_and_no_numpy() -> None:
    modules = imported(*SIZE)
    assert commands_of(modules) == {"fastdecode.cli.size"}
    heavy = {"numpy", "numba", "torch", "fastdecode.core.sequence", "fastdecode.core.holders"}
    assert not modules & heavy
    packages = {m.split(".")[1] for m in modules if m.startswith("fastdecode.")}
    assert packages == {"cli", "core", "jobs", "schedule", "wire"}
    assert {m for m in modules if m.startswith("fastdecode.schedule.")} <= {
        "fastdecode.schedule.hybrid", "fastdecode.schedule.hybrid.forecast",
        "fastdecode.schedule.times",
    }  # fmt: skip


def test_an_unknown_command_is_answered_with_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serv"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)
