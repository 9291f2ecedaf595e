"""MPI's library, loaded but not joined: whoever imports ``mpi4py.MPI`` by itself
initialises MPI in that moment, for threads that call all at once, and so that
its failure ends the job. ``joining`` does it as we need it.
"""

from __future__ import annotations

import os
from typing import Final

import mpi4py

# What we'd like of Open MPI unless the user says otherwise: waiting ranks leave
# their core to those that compute; MPI_Init says that it failed, and doesn't end
# the job with an exit code of its own.
_OPEN_MPI_DEFAULTS: Final = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_mpi_initial_errhandler": "mpi_errors_return",
}
for _name, _value in _OPEN_MPI_DEFAULTS.items():
    os.environ.setdefault(_name, _value)
# We do it ourselves, in a way that lets other threads run meanwhile.
mpi4py.rc.initialize = False
# mpi4py would call MPI_Finalize when Python ends, without a deadline.
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

__all__ = ["MPI"]
