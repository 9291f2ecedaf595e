"""Which instances change their roles, so that so many have each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdecode.core.config.instances import InstanceRole


def role_changes(
    roles: Sequence[InstanceRole], wanted: Mapping[InstanceRole, int], busy: Sequence[float]
) -> dict[int, InstanceRole]:
    """As few as it takes; of those that could change, the least busy ones. Those
    that gain what isn't there yet come first: nothing is given up before.

    Args:
        roles: of each instance.
        wanted: how many are to have each role; as many in all as there are.
        busy: how much each has to do; of the same, the earlier one changes.

    Returns:
        new roles by the instances' places, in the order in which they change.
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
