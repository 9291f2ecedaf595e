# mypy: ignore-errors
"""Plain compiled loops: right on every host, for every shape."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _float_of(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


@intrinsic
def _bits_of(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), codegen


@njit(nogil=True, cache=True)
def _half_to_float(h):
    sign = np.uint32(np.uint32(h & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(h & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):
        return _float_of(np.uint32(sign | magnitude | np.uint32(0x70000000)))
    scaled = np.float32(_float_of(magnitude) * np.float32(2.0**112))
    return _float_of(np.uint32(sign | _bits_of(scaled)))


@njit(nogil=True, cache=True)
def _float_to_half(x):
    bits = _bits_of(np.float32(x))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint32(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):
        return np.uint32(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below the smallest normal: let an addition round
        rounded = _bits_of(np.float32(_float_of(magnitude) + np.float32(0.5)))
        return np.uint32(sign | np.uint32(rounded - np.uint32(0x3F000000)))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(magnitude + np.uint32(0xFFF) + odd - np.uint32(0x38000000))
    return np.uint32(sign | (rounded >> np.uint32(13)))


@njit(nogil=True, cache=True)
def _load(bits, source):
    if source == 0:
        return _float_of(np.uint32(bits))
    if source == 1:
        return _half_to_float(np.uint32(bits))
    return _float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(nogil=True, cache=True)
def _store(value, source):
    if source == 0:
        return _bits_of(np.float32(value))
    if source == 1:
        return _float_to_half(value)
    bits = _bits_of(np.float32(value))
    if value != value:
        return np.uint32(0x7FC0)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(nogil=True, cache=True)
def _encode(value, dtype, inverse_scale):
    if dtype < 3:
        return _store(value, dtype)
    most = 127 if dtype == 3 else 7
    integer = int(np.rint(value * inverse_scale))
    return np.uint32(max(-most, min(most, integer)) + most + 1)


@njit(nogil=True, cache=True)
def _decode(bits, dtype):
    if dtype < 3:
        return _load(bits, dtype)
    return np.float32(np.int64(bits) - (128 if dtype == 3 else 8))


@njit(nogil=True, cache=True)
def _put(words, block, index, lane, bits_each, bits):
    shift = np.uint32(lane * bits_each)
    mask = np.uint32(np.uint32(0xFFFFFFFF) >> np.uint32(32 - bits_each))
    old = words[block, index] & np.uint32(~np.uint32(mask << shift))
    words[block, index] = np.uint32(old | np.uint32(bits << shift))


@njit(nogil=True, cache=True)
def _get(words, block, index, lane, bits_each):
    mask = np.uint32(np.uint32(0xFFFFFFFF) >> np.uint32(32 - bits_each))
    return np.uint32((words[block, index] >> np.uint32(lane * bits_each)) & mask)


@njit(nogil=True, cache=True)
def _scale_of(row, source, most):
    top = np.float32(0)
    for d in range(row.shape[0]):
        top = max(top, np.abs(_load(row[d], source)))
    return np.float32(top / np.float32(most))


@njit(nogil=True, cache=True)
def append(shape, words, k, v, slots):
    dtype, pack, block_size, num_kv_heads, head_dim = shape[0], shape[1], shape[2], shape[3], shape[4]
    tokens, dims, v_offset, scale_offset, head_words, source = (
        shape[5], shape[6], shape[7], shape[8], shape[9], shape[10],
    )  # fmt: skip
    bits_each = 32 // pack
    for t in range(slots.shape[0]):
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(num_kv_heads):
            base = h * head_words
            k_inverse, v_inverse = np.float32(1), np.float32(1)
            if dtype >= 3:
                most = 127 if dtype == 3 else 7
                k_scale, v_scale = _scale_of(k[t, h], source, most), _scale_of(v[t, h], source, most)
                words[block, base + scale_offset + offset] = _bits_of(k_scale)
                words[block, base + scale_offset + tokens + offset] = _bits_of(v_scale)
                k_inverse = np.float32(1) / k_scale if k_scale > 0 else np.float32(0)
                v_inverse = np.float32(1) / v_scale if v_scale > 0 else np.float32(0)
            for d in range(head_dim):
                bits = _encode(_load(k[t, h, d], source), dtype, k_inverse)
                _put(words, block, base + d // pack * tokens + offset, d % pack, bits_each, bits)
                bits = _encode(_load(v[t, h, d], source), dtype, v_inverse)
                _put(words, block, base + v_offset + offset // pack * dims + d, offset % pack, bits_each, bits)


@njit(nogil=True, cache=True)
def attend(shape, words, q, tables, starts, positions, context_lens, scale, window, slopes, softcap, out, lse):
    dtype, pack, block_size, num_kv_heads, head_dim = shape[0], shape[1], shape[2], shape[3], shape[4]
    tokens, dims, v_offset, scale_offset, head_words, source = (
        shape[5], shape[6], shape[7], shape[8], shape[9], shape[10],
    )  # fmt: skip
    bits_each = 32 // pack
    num_q_heads = q.shape[1]
    group = num_q_heads // num_kv_heads
    most = 0
    for n in range(context_lens.shape[0]):
        most = max(most, context_lens[n])
    scores = np.empty(most, np.float32)
    query = np.empty(head_dim, np.float32)
    row = np.empty(head_dim, np.float32)
    for n in range(context_lens.shape[0]):
        for r in range(starts[n], starts[n + 1]):
            position = positions[n] + r - starts[n]
            end = min(context_lens[n], position + 1)
            begin = max(0, position - window + 1) if window > 0 else 0
            for h in range(num_q_heads):
                base = h // group * head_words
                for d in range(head_dim):
                    query[d] = _load(q[r, h, d], source)
                    row[d] = 0
                top = np.float32(-np.inf)
                for j in range(begin, end):
                    block, offset = tables[n, j // block_size], j % block_size
                    s = np.float32(0)
                    for d in range(head_dim):
                        bits = _get(words, block, base + d // pack * tokens + offset, d % pack, bits_each)
                        s += query[d] * _decode(bits, dtype)
                    if dtype >= 3:
                        s *= _float_of(words[block, base + scale_offset + offset])
                    s *= scale
                    if softcap > 0:
                        s = np.float32(softcap * np.tanh(s / softcap))
                    if slopes.shape[0] > 0:
                        s += slopes[h] * np.float32(j - position)
                    scores[j] = s
                    top = max(top, s)
                total = np.float32(0)
                for j in range(begin, end):
                    block, offset = tables[n, j // block_size], j % block_size
                    p = np.float32(np.exp(scores[j] - top))
                    total += p
                    if dtype >= 3:
                        p *= _float_of(words[block, base + scale_offset + tokens + offset])
                    for d in range(head_dim):
                        index = base + v_offset + offset // pack * dims + d
                        bits = _get(words, block, index, offset % pack, bits_each)
                        row[d] += p * _decode(bits, dtype)
                inverse = np.float32(1) / total if total > 0 else np.float32(0)
                for d in range(head_dim):
                    out[r, h, d] = _store(row[d] * inverse, source)
                if lse.shape[0] > 0:
                    lse[r, h] = np.float32(top + np.log(total)) if total > 0 else np.float32(-np.inf)
