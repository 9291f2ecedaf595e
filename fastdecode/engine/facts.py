"""Facts about an LLM that is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.model.identity import Identity

if TYPE_CHECKING:
    from fastdecode.engine.instances.cluster import RunningCluster
    from fastdecode.engine.setup.launch import RunningEngine


@dataclass(frozen=True)
class Facts:
    """Facts about an LLM that is ready."""

    num_r_workers: int
    """R-workers that it began with, in all stages. 0 if KV is on the S-worker's device."""
    r_threads: int  # CPU threads of an R-worker, the most that any has
    num_kv_blocks: int  # KV blocks of all R-workers together
    dtype: DType  # of weights and activations
    kv_dtype: DType  # of the KV cache
    kv_placement: str  # where it is: r, gpu or hybrid
    max_model_len: int  # most tokens of prompt and completion together
    vocab_size: int  # token ids are below it
    load_s: float  # seconds that loading the model and starting the R-workers took
    stage_layers: tuple[int, ...] = ()  # of each pipeline stage


def facts_of(config: EngineConfig, running: RunningCluster | RunningEngine) -> Facts:
    identity: Identity
    layers: tuple[int, ...] = ()
    if config.instances.instances:
        cluster = cast("RunningCluster", running)
        identity, kv_placement = cluster.identity, config.r_part.kv_placement
        decoding = [x for x in cluster.welcomes if x.role.decodes] or list(cluster.welcomes)
        num_kv_blocks = sum(x.num_tokens // x.block_size for x in decoding)
        kv_placement = "r" if kv_placement == "auto" else kv_placement
    else:
        engine = cast("RunningEngine", running)
        identity = engine.resolved.identity
        kv_placement = engine.resolved.config.r_part.kv_placement
        num_kv_blocks = sum(welcome.num_blocks for welcome in engine.welcomes)
        layers = tuple(map(len, engine.resolved.layers))
    return Facts(
        num_r_workers=running.num_r_workers,
        r_threads=max(welcome.num_threads for welcome in running.welcomes),
        num_kv_blocks=num_kv_blocks,
        dtype=identity.dtype,
        kv_dtype=identity.kv_dtype,
        kv_placement=kv_placement,
        max_model_len=identity.max_model_len,
        vocab_size=running.spec.vocab_size,
        load_s=running.load_s,
        stage_layers=layers,
    )
