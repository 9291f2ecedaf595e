"""What one machine takes for a microbatch, as it was measured: a JSON file.

::

    {
      "prompt_tokens": 1000,
      "model_gb": 132,
      "kv_gb_per_token": 0.00236,
      "microbatches": [
        {"sequences": 8, "prompt_s": 4.1, "token_s": 0.11},
        {"sequences": 16, "prompt_s": 8.2, "token_s": 0.13}
      ]
    }

``prompt_s`` and ``token_s`` are one machine's with all layers on it: their
stages' times, summed. Prompts are padded to ``prompt_tokens``. ``"origin"`` may say
where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_model.disaggregate.memory import ModelMemory
from cost_model.numbers import check_known, count, number
from cost_model.predict import System
from cost_model.simulate.pipelines import MachineTimes
from cost_model.step_time import SystemTime
from cost_model.workload import Workload
from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object

MAX_BYTES = 1 << 20
MAX_SIZES = 64
_FIELDS = ("prompt_tokens", "model_gb", "kv_gb_per_token", "microbatches")
_POINT_FIELDS = ("sequences", "prompt_s", "token_s")


@dataclass(frozen=True)
class MachineProfile:
    prompt_tokens: int
    memory: ModelMemory
    microbatches: Mapping[int, MachineTimes]
    """By the number of sequences, smallest first."""

    def of(self, sequences: int) -> MachineTimes:
        """Raises ConfigError: microbatches of this size weren't measured."""
        if sequences not in self.microbatches:
            sizes = ", ".join(map(str, self.microbatches))
            raise ConfigError(f"--batch {sequences}: --profile has microbatches of {sizes}")
        return self.microbatches[sequences]


def machine_on(system: System, sizes: Sequence[int]) -> MachineProfile:
    """A model on the GPUs of one machine, K and V in their memory, by ``fastdecode size``'s
    times; of prompts and contexts of the system's workload.

    Args:
        sizes: of microbatches, in sequences; rising.
    """
    workload, costs, most = system.workload, system.costs, system.s.max_batch
    alone = SystemTime(replace(system.on_device(), workload=Workload(0, 1)), 1)
    mean = workload.mean_context_tokens
    points = {
        size: MachineTimes.of(alone, size, workload.prompt_tokens, mean)
        for size in sizes
        if most is None or size <= most
    }
    memory = ModelMemory(costs.weight_bytes / 1e9, costs.kv_bytes / 1e9)
    return MachineProfile(workload.prompt_tokens, memory, points)


def read_machine_profile(path: Path) -> MachineProfile:
    """Read a file.

    Raises:
        ConfigError: it can't be read, or a field is missing, unknown or makes
            no sense; names it.
    """

    where = f"--profile {path}"
    tree = read_object(
        path, most_bytes=MAX_BYTES, refuse=lambda why: ConfigError(f"{where}: {why}")
    )
    if not isinstance(tree.pop("origin", ""), str):
        raise ConfigError(f'{where}: "origin" must be text')
    check_known(tree, _FIELDS, where)
    points = tree.get("microbatches")
    if not isinstance(points, list) or not 1 <= len(points) <= MAX_SIZES:
        raise ConfigError(
            f'{where}: "microbatches" must be a list of 1 to {MAX_SIZES} measurements'
        )
    found = dict(_point(each, f"{where}: microbatches[{i}]") for i, each in enumerate(points))
    if len(found) < len(points):
        raise ConfigError(f'{where}: "microbatches" has a size twice; give each once')
    return MachineProfile(
        count(tree, "prompt_tokens", where),
        ModelMemory(number(tree, "model_gb", where), number(tree, "kv_gb_per_token", where)),
        dict(sorted(found.items())),
    )


def _point(tree: Any, where: str) -> tuple[int, MachineTimes]:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} must be an object with {', '.join(_POINT_FIELDS)}")
    check_known(tree, _POINT_FIELDS, where)
    times = MachineTimes(number(tree, "prompt_s", where), number(tree, "token_s", where))
    return count(tree, "sequences", where), times
