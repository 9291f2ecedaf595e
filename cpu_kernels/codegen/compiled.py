# mypy: ignore-errors
# Numba's types are not Python's.
"""How functions become machine code: a few entry points, which are kept on
disk, and the parts they are made of.

Left to itself, Numba makes a library with optimised machine code and Python
wrappers of every function, though all but the outermost are only ever linked
into their callers, to be optimised and compiled there once more: two fifths of
the time that compiling a kernel takes. So parts get none of this.

What is kept on disk (``kept``) is kept under a name that tells the sources of
the whole package.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from cpu_kernels.codegen.kept import digest, keep

_PACKAGE = Path(__file__).parents[1]


class _NoCodegen:
    """In place of the engine that would have to know the part's machine code."""

    @staticmethod
    def set_env(name, environment):
        pass


class _PartLibrary(JITCodeLibrary):
    """LLVM IR to link into the callers' libraries."""

    codegen = _NoCodegen

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's own, but for the library that it writes to."""

    def define_pipelines(self):
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), "part")
        return super().define_pipelines()


@cache
def _sources():
    return sorted(_PACKAGE.rglob("*.py"))


def sources_digest() -> str:
    """It changes with this package's sources and Numba's version."""
    return digest(*_sources())


def entry(function):
    """A function that is called from Python or by its address; compiled once a
    host, where its disk allows."""
    dispatcher = njit(nogil=True, no_cfunc_wrapper=True)(function)
    keep(dispatcher, function, *_sources())
    return dispatcher


part = njit(
    nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_PartCompiler
)
"""A function that only entries and other parts call. It is compiled once more
for each literal argument, a type of its own: where that is not wanted,
``np.int64(0)`` is no literal."""


def address_of(dispatcher, *signature) -> int:
    """Compile an entry for these argument types, or load it from the disk, and
    return where it is."""
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
