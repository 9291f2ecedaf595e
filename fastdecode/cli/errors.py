"""What an error says to somebody at a command line.

Errors name the parameters of the Python API: ``kv_memory_gb=-1.0 is not …``, ``… needs learn_lengths``. Whoever typed
options reads their names in the places of those: ``--kv-memory-gb -1.0 is not …``, ``… needs --learn-lengths``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Those that aren't called what sets them.
_OPTIONS = {"r_worker_addresses": "--r-worker", "num_lanes": "--lanes"}
# A word at the start of something, and what it is said to be; but not a part of a path, an address or an option.
_PARAMETER = re.compile(r"(?<![\w./:=-])(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|\[[^]]*\]|[^\s,:;)]+))?(?![\w=])")


def as_typed(message: str, parameters: Collection[str]) -> str:
    """An error's message with options in the place of parameters.

    Args:
        parameters: that the command has options for. Of words that are English too (device, model, lanes), only
            those count that stand with a value.
    """

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in parameters or (value is None and "_" not in name):
            return found[0]
        flag = _OPTIONS.get(name, "--" + name.replace("_", "-"))
        return flag if value is None else f"{flag} {value.strip(chr(39)) or value}"

    return _PARAMETER.sub(option, message)
