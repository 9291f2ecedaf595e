# mypy: ignore-errors
# Numba's types are not Python's.
"""How functions become machine code: a few entry points, which are kept on
disk, and the parts they are made of.

Left to itself, Numba makes a library with optimised machine code and Python
wrappers of every function, though all but the outermost are only ever linked
into their callers, to be optimised and compiled there once more: two fifths of
the time that compiling a kernel takes. So parts get none of this.

What is kept on disk is kept under a name that tells the sources of the whole
package and Numba's version: Numba looks at the time stamp of one file only, and
fails on what a version of ours left there whose classes are no longer where
they were. Each signature has a file of its own, with a checksum at its end;
Numba's own index of them loses entries where two processes write to it, and a
damaged one fails every later run. What can't be read is compiled, what can't be
written isn't kept: no job fails for it.
"""

from __future__ import annotations

import logging
from functools import cache
from hashlib import sha256
from pathlib import Path

import numba
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_CHECKSUM_BYTES = sha256().digest_size


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
def _sources_digest():
    digest = sha256(numba.__version__.encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class _KeptFiles(IndexDataCacheFile):
    """A file for each signature, without an index."""

    def save(self, key, data):
        content = self._dump(data)
        with self._open_for_write(self._data_path(self._name_of(key))) as file:
            file.write(content)
            file.write(sha256(content).digest())

    def load(self, key):
        name = self._name_of(key)
        try:
            content = Path(self._data_path(name)).read_bytes()
        except FileNotFoundError:
            return None
        if sha256(content[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
            raise OSError(f"{name} is damaged")
        return self._load_data(name)  # it stops where the checksum begins

    def _name_of(self, key):
        return self._data_name_pattern.format(
            number=int(sha256(repr(key).encode()).hexdigest()[:12], 16)
        )


class _PackageCache(FunctionCache):
    """Numba's own, but for its files, and for its errors, of which the first is told to the log."""

    complained = False

    def __init__(self, py_func):
        super().__init__(py_func)
        name = f"{self._impl.filename_base}-{_sources_digest()}"
        self._cache_file = _KeptFiles(self._cache_path, name, source_stamp="")

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # of a file's content, anything
            _complain(error)
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _complain(error)


def _complain(error):
    if not _PackageCache.complained:
        _PackageCache.complained = True
        logger.warning(
            "compiled kernels could not be read from or kept on disk, so they are compiled once "
            "more: %s: %s; if this comes again, name a directory that can be written to in "
            "NUMBA_CACHE_DIR",
            type(error).__name__,
            error,
        )


def entry(function):
    """A function that is called from Python or by its address; compiled once a
    host, where its disk allows."""
    dispatcher = njit(nogil=True, no_cfunc_wrapper=True)(function)
    try:
        dispatcher._cache = _PackageCache(function)
    except (OSError, RuntimeError) as error:  # no directory can be written to
        _complain(error)
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
