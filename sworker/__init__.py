"""The S-part: every layer that has weights.

Needs the ``sworker`` extra. Importing this package doesn't load torch, but raises a typed error
if it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from fastdecode.core.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("torch", "sworker", "Running a model (the S-part)")
