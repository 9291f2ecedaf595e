"""What an error says to somebody at a command line.

Errors speak of parameters of the Python API: ``kv_memory_gb=-1.0 is not …``,
``… needs key``. At a command line options stand in their places:
``--kv-memory-gb -1.0 is not …``, ``… needs --key``.
"""

from __future__ import annotations

from collections.abc import Collection

from fastdecode.core.errors import FastDecodeError, Given

# Those that aren't called what sets them.
_OPTIONS = {
    "r_worker_addresses": "--r-worker",
    "num_lanes": "--lanes",
}


def as_typed(error: FastDecodeError, parameters: Collection[str]) -> str:
    """An error's message with options in the place of parameters.

    Args:
        parameters: that the command has options for.
    """

    def option(given: Given) -> str:
        flag = _OPTIONS.get(given.name, "--" + given.name.replace("_", "-"))
        if given.name not in parameters and given.name not in _OPTIONS:
            return str(given)
        if not given.has_value or given.value is True:
            return flag
        return f"{flag} {given.shown.strip(chr(39)) or given.shown}"

    return error.told(option)
