"""Documents into rows of equal length for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from corpus import Document
from tokenizer import BOS_ID, EOS_ID
from tokenizers import Tokenizer

WAITING = 32
"""Documents among which the one that fills a row best is looked for."""


@dataclass(frozen=True)
class Row:
    """Whole documents, each after a begin token and before an end token; only
    the last is cut off."""

    token_ids: list[int]
    recalled: list[bool]
    """Whether each token lies in a recall span."""


def encode(tokenizer: Tokenizer, page: Document) -> Row:
    """One document, its begin and end tokens included."""
    encoding = tokenizer.encode(page.text, add_special_tokens=False)
    spans = iter(page.recalls)
    start, end = next(spans, (len(page.text), len(page.text)))
    recalled = []
    for _, token_end in encoding.offsets:
        while token_end > end:
            start, end = next(spans, (len(page.text), len(page.text) + 1))
        recalled.append(start < token_end)
    return Row([BOS_ID, *encoding.ids, EOS_ID], [False, *recalled, False])


def pack(
    tokenizer: Tokenizer, pages: Iterator[Document], num_rows: int, row_tokens: int
) -> list[Row]:
    """Fill rows best fit first. Every row begins with a document, so what a
    document asks for is in its row."""
    waiting = [encode(tokenizer, next(pages)) for _ in range(WAITING)]
    rows = []
    for _ in range(num_rows):
        token_ids: list[int] = []
        recalled: list[bool] = []
        while len(token_ids) < row_tokens:
            room = row_tokens - len(token_ids)
            fitting = [row for row in waiting if len(row.token_ids) <= room]
            # The first row takes whatever comes first: always taking the
            # largest would starve the small ones.
            chosen = (
                waiting[0]
                if not token_ids
                else max(fitting or waiting[:1], key=lambda r: len(r.token_ids))
            )
            waiting.remove(chosen)
            waiting.append(encode(tokenizer, next(pages)))
            token_ids += chosen.token_ids
            recalled += chosen.recalled
        rows.append(Row(token_ids[:row_tokens], recalled[:row_tokens]))
    return rows
