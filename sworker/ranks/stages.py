"""Pipeline stages: which layers of a model a stage has.

A stage builds the model of a smaller spec (``fastdecode.core.model.stages``), as
ranks of tensor parallelism do; together with those, each rank has its share of its stage's
layers (``sworker.ranks.sharding``).
"""

from __future__ import annotations

from sworker.model.skeleton import Model


class ModulePaths:
    """Where a module of the whole model is in the part of it that is loaded.

    Args:
        loaded: the part.
        layers: those that it has.
    """

    def __init__(self, loaded: Model, layers: range) -> None:
        self._modules = {path for path, _ in loaded.named_modules()}
        self._layers = layers

    def find(self, path: str) -> str | None:
        """None: it is another stage's."""
        if path.startswith("layers."):
            _, index, own = path.split(".", 2)
            if int(index) not in self._layers:
                return None
            path = f"layers.{self._layers.index(int(index))}.{own}"
        return path if path in self._modules else None
