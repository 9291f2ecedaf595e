"""The Python API: ``LLM(model).generate(prompts, params)``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from fastdecode.core.config import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError, WorkerError, without_frames
from fastdecode.core.sequence import Prompt, PromptRequest, Request, RequestOutput, SamplingParams
from fastdecode.core.trace import Trace
from fastdecode.engine.engine import Engine
from fastdecode.engine.progress import Progress
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from sworker.failures import is_failure
from sworker.sampler import validate_for_vocab

# Requests kept queued beside the running ones, as a multiple of those: enough that a freed place is filled at once,
# few enough that a long input file isn't held in memory.
QUEUE_AHEAD = 2


class LLM:
    """A model, ready to generate. Close it, or use it in a ``with`` statement.

    Args:
        model: a Hugging Face model directory.
        options: those of ``EngineConfig``'s groups: dtype, kv_dtype, r_workers, device, …
        progress: told what start-up is doing, one line at a time.
        trace: told what every step does, from then on.
        times: what is known of step times beforehand, for the schedule; told how long each step took.

    Raises:
        ConfigError, ModelError, WorkerError: as their docstrings say.
    """

    def __init__(
        self,
        model: str,
        *,
        progress: Callable[[str], None] | None = None,
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.of(model, **options)
        self._running = RunningEngine(config, progress, trace, times)
        self.config = config
        self._is_closed = self._is_streaming = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the R-workers. Safe to call twice."""
        self._is_closed = True
        self._running.close()

    @property
    def stats(self) -> EngineStats:
        return self._running.engine.stats

    @property
    def codec(self) -> TextCodec:
        """Between text and the model's token ids."""
        return self._running.codec

    @property
    def num_r_workers(self) -> int:
        """R-workers that it began with."""
        return self._running.num_r_workers

    @property
    def num_live_r_workers(self) -> int:
        """R-workers that haven't been lost."""
        return self._running.num_live_r_workers

    @property
    def has_hung_r_workers(self) -> bool:
        """Whether an R-worker was given up because it didn't answer: it may still be there, and hang."""
        return self._running.has_hung_r_workers

    @property
    def dtype(self) -> DType:
        """Of weights and activations."""
        return self._running.resolved.dtype

    @property
    def kv_dtype(self) -> DType:
        """Of the KV cache."""
        return self._running.resolved.kv_dtype

    @property
    def r_threads(self) -> int:
        """CPU threads of each R-worker; where they differ, the most that one has."""
        return max(welcome.num_threads for welcome in self._running.welcomes)

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of all R-workers together."""
        return sum(welcome.num_blocks for welcome in self._running.welcomes)

    @property
    def load_s(self) -> float:
        """Seconds that loading the model and starting the R-workers took."""
        return self._running.load_s

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt. Results stand in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; a single one is a batch of one.
            params: for all prompts, or one each; None is ``SamplingParams()``.
            progress: show a progress bar on stderr.

        Returns:
            One output a prompt. A bad prompt's output carries its ``error``; the others aren't touched by it. When
            the last R-worker is lost, the outputs that weren't complete carry a ``WorkerError``.

        Raises:
            RequestError: the arguments aren't prompts and sampling params, or there aren't as many of each.
            ConfigError: the LLM was closed, or a ``stream`` of it is still being read.
        """
        batch = _as_batch(prompts)
        every = _as_params(params, len(batch))
        if len(every) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(every)} sampling params: give one for all, or one each")
        requests = (PromptRequest(str(i), p, s) for i, (p, s) in enumerate(zip(batch, every, strict=True)))
        outputs: dict[str, RequestOutput] = {}
        with Progress(total=len(batch), enabled=progress) as bar:
            for output in self.stream(requests):
                outputs[output.request_id] = output
                bar.done(self.stats.num_output_tokens, failed=not output.ok)
        lost = next((o.error for o in outputs.values() if isinstance(o.error, WorkerError)), None)
        return [outputs.get(str(i)) or RequestOutput(str(i), None, (), error=lost) for i in range(len(batch))]

    def cancel_waiting(self) -> list[str]:
        """Of the requests that ``stream`` has taken, forget those of which nothing has run. Returns their ids."""
        return self._running.engine.cancel_waiting()

    def stream(
        self, requests: Iterable[PromptRequest], on_step: Callable[[], None] = lambda: None
    ) -> Iterator[RequestOutput]:
        """Run requests as they come from an iterable; yield each output as soon as it is complete.

        Only so many requests are taken ahead as keep the batch full, so memory stays flat however many there are.
        A request with the id of one that is unfinished is refused. When no R-worker is left, or the S-worker fails,
        every request that was taken is yielded with that error, and the stream ends.

        Args:
            requests: asked for the next one when there is room for it.
            on_step: called after every step, when its outputs have been yielded. What it raises ends the stream.
        """
        self._check_free()
        self._is_streaming = True
        engine = self._running.engine
        most = QUEUE_AHEAD * self.config.batching.max_num_sequences
        waiting = iter(requests)
        drained = False
        try:
            while not drained or engine.num_unfinished:
                while not drained and engine.num_unfinished_sequences < most:
                    request = next(waiting, None)
                    if request is None:
                        drained = True
                    elif (refused := self._submit(request)) is not None:
                        yield refused
                if engine.num_unfinished:
                    yield from _step(engine)
                    drained |= engine.broken is not None
                    on_step()
        finally:
            # The caller went away, or was interrupted: leave no request behind in the engine.
            engine.cancel_all()
            self._is_streaming = False

    def _check_free(self) -> None:
        if self._is_closed:
            raise ConfigError("this LLM was closed: make another one", code="closed")
        if self._is_streaming:
            raise ConfigError(
                "a stream of this LLM is still being read: read it to its end, or close() it, before the next one",
                code="busy",
            )

    def _submit(self, arrived: PromptRequest) -> RequestOutput | None:
        """Check and queue one request. Returns its output at once if it is refused."""
        text = arrived.prompt if isinstance(arrived.prompt, str) else None
        token_ids: tuple[int, ...] = ()
        try:
            token_ids = self._tokenise(arrived.prompt)
            self._running.engine.submit(self._request(arrived, token_ids), text)
        except FastDecodeError as error:
            return RequestOutput(arrived.request_id, text, token_ids, error=without_frames(error))
        return None

    def _tokenise(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character", code="empty_prompt")
            return self._checked(self._running.codec.encode(prompt), "the tokenizer and the model don't match: ")
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, str)):
            raise RequestError(
                f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", code="invalid_prompt"
            )
        return self._checked(prompt)

    def _checked(self, token_ids: Sequence[int], why: str = "") -> tuple[int, ...]:
        vocab_size = self._running.spec.vocab_size
        for place, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{why}prompt_token_ids[{place}]={token!r} is not a token id of this model (0 to {vocab_size - 1})",
                    code="invalid_token_id",
                )
        return tuple(token_ids)

    def _request(self, arrived: PromptRequest, token_ids: tuple[int, ...]) -> Request:
        params = arrived.params
        validate_for_vocab(params, self._running.spec.vocab_size)
        limit = self._running.resolved.max_model_len
        if not token_ids:
            raise RequestError("the prompt has no tokens: give at least one", code="empty_prompt")
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; the model's limit is {limit} for prompt and completion "
                f"together, so at most {limit - 1} leave room for an answer: shorten the prompt",
                code="prompt_too_long",
            )
        room = limit - len(token_ids)
        return Request(
            request_id=arrived.request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )


def _step(engine: Engine) -> list[RequestOutput]:
    """The requests that a step ended, or all there are if it broke down. What isn't the failure of a worker is a
    mistake of ours, and raises as it is."""
    try:
        return engine.step()
    except FastDecodeError as error:
        return engine.abandon(error)
    except Exception as error:
        if is_failure(error):
            return engine.abandon(WorkerError(f"the S-worker failed: {error}", code="s_worker_failed"))
        engine.abandon(FastDecodeError(f"a step broke down before: {type(error).__name__}: {error}"))
        raise


def _as_batch(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a string or a list, not {type(prompts).__name__}", code="invalid_prompt")
    batch = list(prompts)
    if batch and all(isinstance(item, int) and not isinstance(item, bool) for item in batch):
        return [batch]
    return batch


def _as_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    each: list[SamplingParams] = []
    for item in params if isinstance(params, Sequence) else [params]:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, one for all or a list of one each, not {type(item).__name__}",
                code="invalid_sampling_params",
            )
        each.append(item)
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(each)} sampling params: give one for all, or one each")
    return each
