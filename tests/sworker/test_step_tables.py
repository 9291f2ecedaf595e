"""Where a step's rows go, as S-workers that act as one are sent it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from sworker.step_tables import StepTables

NONE = np.empty(0, np.int64)
DECODES = StepTables(
    slots=np.array([5, 17], np.int64),
    tables=np.array([[0, 3, 4], [1, 2, 2]], np.int32),
    context_lens=np.array([40, 9], np.int32),
    later=(),
    first_rows=slice(2, 2),
    first_starts=(),
    copy_sources=np.array([7], np.int64),
    copy_targets=np.array([4], np.int64),
)
PROMPTS = StepTables(
    slots=np.arange(9, dtype=np.int64),
    tables=np.zeros((0, 1), np.int32),
    context_lens=np.empty(0, np.int32),
    later=((slice(0, 2), np.arange(6, dtype=np.int64)), (slice(2, 5), np.arange(3) + 20)),
    first_rows=slice(5, 9),
    first_starts=(0, 3),
    copy_sources=NONE,
    copy_targets=NONE,
)


@pytest.mark.parametrize("tables", [DECODES, PROMPTS])
def test_what_is_unpacked_is_what_was_packed(tables: StepTables) -> None:
    again = StepTables.unpack(tables.pack())
    for name, value in asdict(tables).items():
        np.testing.assert_equal(asdict(again)[name], value, err_msg=name)
    assert again.tables.dtype == again.context_lens.dtype == np.int32
