"""The fewest options that turn each feature on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fastdecode.core.config.features import FEATURES

EXAMPLES: dict[str, dict[str, Any]] = {
    "tensor parallelism": {"tp": 2},
    "stages": {"pp": 2},
    "prompt stages": {"prompt_pp": 1},
    "device KV": {"kv_placement": "gpu"},
    "hybrid KV": {"kv_placement": "hybrid"},
    "swap": {"kv_placement": "swap", "pp": 3},
    "host tier": {"kv_placement": "gpu", "cache_memory_gb": 1.0},
    "int4 KV": {"kv_dtype": "int4"},
    "shared heads": {"r_partition": "heads"},
    "split sequences": {"split_tokens": 1024},
    "replicas": {"replicas": 1},
    "replicas on disk": {"replicas": "disk"},
    "standby": {"spare_r_workers": 1},
    "prefix cache": {"prefix_cache": "on"},
    "disk tier": {"cache_disk": "DIR", "cache_disk_gb": 1.0},
    "instances": {"instances": ("prefill", "decode")},
    "instance ranks": {"instances": ("both:1", "both:1")},
    "addresses": {"r_worker_addresses": ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5601")},
    "stabilized": {"schedule": "stabilized"},
    "synchronized": {"schedule": "synchronized"},
    "load limit": {"load_limit": 1000},
    "fixed lanes": {"lanes": 3},
    "R-workers attend prompts": {"prompt_attention": "r"},
}
assert EXAMPLES.keys() == FEATURES.keys()


def pairs() -> Iterator[tuple[str, str]]:
    """Return the pairs that are not two values of one option."""
    for one, other in itertools.combinations(FEATURES, 2):
        first, second = EXAMPLES[one], EXAMPLES[other]
        if all(first[option] == second[option] for option in (first.keys() & second) - {"pp"}):
            yield one, other
