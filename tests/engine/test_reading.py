"""``docs/design/reading.md`` follows one token through the functions of a run, in order."""

from __future__ import annotations

import re
import sys

import pytest
from reading import ROOT, Entered, entered_by_a_decode_step

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="qualified names of code objects are new in Python 3.11"
)
MODEL = str(ROOT / "examples" / "model" / "checkpoint")
PATH = (ROOT / "docs" / "design" / "reading.md").read_text("utf-8")
ROW = re.compile(r"^\| \d+ \| `(?P<file>\S+)` \| `(?P<function>\S+)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def entered() -> Entered:
    with pytest.MonkeyPatch.context() as patch:
        return entered_by_a_decode_step(MODEL, patch, r_workers=2, prefix_cache="off")


def test_reading_path_follows_a_token(entered: Entered) -> None:
    """Compare each section alone: R-workers are threads of their own and receive a step while
    the S-worker is still sending it."""
    sections = [ROW.findall(section) for section in PATH.split("\n## ")]
    assert [len(listed) for listed in sections] == [0, 4, 7, 3, 2]
    for number, listed in enumerate(sections):
        first = [entered.first_call(*row, in_step=number > 1) for row in listed]
        assert first == sorted(first), listed
