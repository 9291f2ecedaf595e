"""Which kept KV blocks make room first, by what a user has chosen."""

from __future__ import annotations

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.model.spec import ModelSpec
from fastdecode.schedule.cache.costs import costs_of
from fastdecode.schedule.cache.retention import Policy, policy_of


def eviction_policy(config: EngineConfig, spec: ModelSpec) -> Policy:
    """What a block costs to compute again follows from the model's operations."""
    return policy_of(config.cache.cache_policy, config.r_part.block_size, costs_of(spec))
