"""Element types of weights, activations and the KV cache.

NumPy has no bfloat16 and Numba has no float16 on CPUs, so outside torch a 16-bit float travels and rests as its bits
in ``uint16``; the ``DType`` beside the array says how to read them.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from fastdecode.core.errors import ConfigError

_ALIASES = {
    "fp32": "float32", "f32": "float32", "float": "float32",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16",
}  # fmt: skip


class DType(str, Enum):
    """An element type. Compares equal to its own name, e.g. ``DType.BFLOAT16 == "bfloat16"``."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    def __str__(self) -> str:
        return self.value

    @property
    def size_bytes(self) -> int:
        """Bytes one element takes."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def carrier(self) -> np.dtype[np.float32] | np.dtype[np.uint16]:
        """The NumPy dtype in which elements travel and rest: float32, or uint16 for the bits of a 16-bit float."""
        return np.dtype(np.float32) if self is DType.FLOAT32 else np.dtype(np.uint16)

    @classmethod
    def parse(cls, name: str, *, option: str = "dtype") -> DType:
        """``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``, … → ``DType``.

        Raises:
            ConfigError: the name is none of ours; the message lists those that are.
        """
        plain = name.lower().removeprefix("torch.")
        try:
            return cls(_ALIASES.get(plain, plain))
        except ValueError:
            raise ConfigError(f"{option}={name!r} is not one of {', '.join(d.value for d in cls)}") from None
