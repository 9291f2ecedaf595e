"""An LLM for tests of what happens around one: it answers by hashing, in an
order of its own, without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastdecode.core.errors import FastDecodeError, RequestError, WorkerError
from fastdecode.core.sequence import Completion, PromptRequest, RequestOutput
from fastdecode.text.codec import TextCodec

CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, '
    '"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, '
    '"num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 128, '
    '"rms_norm_eps": 1e-5, "torch_dtype": "float32"}'
)


def model_dir(parent: Path) -> Path:
    """A model directory for jobs that never load it: of the weights there are
    only the names and shapes."""
    directory = parent / "model"
    directory.mkdir()
    (directory / "config.json").write_text(CONFIG)
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(4)
    )
    return directory


class FakeLLM:
    """Like ``LLM`` as far as a batch job goes.

    Args:
        width: requests that run at once; as many again wait.
        fail: what a request comes to instead of an answer; None: an answer.
        before_step: called before every step.
    """

    def __init__(
        self,
        width: int = 4,
        fail: Callable[[PromptRequest], FastDecodeError | None] = lambda request: None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.codec = TextCodec(None)
        self.stats = SimpleNamespace(num_output_tokens=0, num_prompt_tokens=0)
        self.num_live_r_workers = 2
        self.most_taken = 0
        self.num_served = 0
        self._width = width
        self._fail = fail
        self._before_step = before_step
        self._taken: dict[str, list[Any]] = {}  # id → [request, steps left]

    def stream(
        self,
        requests: Iterable[PromptRequest],
        on_tick: Callable[[], None] | None = None,
        conversations: object = None,
    ) -> Iterator[RequestOutput]:
        arriving, drained = iter(requests), False
        try:
            while not drained or self._taken:
                while not drained and len(self._taken) < 2 * self._width:
                    request = next(arriving, None)
                    drained = request is None
                    if request is not None:
                        assert request.request_id not in self._taken
                        self._taken[request.request_id] = [request, 1 + digest(request) % 5]
                self.most_taken = max(self.most_taken, len(self._taken))
                self._before_step()
                if self.num_live_r_workers == 0:
                    drained = True
                    yield from [
                        self._output(r, WorkerError("all are lost"))
                        for r, _ in self._taken.values()
                    ]
                    self._taken.clear()
                yield from self._step()
                if on_tick is not None:
                    on_tick()
        finally:
            self._taken.clear()

    def cancel_waiting(self) -> None:
        for request_id in list(self._taken)[self._width :]:
            del self._taken[request_id]

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(
            engine=SimpleNamespace(workers=(self.num_live_r_workers, 2), num_running=0)
        )

    def _step(self) -> list[RequestOutput]:
        outputs = []
        for request_id, state in list(self._taken.items())[: self._width]:
            state[1] -= 1
            if state[1] == 0:
                del self._taken[request_id]
                outputs.append(self._output(state[0], self._fail(state[0])))
        return outputs

    def _output(self, request: PromptRequest, error: FastDecodeError | None) -> RequestOutput:
        prompt = request.prompt
        if isinstance(prompt, str):
            error = error or RequestError("no tokenizer", code="no_tokenizer")
            prompt = []
        if error is not None:
            return RequestOutput(request.request_id, None, tuple(prompt), error=error)
        self.num_served += 1
        self.stats.num_output_tokens += request.params.n
        completions = tuple(
            Completion(index, "", (digest(request, index) % 50,), "length")
            for index in range(request.params.n)
        )
        return RequestOutput(request.request_id, None, tuple(prompt), completions)


def digest(request: PromptRequest, index: int = 0) -> int:
    """What an answer depends on: the prompt, the seed and the temperature."""
    asked = f"{list(request.prompt)} {request.params.seed} {request.params.temperature} {index}"
    return int.from_bytes(hashlib.blake2b(asked.encode(), digest_size=4).digest(), "little")
