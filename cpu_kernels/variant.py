# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""What a kernel is compiled for, as a value whose fields compiled code reads as constants."""

from __future__ import annotations

from dataclasses import dataclass, fields

from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import NativeValue, register_model, unbox


@dataclass(frozen=True)
class Variant:
    """What one compiled attention kernel is made for."""

    dtype: str  # element type of the cache
    dot: str
    """How products are summed: "fma" on unpacked floats, "bf16", "int8" on packed words,
    "int16" on bytes unpacked to pairs, "amx" on tiles of bfloat16."""
    lanes: int
    has_fma: bool
    has_f16c: bool
    rows: int  # query rows in a register tile
    score_vectors: int  # vectors of tokens in a register tile of scores
    value_vectors: int  # vectors of dims in a register tile of outputs
    q_planes: int
    """Operands that a query is split into, so that low-precision products lose
    nothing that matters."""
    p_planes: int  # the same for the softmax weights
    spread: int  # planes of tiles of rows over which asking for the next piece of memory is spread
    words: int = 1  # words that one step of a product sums up, where vectors make it
    product_tiles: int = 1  # register tiles of rows that are multiplied as one
    tiles: str = ""  # what makes the products, where AMX tiles do: a key of ``amx.TILE_UNITS``

    @property
    def pack(self) -> int:
        """Elements in a cell."""
        return {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "int4": 8}[self.dtype]

    @property
    def cell_bytes(self) -> int:
        return 2 if self.dtype == "float16" else 4

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element in one plane of an operand row."""
        return {"fma": 4, "bf16": 2, "amx": 2, "int16": 2, "int8": 1}[self.dot]

    @property
    def has_brain_operands(self) -> bool:
        return self.dot in ("bf16", "amx")

    @property
    def product_rows(self) -> int:
        """Query rows that are multiplied as one."""
        return self.rows * self.product_tiles

    @property
    def step_words(self) -> int:
        """Words that one step of a product sums up."""
        return 16 if self.tiles else self.words

    @property
    def is_quantized(self) -> bool:
        return self.pack > 2

    @property
    def is_integer(self) -> bool:
        """Products are summed in integers."""
        return self.dot in ("int8", "int16")

    @property
    def passes(self) -> int:
        """Times that a piece is multiplied: once for each plane where planes
        can't be summed in one go."""
        return self.q_planes if self.is_integer else 1

    @property
    def max_query(self) -> int:
        """The largest magnitude of an integer query operand."""
        return 127 if self.operand_bytes * self.q_planes == 1 else 127 * 128

    @property
    def max_weight(self) -> int:
        """The largest integer weight."""
        if self.dot == "int16":
            return 32767  # its products are of signed numbers
        return 255 if self.p_planes == 1 else 65535

    @property
    def word_bytes(self) -> int:
        """Bytes of the operands that one cell is multiplied with."""
        return max(4, self.pack * self.operand_bytes)

    @property
    def element_bias(self) -> int:
        """What the packed integers of K have been raised by, to be unsigned."""
        return {"int8": 128, "int4": 8}.get(self.dtype, 0)

    @property
    def plain(self) -> Variant:
        """What is left for code that only needs to know the vectors: the same for all kernels of
        a level, so that a process compiles the parts that take it once."""
        return plain_variant(self.lanes, self.has_fma)

    @property
    def key(self) -> str:
        return "_".join(str(getattr(self, field.name)) for field in fields(self))


def plain_variant(lanes: int, has_fma: bool) -> Variant:
    """For functions that aren't made for a cache's elements or tiles of rows."""
    return Variant(
        dtype="float32", dot="fma", lanes=lanes, has_fma=has_fma, has_f16c=has_fma, rows=1,
        score_vectors=1, value_vectors=1, q_planes=1, p_planes=1, spread=1,
    )  # fmt: skip


class VariantType(types.Type):
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        super().__init__(name=f"Variant({variant.key})")


@register_model(VariantType)
class _VariantModel(models.OpaqueModel):
    pass


@unbox(VariantType)
def _unbox_variant(typ, obj, c):
    return NativeValue(cgutils.get_null_value(c.context.get_value_type(typ)))
