"""An R-worker, or whatever else writes files of kept KV blocks, that is killed
(SIGKILL) in the middle of a write: of the one that is so many after the first,
a part is written. Which it is is the seed's, and not the clock's.

As a program it is ``fastdecode r-worker``: ``dying.py WRITES SHARE OPTION...``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from rworker.tiers import slots  # noqa: E402
from rworker.tiers.format import PAGE_BYTES  # noqa: E402

WRITES_A_BLOCK = 3
"""Its entry is cleared, its layers are written, its entry is written."""


def die_in_write(number: int, share: float) -> None:
    """This process ends in its ``number``-th write to a file of kept blocks,
    from 1 on; 0: it lives.

    Args:
        share: of that write, what is done.
    """
    if not number:
        return
    count = itertools.count(1)
    write_whole, write_entry = slots._write_whole, slots.SlotFile._write_entry

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # nothing comes after it

    def dying_whole(fd: int, data: Any, at: int) -> None:
        if next(count) != number:
            write_whole(fd, data, at)
            return
        pages = int(share * len(data)) // PAGE_BYTES  # as direct writes want it
        write_whole(fd, data[: pages * PAGE_BYTES], at)
        end()

    def dying_entry(self: slots.SlotFile, slot: int, data: bytes) -> None:
        if next(count) != number:
            write_entry(self, slot, data)
            return
        write_entry(self, slot, data[: int(share * len(data))])
        end()

    slots._write_whole = dying_whole
    slots.SlotFile._write_entry = dying_entry  # type: ignore[method-assign]


def main() -> None:
    from fastdecode.cli.main import main as fastdecode

    number, share, *options = sys.argv[1:]
    die_in_write(int(number), float(share))
    sys.argv = ["fastdecode", "r-worker", *options]
    sys.exit(fastdecode())


if __name__ == "__main__":
    main()
