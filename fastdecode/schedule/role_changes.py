"""Changes of instances' roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdecode.core.config.instances import InstanceRole


def role_changes(
    roles: Sequence[InstanceRole], wanted: Mapping[InstanceRole, int], busy: Sequence[float]
) -> dict[int, InstanceRole]:
    """Return the fewest changes after which ``wanted`` instances have each role: new roles by
    place, in the order in which they change. Roles that no instance has come first.

    Args:
        roles: role of each instance.
        wanted: instances of each role, as many in all as there are.
        busy: work of each instance. The least busy ones change; of equal ones, the earlier one.
    """
    assert sum(wanted.values()) == len(roles) == len(busy)
    spare: list[int] = []
    lacking: list[InstanceRole] = []
    for role in InstanceRole:
        having = sorted((i for i, each in enumerate(roles) if each is role), key=busy.__getitem__)
        count = wanted.get(role, 0)
        spare += having[: max(0, len(having) - count)]
        lacking += [role] * max(0, count - len(having))
    spare.sort(key=lambda index: (busy[index], index))
    lacking.sort(key=lambda role: sum(each is role for each in roles))
    return dict(zip(spare, lacking, strict=True))
