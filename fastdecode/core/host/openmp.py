"""How an OpenMP runtime's idle threads wait: they spin for a moment, then sleep.

Left alone, GNU's spin for 5 to 15 ms after every parallel region and Intel's for 200. Where
anything else wants the cores, such as an R-worker in another process, a thread that spins takes
whole time slices from the one it waits for: so a bound is set. An engine that computes in one
thread alone spins for longer, and watches whether others want the cores
(``sworker.kernels.threads``). Runtimes read their variables when they are loaded, which importing
torch does."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Final

_SPINS: Final = {"GOMP_SPINCOUNT": "6000", "KMP_BLOCKTIME": "1"}
"""GNU's, in turns of a loop; LLVM's and Intel's, in ms. With fewer of GNU's an idle machine is
slower, with more a busy one: measured in turns (docs/evidence/measurements.md)."""
_LONG: Final = "300000"  # GNU's own default
_POLICY: Final = "OMP_WAIT_POLICY"


def bound_spinning(environ: MutableMapping[str, str], modules: Container[str]) -> None:
    """Bound it for a runtime that is not loaded yet, unless the user has decided.

    Args:
        modules: Modules that are imported. With torch among them it is too late.
    """
    if "torch" not in modules and _POLICY not in environ:
        for name, value in _SPINS.items():
            environ.setdefault(name, value)


def spins_on(environ: Container[str]) -> bool:
    """Whether nobody has decided: torch was imported before this package."""
    return not any(name in environ for name in (_POLICY, *_SPINS))


def spin_longer(environ: MutableMapping[str, str], modules: Container[str]) -> None:
    """Take GNU's bound back for a runtime that is still to be loaded, unless the
    user has set it: an engine of this process will watch its threads."""
    if "torch" not in modules and environ.get("GOMP_SPINCOUNT") == _SPINS["GOMP_SPINCOUNT"]:
        environ["GOMP_SPINCOUNT"] = _LONG


def spins_long(environ: Mapping[str, str]) -> bool:
    """Whether GNU's threads spin for milliseconds, and the user hasn't said so."""
    return _POLICY not in environ and environ.get("GOMP_SPINCOUNT", _LONG) == _LONG


def is_spinning_chosen(environ: Mapping[str, str]) -> bool:
    """Whether the user has said how long GNU's threads spin."""
    ours = (_SPINS["GOMP_SPINCOUNT"], _LONG)
    return _POLICY in environ or environ.get("GOMP_SPINCOUNT", _LONG) not in ours
