"""The options of ``LLM``, for type checkers and editors. Made by ``python
docs/reference.py`` from the declarations of the options. Do not edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch


class LLMOptions(TypedDict, total=False):
    """Each is as ``docs/reference/options.md`` says."""

    dtype: str | torch.dtype
    load_format: str
    device: str
    cuda_graphs: str
    tp: int
    ep: int
    pp: int
    pp_layers: str | None
    prompt_pp: int
    gpu_memory_fraction: float
    max_model_len: int | None
    kv_dtype: str
    kv_placement: str
    prompt_attention: str
    r_workers: int
    r_partition: str
    split_tokens: int | None
    r_threads: int | None
    kv_memory_gb: float | None
    device_kv_gb: float | None
    block_size: int
    replicas: int | str
    max_num_sequences: int
    prefill_chunk: int | None
    max_step_tokens: int | None
    lanes: int | None
    schedule: str
    load_limit: int | None
    length_quantile: float | None
    expected_output_tokens: int | None
    prefix_cache: str
    cache_disk: str | None
    cache_disk_gb: float | None
    cache_memory_gb: float | None
    swap_threshold: float
    r_worker_addresses: Sequence[str]
    key: str | None
    worker_silence_s: float
    worker_timeout_s: float
    spare_r_workers: int
    instances: Sequence[str]
    fetch_gbps: float | None
    replan_slo: str | None
    conversations: str | None
    conversation_ttl_s: float | None
    max_conversations: int
    tensor_parallel_size: int
    """The name of ``tp`` in vLLM."""
    pipeline_parallel_size: int
    """The name of ``pp`` in vLLM."""
    max_num_seqs: int
    """The name of ``max_num_sequences`` in vLLM."""
    max_num_batched_tokens: int | None
    """The name of ``max_step_tokens`` in vLLM."""
    gpu_memory_utilization: float
    """The name of ``gpu_memory_fraction`` in vLLM."""
    kv_cache_dtype: str
    """The name of ``kv_dtype`` in vLLM."""
    enable_prefix_caching: bool
    """The name of ``prefix_cache`` in vLLM."""
    enforce_eager: bool
    """The name of ``cuda_graphs`` in vLLM."""
