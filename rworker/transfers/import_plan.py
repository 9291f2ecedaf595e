"""What a sequence is imported from, as a plan of transfers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId, KVSource, PartId, SequenceId
from fastdecode.wire.kv.exporting import ExportDescription, Pull
from rworker.stream.cutting import CacheKind
from rworker.stream.pieces import Box, Region, redistribute
from rworker.stream.transfer_plan import TransferPlan

_SEQUENCE: Final = SequenceId(0)
"""As both sides' parts are called here."""
_HERE: Final = HolderId(-1)


def kind_of_export(source: KVSource, export: ExportDescription, peer: str) -> CacheKind:
    """The kind of cache that a source has. Raises ProtocolError: it isn't what is wanted."""
    kind = CacheKind(export.model_hash, export.kv)
    if kind.kv.num_kv_heads != source.num_heads:
        raise ProtocolError(f"{peer} has {kind.kv.num_kv_heads} heads, not {source.num_heads}")
    if export.num_tokens < source.num_tokens:
        raise ProtocolError(
            f"{peer} has {export.num_tokens} tokens on offer, not {source.num_tokens}"
        )
    return kind


def plan_import(order: Pull, own: CacheKind, kinds: Mapping[int, CacheKind]) -> TransferPlan:
    """All that has to come; each source's index is its holder in the plan.

    Args:
        own: the cache's kind.
        kinds: the sources', by index.

    Raises:
        ConfigError: the sources don't have it all.
    """
    here = _region(_HERE, order.sequence_id, own, order)
    there = [
        _region(HolderId(index), 0, kinds[index], source)
        for index, source in enumerate(order.sources)
    ]
    pieces = redistribute({_SEQUENCE: there}, {_SEQUENCE: [here]})
    return TransferPlan(pieces, lambda way: (kinds[int(way[0])], own))


def _region(holder: HolderId, part_id: int, kind: CacheKind, of: Pull | KVSource) -> Region:
    """What a cache of this kind has, or is to get, of the sequence."""
    sides = (
        (of.first_layer, kind.kv.num_layers),
        (of.first_head, kind.kv.num_kv_heads),
        (of.first_token, of.num_tokens),
    )
    return Region(holder, PartId(part_id), Box(*[range(at, at + num) for at, num in sides]))
