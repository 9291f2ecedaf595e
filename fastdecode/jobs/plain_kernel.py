# mypy: ignore-errors
# Numba's types are not Python's.
"""Compiled reading of JSON lines, for ``plain_lines``: a line's shape, and its id.

A line's **shape** is its bytes without the contents of its free values: the id,
the prompt, texts of messages, and the like, whose content no check looks at.
The free values are checked here: strings are whole, valid UTF-8 and without
lone surrogates, whole numbers have at most 18 digits. All other bytes are kept
as they are, so that lines of one shape are one JSON document but for what is
free. A line that this reading is unsure of has no shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import njit

from cpu_kernels.codegen.kept import keep

MAX_SHAPE_BYTES = 4096
MAX_DEPTH = 8
MAX_ID_BYTES = 128
"""One block of the hash."""
MAX_CONVERSATION_BYTES = 1024
MAX_DIGITS = 18
EMPTY, TEXT, WHOLE, WHOLES = 1, 2, 3, 4
"""What stands in a shape for a free value; no line has these bytes elsewhere."""

# --- keys whose values may be free, by where they stand
# ------------------------------------------------------------------------------

_KEYS = (
    b"id", b"custom_id", b"prompt", b"prompt_token_ids", b"seed", b"conversation_id", b"user",
    b"body", b"messages", b"content", b"text",
)  # fmt: skip
(
    _ID, _CUSTOM_ID, _PROMPT, _TOKENS, _SEED, _CONVERSATION, _USER, _BODY, _MESSAGES, _CONTENT,
    _TEXT,
) = range(1, len(_KEYS) + 1)  # fmt: skip
_KEY_BYTES = np.frombuffer(b"".join(_KEYS), np.uint8)
_KEY_ENDS = np.cumsum([len(key) for key in _KEYS])
_QUOTE, _BACKSLASH, _MINUS, _ZERO, _NINE = (ord(c) for c in '"\\-09')
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST, _COMMA = (ord(c) for c in "{}[],")
_NEWLINE, _SPACE, _U = ord("\n"), ord(" "), ord("u")
_SIMPLE_ESCAPES = np.frombuffer(b'"\\/bfnrt', np.uint8)


@njit(nogil=True)
def _key_of(data, start, end):
    """The number of a key, 0 for another one."""
    begin = 0
    for k in range(_KEY_ENDS.size):
        size = _KEY_ENDS[k] - begin
        if size == end - start:
            i = 0
            while i < size and data[start + i] == _KEY_BYTES[begin + i]:
                i += 1
            if i == size:
                return k + 1
        begin = _KEY_ENDS[k]
    return 0


@njit(nogil=True)
def _is_text(depth, keys):
    """Whether a string that stands here is free."""
    key = keys[depth]
    if depth == 1:
        return key in (_ID, _CUSTOM_ID, _PROMPT, _CONVERSATION)
    if keys[1] != _BODY:
        return False
    if depth == 2:
        return key in (_PROMPT, _CONVERSATION, _USER)
    if keys[2] != _MESSAGES:
        return False
    if depth == 4:
        return key == _CONTENT
    return depth == 6 and keys[4] == _CONTENT and key == _TEXT


@njit(nogil=True)
def _is_whole(depth, keys):
    """Whether a whole number that stands here is free."""
    if depth == 1:
        return keys[1] in (_ID, _SEED)
    return depth == 2 and keys[1] == _BODY and keys[2] == _SEED


@njit(nogil=True)
def _is_list_of_wholes(depth, keys):
    if depth == 1:
        return keys[1] == _TOKENS
    return depth == 2 and keys[1] == _BODY and keys[2] == _PROMPT


# --- values; each gives where it ends, or -1: it is unsure
# ------------------------------------------------------------------------------


@njit(nogil=True)
def _hex(data, start, end):
    """Four digits' value, or -1."""
    if start + 4 > end:
        return -1
    value = 0
    for i in range(start, start + 4):
        c = data[i] | 32
        if 48 <= c <= 57 and data[i] <= 57:
            value = value * 16 + c - 48
        elif 97 <= c <= 102:
            value = value * 16 + c - 87
        else:
            return -1
    return value


@njit(nogil=True)
def _escape_end(data, i, end):
    """The end of an escape whose backslash is at ``i``."""
    if i + 1 >= end:
        return -1
    if data[i + 1] != _U:
        for known in _SIMPLE_ESCAPES:
            if data[i + 1] == known:
                return i + 2
        return -1
    value = _hex(data, i + 2, end)
    if value < 0 or 0xDC00 <= value < 0xE000:
        return -1
    if value < 0xD800 or value >= 0xE000:
        return i + 6
    if i + 8 > end or data[i + 6] != _BACKSLASH or data[i + 7] != _U:
        return -1
    low = _hex(data, i + 8, end)
    return i + 12 if 0xDC00 <= low < 0xE000 else -1


@njit(nogil=True)
def _character_end(data, i, end):
    """The end of a character of several bytes of UTF-8, without surrogates."""
    first = data[i]
    low, high = 0x80, 0xBF
    if 0xC2 <= first <= 0xDF:
        more = 1
    elif 0xE0 <= first <= 0xEF:
        more = 2
        low = 0xA0 if first == 0xE0 else 0x80
        high = 0x9F if first == 0xED else 0xBF
    elif 0xF0 <= first <= 0xF4:
        more = 3
        low = 0x90 if first == 0xF0 else 0x80
        high = 0x8F if first == 0xF4 else 0xBF
    else:
        return -1
    if i + more >= end or not low <= data[i + 1] <= high:
        return -1
    for k in range(2, more + 1):
        if not 0x80 <= data[i + k] <= 0xBF:
            return -1
    return i + more + 1


@njit(nogil=True)
def _text_end(data, start, end, plain):
    """Where a free string's closing quote stands; ``start``: behind the opening
    one. ``plain``: without escapes."""
    i = start
    while i < end:
        c = data[i]
        if c == _QUOTE:
            return i
        if c < _SPACE:
            return -1
        if c == _BACKSLASH:
            i = -1 if plain else _escape_end(data, i, end)
        elif c >= 0x80:
            i = _character_end(data, i, end)
        else:
            i += 1
        if i < 0:
            return -1
    return -1


@njit(nogil=True)
def _whole_end(data, start, end):
    """The end of a whole number, as Python writes it."""
    i = start + 1 if data[start] == _MINUS else start
    first = i
    while i < end and _ZERO <= data[i] <= _NINE:
        i += 1
    num_digits = i - first
    if not 1 <= num_digits <= MAX_DIGITS or i >= end:
        return -1
    if data[first] == _ZERO and (num_digits > 1 or first > start):
        return -1
    follower = data[i]
    if follower in (_COMMA, _CLOSE_OBJECT, _CLOSE_LIST) or follower <= _SPACE:
        return i
    return -1


@njit(nogil=True)
def _wholes_end(data, start, end):
    """The end of a list of at least one whole number."""
    i = start + 1
    while i < end:
        while i < end and data[i] == _SPACE:
            i += 1
        if i >= end:
            return -1
        i = _whole_end(data, i, end)
        if i < 0:
            return -1
        while i < end and data[i] == _SPACE:
            i += 1
        if i >= end:
            return -1
        if data[i] == _CLOSE_LIST:
            return i + 1
        if data[i] != _COMMA:
            return -1
        i += 1
    return -1


# --- an id's digest: BLAKE2b of at most one block (RFC 7693), to 16 bytes
# ------------------------------------------------------------------------------

_IV = np.array(
    [
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    ],
    np.uint64,
)  # fmt: skip
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ],
    np.int64,
)
_COLUMNS = np.array(
    [
        [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
        [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
    ],
    np.int64,
)  # fmt: skip


@njit(nogil=True)
def _turned(x, by):
    return (x >> np.uint64(by)) | (x << np.uint64(64 - by))


@njit(nogil=True)
def _hash(data, start, end, words, v, out):
    """``words``, ``v``: uint64 [16] each, to work in; ``out``: uint64 [2]."""
    for i in range(16):
        words[i] = np.uint64(0)
    for i in range(end - start):
        words[i >> 3] |= np.uint64(data[start + i]) << np.uint64(8 * (i & 7))
    for i in range(8):
        v[i] = v[i + 8] = _IV[i]
    v[0] ^= np.uint64(0x01010010)  # no key, a digest of 16 bytes
    first, second = v[0], v[1]
    v[12] ^= np.uint64(end - start)
    v[14] = ~v[14]
    for turn in range(12):
        for k in range(8):
            a, b, c, d = _COLUMNS[k, 0], _COLUMNS[k, 1], _COLUMNS[k, 2], _COLUMNS[k, 3]
            v[a] = v[a] + v[b] + words[_SIGMA[turn % 10, 2 * k]]
            v[d] = _turned(v[d] ^ v[a], 32)
            v[c] = v[c] + v[d]
            v[b] = _turned(v[b] ^ v[c], 24)
            v[a] = v[a] + v[b] + words[_SIGMA[turn % 10, 2 * k + 1]]
            v[d] = _turned(v[d] ^ v[a], 16)
            v[c] = v[c] + v[d]
            v[b] = _turned(v[b] ^ v[c], 63)
    out[0] = first ^ v[0] ^ v[8]
    out[1] = second ^ v[1] ^ v[9]


# --- lines
# ------------------------------------------------------------------------------


@njit(nogil=True)
def _shape_of(data, i, end, shape, keys, is_object, id_at):
    """Write a line's shape; returns its size, or -1: it has none.

    Args:
        shape: uint8 [MAX_SHAPE_BYTES].
        keys, is_object: int64, bool [MAX_DEPTH + 1], to work in.
        id_at: int64 [2]; where the id's bytes are.
    """
    size = depth = num_ids = 0
    key_follows = False
    keys[0] = 0
    while i < end:
        if size >= MAX_SHAPE_BYTES - 1:
            return -1
        c = data[i]
        free = 0
        is_id = depth == 1 and keys[1] in (_ID, _CUSTOM_ID)
        if c == _QUOTE and not key_follows and _is_text(depth, keys):
            is_turn = keys[depth] == _CONVERSATION
            stop = _text_end(data, i + 1, end, is_id)
            if stop < 0 or (is_turn and not 1 <= stop - i - 1 <= MAX_CONVERSATION_BYTES):
                return -1
            if is_id:
                num_ids += 1
                id_at[0], id_at[1] = i + 1, stop
            free = EMPTY if stop == i + 1 else TEXT
            i = stop + 1
        elif c == _QUOTE:
            start = i + 1
            i = start
            while i < end and data[i] != _QUOTE:
                i += 2 if data[i] == _BACKSLASH else 1
            if i >= end or size + i + 1 - start >= MAX_SHAPE_BYTES - 1:
                return -1
            if key_follows:
                keys[depth] = _key_of(data, start, i)
                key_follows = False
            for k in range(start - 1, i):
                shape[size] = data[k]
                size += 1
            i += 1
        elif (c == _MINUS or _ZERO <= c <= _NINE) and _is_whole(depth, keys):
            stop = _whole_end(data, i, end)
            if stop < 0:
                return -1
            if is_id:
                num_ids += 1
                id_at[0], id_at[1] = i, stop
            free, i = WHOLE, stop
        elif c == _OPEN_LIST and _is_list_of_wholes(depth, keys):
            stop = _wholes_end(data, i, end)
            if stop < 0:
                return -1
            free, i = WHOLES, stop
        else:
            if c in (_OPEN_OBJECT, _OPEN_LIST):
                depth += 1
                if depth > MAX_DEPTH:
                    return -1
                is_object[depth] = key_follows = c == _OPEN_OBJECT
                keys[depth] = 0
            elif c in (_CLOSE_OBJECT, _CLOSE_LIST):
                depth -= 1
                key_follows = False
                if depth < 0:
                    return -1
            elif c == _COMMA:
                key_follows = is_object[depth]
            elif c in (EMPTY, TEXT, WHOLE, WHOLES):
                return -1
            i += 1
        shape[size] = free if free else c
        size += 1
    fits = num_ids == 1 and id_at[1] - id_at[0] <= MAX_ID_BYTES
    return size if fits and depth == 0 else -1


@njit(nogil=True)
def _find(shape, size, pool, starts, sizes, places):
    """The known shape that this is, or -1; and the place in ``places`` where it
    is or belongs."""
    hashed = np.uint64(1469598103934665603)
    for k in range(size):
        hashed = (hashed ^ np.uint64(shape[k])) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(32)
    place = np.int64(hashed % np.uint64(places.size))
    while places[place] >= 0:
        known = places[place]
        if sizes[known] == size:
            k, begin = 0, starts[known]
            while k < size and pool[begin + k] == shape[k]:
                k += 1
            if k == size:
                return known, place
        place = (place + 1) % places.size
    return -1, place


def _read(
    data, start, number, shard, num_shards, pool, starts, sizes, places, counts, shape, digests,
    numbers, state,
):  # fmt: skip
    """Read lines from ``start`` on, as long as their shapes are known.

    Args:
        data: uint8 [n], whole lines.
        number: of the line before ``start``.
        shard, num_shards: ``counts`` are of lines whose number leaves the
            remainder ``shard``.
        pool, starts, sizes: bytes of the known shapes, and where they are.
        places: int64 [m], shapes by hash, -1: none.
        counts: int64 [shapes]: lines of each shape so far.
        shape: uint8 [MAX_SHAPE_BYTES]: that of the line it stops at.
        digests, numbers: uint64 [k, 2], int64 [k], k > n / 16: of the lines' ids.
        state: int64 [6], the result: where the line it stopped at begins, where
            the next one does, the line's number, how many ids were written, the
            shape's size (-1: the line has none), and its place.
    """
    keys = np.zeros(MAX_DEPTH + 1, np.int64)
    is_object = np.zeros(MAX_DEPTH + 1, np.bool_)
    id_at = np.zeros(2, np.int64)
    words, v = np.zeros(16, np.uint64), np.zeros(16, np.uint64)
    num_ids, i = 0, start
    while i < data.size:
        end = i
        is_blank = True
        while end < data.size and data[end] != _NEWLINE:
            c = data[end]
            is_blank &= c == _SPACE or 9 <= c <= 13
            end += 1
        number += 1
        behind = min(end + 1, data.size)
        if not is_blank:
            size = _shape_of(data, i, end, shape, keys, is_object, id_at)
            known, place = -1, -1
            if size >= 0:
                known, place = _find(shape, size, pool, starts, sizes, places)
            if known < 0:
                state[0], state[1], state[2] = i, behind, number
                state[3], state[4], state[5] = num_ids, size, place
                return
            _hash(data, id_at[0], id_at[1], words, v, digests[num_ids])
            numbers[num_ids] = number
            num_ids += 1
            if number % num_shards == shard:
                counts[known] += 1
        i = behind
    state[0], state[1], state[2] = data.size, data.size, number
    state[3], state[4], state[5] = num_ids, -1, -1


read = njit(nogil=True)(_read)
keep(read, _read, Path(__file__))
