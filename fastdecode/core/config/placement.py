"""Placement files, as ``fastdecode plan goodput --emit`` writes them: which instances there are
to be. Their other fields record what was planned for, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from fastdecode.core.config.instances import (
    MAX_INSTANCES,
    MAX_R_RANKS,
    InstanceRole,
    PlacedInstance,
)
from fastdecode.core.config.s_part import MAX_PP, MAX_TP
from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object

PLACEMENT_FORMAT: Final = "fastdecode-placement/1"
_KEYS: Final = frozenset({"format", "model", "instances", "slo", "workload"})
_OF_INSTANCE: Final = frozenset({"role", "tp", "pp", "r_worker_sockets"})
_MOST_BYTES: Final = 1 << 20


def read_placement(path: Path, *, on_devices: bool = False) -> tuple[PlacedInstance, ...]:
    """Read the instances of a placement file. A socket gets an R-worker. Where none is planned, KV
    is on the instance's devices; for prefill, each stage has an R-worker on the S-worker's host.

    Args:
        on_devices: Put KV on the devices for prefill, too.

    Raises:
        ConfigError: If the file can't be read, isn't a placement file, or has unknown features.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--placement {path}: {why}")

    tree = read_object(path, most_bytes=_MOST_BYTES, refuse=refuse)
    return placed_instances(tree, refuse, on_devices=on_devices)


def placed_instances(
    tree: Mapping[str, Any], refuse: Callable[[str], ConfigError], *, on_devices: bool = False
) -> tuple[PlacedInstance, ...]:
    """As ``read_placement``, of what a file holds. Raises what ``refuse`` makes of a reason."""
    if tree.get("format") != PLACEMENT_FORMAT:
        raise refuse(
            f"its format is {tree.get('format')!r:.80}, not {PLACEMENT_FORMAT!r}: fastdecode plan "
            "goodput --emit writes such files"
        )
    _check_keys(tree, _KEYS, "it", refuse)
    listed = tree.get("instances")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_INSTANCES:
        raise refuse(f"its instances are no list of 1 to {MAX_INSTANCES}")
    return tuple(
        _instance(each, f"instance {i}", refuse, on_devices=on_devices)
        for i, each in enumerate(listed)
    )


def _instance(tree: Any, what: str, refuse: Any, *, on_devices: bool = False) -> PlacedInstance:
    if not isinstance(tree, dict):
        raise refuse(f"{what} is no object")
    _check_keys(tree, _OF_INSTANCE, what, refuse)
    roles = [role for role in InstanceRole if role.value == tree.get("role")]
    if not roles:
        raise refuse(f"{what} has the role {tree.get('role')!r:.80}: prefill, decode, both are")
    tp = _whole(tree, "tp", 1, MAX_TP, what, refuse)
    pp = _whole(tree, "pp", 1, MAX_PP, what, refuse)
    sockets = _whole(tree, "r_worker_sockets", 0, MAX_R_RANKS, what, refuse)
    least = pp if roles[0] is InstanceRole.PREFILL and not on_devices else 0
    if tp > 1 and not max(least, sockets):
        raise refuse(
            f"{what} has no R-worker, and {tp} S-workers of each stage: KV on their devices is "
            "not supported yet, as each keeps heads of its own. Plan R-workers, or tp 1"
        )
    if sockets % pp:
        raise refuse(
            f"{what} has {sockets} sockets for {pp} stages, and each needs as many: plan again"
        )
    return PlacedInstance(roles[0], max(least, sockets), tp, pp)


def is_launchable(tp: int, pp: int, sockets: int) -> bool:
    """Whether ``fastdecode launch --placement`` starts such an instance that decodes."""
    each = {"role": InstanceRole.BOTH.value, "tp": tp, "pp": pp, "r_worker_sockets": sockets}
    try:
        _instance(each, "it", ConfigError)
    except ConfigError:
        return False
    return True


def _whole(tree: Mapping[str, Any], name: str, low: int, high: int, what: str, refuse: Any) -> int:
    value = tree.get(name)
    if type(value) is not int or not low <= value <= high:
        raise refuse(f"{name} of {what} is {value!r:.80}, not a whole number from {low} to {high}")
    return value


def _check_keys(tree: Mapping[str, Any], known: frozenset[str], what: str, refuse: Any) -> None:
    unknown = sorted(set(tree) - known)
    if unknown:
        raise refuse(f"{what} has {unknown[0]!r:.80}, which is nothing that a placement says")
