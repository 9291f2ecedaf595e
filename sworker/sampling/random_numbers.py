"""Random numbers that are a function of what they are for.

A number depends on a **key** and a counter alone: the key is a hash of a request's seed, its
sample index and the number of tokens that it has generated (``SamplingState``), the counter says
which of the draw's numbers it is. No generator is kept, so nothing has to be saved, restored or
sent, and a draw is the same in any batch and when it is made again after a suspension.

The function is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014): additions, shifts and multiplications of 64-bit integers, which give the same bits in
NumPy, in torch and on a GPU. Philox would serve too, at several times the operations a number."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 / golden ratio, made odd

Words = TypeVar("Words", Tensor, NDArray[np.int64])
"""int64 of either library, which stand for 64 bits without a sign."""


_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_GAMMA = _signed(int(GAMMA))
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix(x: Words) -> Words:
    """SplitMix64's output function, a bijection on 64 bits; in place."""
    x ^= _shifted(x, 30)
    x *= _FIRST  # wraps
    x ^= _shifted(x, 27)
    x *= _SECOND
    x ^= _shifted(x, 31)
    return x


def mixed(x: int) -> int:
    """``mix`` of one number of 64 bits without a sign."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def exponentials(keys: Tensor, count: int) -> Tensor:
    """Exponentially distributed numbers of mean 1: ``-log(uniform)``, where the uniform is one of
    2^52 equally spaced numbers, neither 0 nor 1.

    keys int64 [n, 1] → float64 [n, count], on the keys' device, positive and finite. Number c of a
    key is made of output c of the generator that starts at the key. Devices differ in the last bit
    of the logarithm at most."""
    if keys.device.type == "cpu":  # NumPy takes a third of torch's time here
        return torch.from_numpy(exponentials_in_numpy(keys.numpy(), count))
    return exponentials_in_torch(keys, count)


def exponentials_in_numpy(keys: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    words = mix(keys + _counters(count))  # arrays wrap without a warning
    uniforms: NDArray[np.float64] = _shifted(words, 12) + 0.5
    uniforms *= 2.0**-52
    np.log(uniforms, out=uniforms)
    return np.negative(uniforms, out=uniforms)


@lru_cache(maxsize=16)
def _counters(count: int) -> NDArray[np.int64]:
    """What the generator adds to its key for each of its numbers; only read."""
    with np.errstate(over="ignore"):
        return np.arange(1, count + 1, dtype=np.int64) * _GAMMA


def exponentials_in_torch(keys: Tensor, count: int) -> Tensor:
    words = mix(keys + torch.arange(1, count + 1, device=keys.device).mul_(_GAMMA))
    uniforms: Tensor = _shifted(words, 12).double().add_(0.5).mul_(2.0**-52)
    return uniforms.log_().neg_()


def _shifted(x: Words, by: int) -> Words:
    """Shifted right as if it had no sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
