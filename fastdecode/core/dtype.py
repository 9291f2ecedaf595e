"""Element types of weights, activations and the KV cache.

NumPy has no bfloat16 and Numba has no float16 on CPUs, so outside torch a 16-bit float is sent and
kept as its bits in ``uint16``; the ``DType`` beside the array tells how to read them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from fastdecode.core.errors import ConfigError, Given

if TYPE_CHECKING:
    import numpy as np

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
    INT8 = "int8"
    """Of a KV cache only, like int4: integers times one float32 scale for each
    token and head of K, and of V."""
    INT4 = "int4"

    def __str__(self) -> str:
        return self.value

    @property
    def is_float(self) -> bool:
        """Whether weights and activations can have it."""
        return self not in (DType.INT8, DType.INT4)

    @property
    def bits(self) -> int:
        """Bits that one element takes."""
        return {DType.FLOAT32: 32, DType.INT8: 8, DType.INT4: 4}.get(self, 16)

    @property
    def size_bytes(self) -> int:
        """Bytes that one floating-point element takes."""
        assert self.is_float, self
        return self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes that each token and head of K, and of V, takes beside its elements."""
        return 0 if self.is_float else 4

    @property
    def carrier(self) -> np.dtype[np.float32] | np.dtype[np.uint16]:
        """The NumPy dtype in which elements travel and rest: float32, or uint16
        for the bits of a 16-bit float."""
        import numpy as np  # here: ``fastdecode size`` starts without it

        return np.dtype(np.float32) if self is DType.FLOAT32 else np.dtype(np.uint16)

    @classmethod
    def parse(
        cls, name: str, *, option: str = "dtype", of_kv: bool = False, or_auto: bool = False
    ) -> DType:
        """``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``, … → ``DType``.

        Args:
            option: what to call it in an error.
            of_kv: whether it is a KV cache's, which may be quantised.
            or_auto: whether the option may also be auto: an error names it.

        Raises:
            ConfigError: If the dtype is unknown; the message lists the known names.
        """
        plain = name.lower().removeprefix("torch.")
        known = [dtype for dtype in cls if dtype.is_float or of_kv]
        for dtype in known:
            if dtype.value == _ALIASES.get(plain, plain):
                return dtype
        names = ", ".join([*["auto"] * or_auto, *(dtype.value for dtype in known)])
        raise ConfigError(Given(option, name), f" is not one of {names}")
