"""How an OpenMP runtime's idle threads wait: they spin for a moment, then
sleep.

Left alone, GNU's spin for 5 to 15 ms after every parallel region and Intel's
for 200. Where another process wants the cores, a thread that spins takes whole
time slices from the thread it waits for. GNU's can be told so while it runs
(``sworker.kernels.spinning``), the others can't, and get a bound. Runtimes read
their variables when they are loaded, which importing torch does.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Final

_SPINS: Final = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "1"}
"""GNU's, in turns of a loop (its own default); LLVM's and Intel's, in ms."""
_POLICY: Final = "OMP_WAIT_POLICY"


def bound_spinning(environ: MutableMapping[str, str], modules: Container[str]) -> None:
    """Bound it for a runtime that is still to be loaded, unless the user has
    decided.

    Args:
        environ: this process's environment.
        modules: that are imported; with torch it is too late.
    """
    if "torch" not in modules and _POLICY not in environ:
        for name, value in _SPINS.items():
            environ.setdefault(name, value)


def spins_on(environ: Container[str]) -> bool:
    """Whether nobody has decided: torch was imported before this package."""
    return not any(name in environ for name in (_POLICY, *_SPINS))


def user_decides(environ: Mapping[str, str]) -> bool:
    """Whether the user has said how long threads spin."""
    return _POLICY in environ or any(
        environ.get(name, value) != value for name, value in _SPINS.items()
    )
