"""The package's description: README with whole addresses, since PyPI shows it without
the repository. Everything else is in setup.cfg."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

_FILES = "https://github.com/fastdecode/fastdecode/blob/main/"
_IMAGES = "https://raw.githubusercontent.com/fastdecode/fastdecode/main/"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def described(readme: str) -> str:
    """Markdown whose relative links and images have whole addresses."""
    return _LINK.sub(lambda m: f"{m[1]}[{m[2]}]({_IMAGES if m[1] else _FILES}{m[3]})", readme)


if __name__ == "__main__":
    readme = Path(__file__).parent / "README.md"
    setup(
        long_description=described(readme.read_text("utf-8")),
        long_description_content_type="text/markdown",
    )
