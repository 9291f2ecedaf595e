"""How many threads torch and BLAS compute with in tests."""

from __future__ import annotations

from collections.abc import MutableMapping

_TEAMS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def compute_on_one_thread(environ: MutableMapping[str, str]) -> None:
    """In this process, and in those that it starts, unless the user has decided.

    Tests' matrices are small, and other tests run beside them: threads that
    wait for each other after every operator took up to four times the CPU.
    """
    for name in _TEAMS:
        environ.setdefault(name, "1")
