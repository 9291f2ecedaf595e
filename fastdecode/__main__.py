"""``python -m fastdecode``: the ``fastdecode`` command of this very Python."""

from __future__ import annotations

import sys

from fastdecode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
