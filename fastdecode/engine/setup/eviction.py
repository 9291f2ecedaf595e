"""Which kept KV blocks make room first, by what a user has chosen."""

from __future__ import annotations

from pathlib import Path

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.measurement import SProfile, read_profile
from fastdecode.core.model.spec import ModelSpec
from fastdecode.schedule.cache.costs import CostTable, costs_of, measured_costs
from fastdecode.schedule.cache.retention import Policy, policy_of


def eviction_policy(config: EngineConfig, spec: ModelSpec) -> Policy:
    """
    Raises:
        ConfigError: the profile of costs can't be read, or doesn't tell any.
    """
    path = config.cache.cache_costs
    costs = costs_of(spec) if path is None else _measured(Path(path))
    return policy_of(config.cache.cache_policy, config.r_part.block_size, costs)


def _measured(path: Path) -> CostTable:
    profile = read_profile(path)
    if not isinstance(profile, SProfile):
        raise ConfigError(
            f"{path} doesn't tell what prompts take: give a profile of fastdecode calibrate s, ",
            Given("cache_costs"),
        )
    return measured_costs({point.size: point.timing.calm_s for point in profile.prefill})
