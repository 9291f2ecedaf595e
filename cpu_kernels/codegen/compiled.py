# mypy: ignore-errors
# Numba's types are not Python's.
"""How functions become machine code: a few entry points, which are kept on disk, and the parts
they are made of.

``translate`` makes LLVM IR of an entry and of all that it calls, in one module. Numba does the
rest: wrappers for Python, machine code, and what is kept on disk (``kept``) under a name that
tells the sources of the whole package."""

from __future__ import annotations

import gc
from functools import cache, cached_property
from pathlib import Path

from llvmlite import ir
from numba import njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.callconv import CPUCallConv
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, compile_result
from numba.core.cpu import CPUContext
from numba.core.funcdesc import FunctionDescriptor
from numba.core.lowering import Environment

from cpu_kernels.codegen.kept import keep
from cpu_kernels.codegen.translate import Part, Translation, Value
from cpu_kernels.variant import VariantType

_PACKAGE = Path(__file__).parents[1]

part = Part


class _Library(JITCodeLibrary):
    """Machine code that is optimised once. Numba's own is optimised function by function, then
    before and after it prunes reference counts."""

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        manager, builder = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)


class _Calls(CPUCallConv):
    """Numba's calling convention, for callers that pass no exception on."""

    def return_status_propagate(self, builder, status):
        pass


class _Context(CPUContext):
    call_conv = cached_property(_Calls)


class EntryCompiler(CompilerBase):
    """In place of Numba's compiler."""

    def compile_extra(self, func):
        was_collecting = gc.isenabled()
        gc.disable()  # compilers make many objects, and keep nearly all of them
        try:
            return self._compile(func)
        finally:
            if was_collecting:
                gc.enable()

    def _compile(self, func):
        state, context = self.state, self.state.targetctx
        context.__class__ = _Context  # it is this function's own
        identity = FunctionIdentity.from_function(func)
        library = _Library(context.codegen(), identity.func_qualname)
        library.enable_object_caching()
        module = library.create_ir_module(identity.unique_name)
        with context.push_code_library(library):
            described, environment, helper = self._translate(identity, module)
            library.add_ir_module(module)
            function = None
            if state.flags.no_cpython_wrapper:
                context.create_cfunc_wrapper(library, described, environment, helper)
            else:
                context.create_cpython_wrapper(library, described, environment, helper, True)
                function = context.get_executable(library, described, environment)
        return compile_result(
            typing_context=state.typingctx,
            target_context=context,
            entry_point=function,
            library=library,
            call_helper=helper,
            signature=described.restype(*described.argtypes),
            fndesc=described,
            environment=environment,
            objectmode=False,
            lifted=(),
            metadata={},
            reload_init=[],
        )

    def _translate(self, identity, module):
        """The function that Numba's wrappers call."""
        args, context = self.state.args, self.state.targetctx
        translation = Translation(self.state.typingctx, context, module)
        known = [x.variant if isinstance(x, VariantType) else Value(x, None) for x in args]
        found = translation.function(Part(identity.func), known)
        described = FunctionDescriptor(
            True, identity.modname, identity.func_qualname, identity.unique_name, "", None,
            found.type or types.none, None, tuple(identity.arg_names), (),
            mangler=context.mangler, argtypes=tuple(args), uid=identity.unique_id,
        )  # fmt: skip
        context.declare_env_global(module, context.get_env_name(described))
        wrapper = context.declare_function(module, described)
        builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
        helper = context.call_conv.init_call_helper(builder)
        given = context.call_conv.decode_arguments(builder, args, wrapper)
        kept = [x for x, kind in zip(given, args, strict=True) if not isinstance(kind, VariantType)]
        result = builder.call(found.llvm, kept)
        if found.type is None:
            result = context.get_dummy_value()
        result = context.get_return_value(builder, described.restype, result)
        context.call_conv.return_value(builder, result)
        return described, Environment.from_fndesc(described), helper


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


def compiled_job(function, *sources):
    """Compile a function that takes a job's address, for any thread to call: a ``CFunc``. It
    is compiled once a host, where its disk allows.

    Args:
        sources: the files of all that it is made from, but for this package's.
    """
    signature = (types.int64,), types.void
    options = {"error_model": "numpy"}
    compiled = CFunc(function, signature, {}, options, pipeline_class=EntryCompiler)
    keep(compiled, function, *_sources(), *sources)
    compiled.compile()
    return compiled


def address_of(dispatcher, *signature) -> int:
    """Compile an entry for these argument types, or load it from the disk, and
    return where it is."""
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
