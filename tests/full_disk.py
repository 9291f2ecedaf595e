"""A full disk's part, played by a limit on the length of this process's files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What a full disk is like: the kernel lets no file of this process get longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
