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

from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from cpu_kernels.codegen.kept import keep

_PACKAGE = Path(__file__).parents[1]


_UNUSED_PASSES = frozenset({
    "annotate_types", "dump_parfor_diagnostics", "find_literally", "inline_closure_likes",
    "inline_inlinables", "inline_overloads", "LiteralPropagation", "literal_unroll",
    "make_function_op_code_to_jit_function", "nopython_rewrites",
    "nopython_supported_feature_validation", "rewrite_semantic_constants",
    "Rewrite dynamic raises", "with_lifting",
})  # fmt: skip
"""Numba's passes for what this code has none of: closures, comprehensions, exceptions, and
expressions of whole arrays."""


class _EntryLibrary(JITCodeLibrary):
    """Machine code that is optimised once. Numba's own is optimised twice: before and after
    it prunes reference counts."""

    def _optimize_final_module(self):
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)


class _NoCodegen:
    """In place of the engine that would have to know the part's machine code."""

    @staticmethod
    def set_env(name, environment):
        pass


class _PartLibrary(JITCodeLibrary):
    """LLVM IR to link into the callers' libraries, which optimise it."""

    codegen = _NoCodegen

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalized = True


_CHOSEN = {}  # signatures, by function and types of arguments


class _Typing:
    """Numba's typing context, which remembers the signatures that it chose. Numba itself tries
    all of them again at each call: a fifth of the time that compiling a kernel takes."""

    def __init__(self, context):
        self._context = context

    def __getattr__(self, name):
        return getattr(self._context, name)

    def resolve_function_type(self, function, args, keywords):
        if keywords:
            return self._context.resolve_function_type(function, args, keywords)
        key = (function, tuple(args))
        if _CHOSEN.get(key) is None:
            _CHOSEN[key] = self._context.resolve_function_type(function, args, keywords)
        return _CHOSEN[key]


class EntryCompiler(Compiler):
    """Numba's own, but for typing, passes that find nothing here, and where it writes to."""

    library_type = _EntryLibrary

    def define_pipelines(self):
        self.state.typingctx = _Typing(self.state.typingctx)
        codegen, name = self.state.targetctx.codegen(), self.state.func_id.func_qualname
        self.state.library = self.library_type(codegen, name)
        self.state.library.enable_object_caching()
        pipelines = super().define_pipelines()
        for each in pipelines:
            each.passes = [x for x in each.passes if x[0].name() not in _UNUSED_PASSES]
        return pipelines


class _PartCompiler(EntryCompiler):
    library_type = _PartLibrary


@cache
def _sources():
    return sorted(_PACKAGE.rglob("*.py"))


def entry(function):
    """A function that is called from Python or by its address; compiled once a
    host, where its disk allows."""
    dispatcher = njit(
        nogil=True, no_cfunc_wrapper=True, pipeline_class=EntryCompiler, error_model="numpy"
    )(function)
    keep(dispatcher, function, *_sources())
    return dispatcher


part = njit(
    nogil=True,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    pipeline_class=_PartCompiler,
    error_model="numpy",  # no exceptions where a divisor is 0: none is
)
"""A function that only entries and other parts call. It is compiled once more
for each literal argument, a type of its own: where that is not wanted,
``np.int64(0)`` is no literal."""


def compiled_job(function, *sources):
    """Compile a function that takes a job's address, for any thread to call: a ``CFunc``. It
    is compiled once a host, where its disk allows.

    Args:
        sources: the files of all that it is made from, but for this one.
    """
    signature = (types.int64,), types.void
    options = {"error_model": "numpy"}
    compiled = CFunc(function, signature, {}, options, pipeline_class=EntryCompiler)
    keep(compiled, function, Path(__file__), *sources)
    compiled.compile()
    return compiled


def address_of(dispatcher, *signature) -> int:
    """Compile an entry for these argument types, or load it from the disk, and
    return where it is."""
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
