"""How many machines a pipeline needs to hold the model and its microbatches
(DéjàVu, appendix D).

A model has L layers of W gigabytes. A microbatch's prompt leaves C gigabytes of
K and V a layer, its tokens K more. A machine holds M.

* Prompts: a stage of P layers holds them and one microbatch:
  ``P·(W + C) <= M``, so ``D_p >= ⌈L / ⌊M / (W + C)⌋⌉``.
* Tokens: d stages keep d microbatches going, so a stage of ``⌈L/d⌉`` layers
  holds d of them: ``⌈L/d⌉·(W + (C + K)·d) <= M``.

The paper's equations 2 and 3 take layers to be divisible; where they aren't,
they promise that too few machines will do. They are shown, not used. Whether
tokens fit doesn't get better with every machine, since each brings one
microbatch more: every count is looked at by itself.
"""

from __future__ import annotations

import math
from fractions import Fraction

from cost_model.numbers import exact, whole_number

MAX_LAYERS = 10_000


class StageMemory:
    """A model and a machine, in gigabytes.

    Args:
        weights_gb: of one layer.
        prompt_kv_gb: of one layer, for a microbatch's prompt.
        token_kv_gb: of one layer, for the tokens that a microbatch generates.
        memory_gb: of a machine.

    Raises:
        ConfigError: a number makes no sense; names it.
    """

    def __init__(
        self,
        layers: int,
        weights_gb: float,
        prompt_kv_gb: float,
        token_kv_gb: float,
        memory_gb: float,
    ) -> None:
        self.layers = whole_number("layers", layers, 1, MAX_LAYERS)
        self.weights_gb = exact("weights_gb", weights_gb)
        self.prompt_kv_gb = exact("prompt_kv_gb", prompt_kv_gb, above=False)
        self.token_kv_gb = exact("token_kv_gb", token_kv_gb, above=False)
        self.machine_gb = exact("memory_gb", memory_gb)

    def fits(self, prompt_machines: int, token_machines: int) -> bool:
        return self.prompts_fit(prompt_machines) and self.tokens_fit(token_machines)

    def prompts_fit(self, machines: int) -> bool:
        return machines <= self.layers and self.prompt_stage_gb(machines) <= self.machine_gb

    def tokens_fit(self, machines: int) -> bool:
        return machines <= self.layers and self.token_stage_gb(machines) <= self.machine_gb

    def prompt_stage_gb(self, machines: int) -> Fraction:
        """What the fullest of so many prompt stages holds."""
        return -(-self.layers // machines) * (self.weights_gb + self.prompt_kv_gb)

    def token_stage_gb(self, machines: int) -> Fraction:
        """What the fullest of so many token stages holds."""
        kv_gb = (self.prompt_kv_gb + self.token_kv_gb) * machines
        return -(-self.layers // machines) * (self.weights_gb + kv_gb)

    @property
    def min_prompt_machines(self) -> int | None:
        """None: not even one layer fits."""
        layers_a_stage = math.floor(self.machine_gb / (self.weights_gb + self.prompt_kv_gb))
        return -(-self.layers // layers_a_stage) if layers_a_stage else None

    @property
    def min_token_machines(self) -> int | None:
        """None: it fits on no number of machines."""
        fitting = (count for count in range(1, self.layers + 1) if self.tokens_fit(count))
        return next(fitting, None)

    @property
    def equation_2(self) -> int:
        """What the paper says that prompts need."""
        return math.ceil(self.layers * (self.weights_gb + self.prompt_kv_gb) / self.machine_gb)

    @property
    def equation_3(self) -> int | None:
        """What the paper says that tokens need. None: it fits on no number of machines."""
        room_gb = self.machine_gb - self.layers * (self.prompt_kv_gb + self.token_kv_gb)
        return math.ceil(self.layers * self.weights_gb / room_gb) if room_gb > 0 else None


class ModelMemory:
    """A whole model, and what its microbatches' sequences take on it: what is
    known of a model whose layers nobody has measured. The rule is that of the
    paper's simulator: weights in whole gigabytes, rounded up; each of a
    pipeline's stages holds its part of the layers for as many microbatches as
    there are stages, so K and V take the same whatever their number.

    Args:
        kv_gb_per_token: of one sequence's token, all layers.

    Raises:
        ConfigError: a number makes no sense; names it.
    """

    def __init__(self, model_gb: float, kv_gb_per_token: float) -> None:
        self.model_gb = exact("model_gb", model_gb)
        self.kv_gb_per_token = exact("kv_gb_per_token", kv_gb_per_token, above=False)

    def stage_gb(self, stages: int, microbatch: int, tokens: int) -> Fraction:
        """What a stage holds with microbatches of so many sequences of so many tokens."""
        return math.ceil(self.model_gb / stages) + self.kv_gb_per_token * microbatch * tokens

    def fits(self, stages: int, microbatch: int, tokens: int, machine_gb: Fraction) -> bool:
        return self.stage_gb(stages, microbatch, tokens) < machine_gb
