"""The Python API: ``LLM(model).generate(prompts, params)``."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastdecode.conversations.arguments import (
    PromptGiven,
    as_batch,
    as_chats,
    as_ids,
    as_params,
    chat_prompts,
    check_cache,
    one_of,
    parsed,
)
from fastdecode.conversations.conversations import Conversations, Keeping
from fastdecode.conversations.turns import (
    Turn,
    TurnPrompter,
    check_id,
    no_reuse_warning,
    why_no_reuse,
)
from fastdecode.core.config.engine import GROUPS, EngineConfig
from fastdecode.core.config.options import declared
from fastdecode.core.delta import Delta
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given, RequestError, WorkerError
from fastdecode.core.model.generation_defaults import GENERATION_CONFIGS, generation_defaults, told
from fastdecode.core.model.local_models import find_model
from fastdecode.core.progress import Progress
from fastdecode.core.resuming import Session
from fastdecode.core.sequence import (
    SHARED,
    CacheUse,
    Prompt,
    PromptRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from fastdecode.core.trace import Trace
from fastdecode.core.vllm_names import (
    METHODS_NOT_SUPPORTED,
    ArgumentsNotSupported,
    engine_options,
    refuse_arguments,
)
from fastdecode.engine.checker import RequestChecker
from fastdecode.engine.instances.cluster import make_service
from fastdecode.engine.rank_roles import serve_other_rank
from fastdecode.engine.request_stream import Arriving, RequestStream
from fastdecode.engine.service import EngineService, Snapshot
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.chat_format import ChatFormat, ChatOptions
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Chat, Message, Rendering
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenText
from fastdecode.text.tokenizer import ModelTokenizer
from fastdecode.text.tools import Tools

# Requests kept queued beside the running ones, as a multiple of those: enough
# that a freed place is filled at once, few enough that a long input file isn't
# held in memory.
QUEUE_AHEAD = 2

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastdecode.engine.llm_options import LLMOptions

T = TypeVar("T")
OPTION_NAMES = frozenset(
    [each.name for group in GROUPS.values() for each in declared(group)]
    + [field.name for field in fields(Keeping)]
)
"""Of ``LLM``."""
logger = logging.getLogger(__name__)


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


class LLM:
    """A model, ready to generate. Close it, or use it in a ``with`` statement.

    In a script that ``mpirun`` starts, the first rank continues. The others serve as R-workers, or
    as further S-workers, until the first is done, and then end their processes.

    The engine runs in its own thread. Any thread may use it, with one reading at a time, and an
    interrupt (Ctrl-C) leaves it usable. A fork of the process can't use it.

    Args:
        model: A Hugging Face model directory.
        given: Options of ``EngineConfig``'s groups: dtype, kv_dtype, r_workers, device, …; and
            of ``Keeping``: conversations, conversation_ttl_s, max_conversations. vLLM's names of
            some are known, too.
        progress: Called with what start-up is doing, one line at a time.
        trace: Records every step.
        times: What is known of step times beforehand, for the schedule. Gets each step's time.
        session: Of a run that another process can continue, where R-workers are at addresses
            (``fastdecode run-batch`` has one).
        generation_config: ``auto`` gives requests without parameters what the model's
            generation_config.json recommends, ``ignore`` doesn't.
        seed: Source of the seeds of requests without one. None for random seeds.
        chat_template: A file, or a text, in place of the model's own for ``chat``.

    Raises:
        ConfigError, ModelError, WorkerError: If options, the model or R-workers are unfit.
    """

    def __init__(
        self,
        model: str,
        *,
        progress: Callable[[str], None] | None = None,
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
        session: Session | None = None,
        generation_config: str = "auto",
        seed: int | None = None,
        chat_template: str | Path | None = None,
        **given: Unpack[LLMOptions],
    ) -> None:
        self._given_template = chat_template
        options = engine_options(given, OPTION_NAMES, model)
        defaults = _defaults(model, generation_config, progress)
        self._default_params = SamplingParams(**defaults)
        keeping = Keeping.taken_from(options)
        asked = EngineConfig.of(model, **options)
        self.config = config = serve_other_rank(asked, progress or (lambda line: None))
        self.conversations = keeping.open(find_model(model))
        """What ``conversation_id`` names."""
        self.service: Final = make_service(config, progress, trace, times, session)
        """Runs requests of all callers."""
        try:
            self._running = self.service.open()
        except BaseException:
            self.conversations.close()
            raise
        self.conversations.on_over = partial(_end_conversation, self.service)
        # An engine that nobody can reach any more needn't wait for the end of the process.
        weakref.finalize(self, self.service.ask_to_close).atexit = False
        self.codec: TextCodec = self._running.codec
        """Between text and the model's token ids."""
        self.facts = _facts_of(config, self._running)
        begun = None if session is None else session.begun
        limits = self.facts.vocab_size, self.facts.max_model_len
        seeds = None if seed is None else Random(seed)
        self._checker = RequestChecker(self.codec, *limits, begun, seeds)
        self._reading: RequestStream | None = None
        """The latest, which may be over."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    if not TYPE_CHECKING:  # mypy refuses the names itself

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For vLLM's methods that LLM lacks it names a replacement."""
            if name in METHODS_NOT_SUPPORTED:
                instead = METHODS_NOT_SUPPORTED[name]
                raise AttributeError(f"LLM.{name} is not supported: {instead}")
            return object.__getattribute__(self, name)

    def close(self) -> None:
        """Stop the engine and the R-workers. Safe to call twice."""
        try:
            self.service.close()
        finally:  # turns that were over when it was closed are kept
            self.conversations.close()

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self._running.engine.stats
        return stats

    def snapshot(self) -> Snapshot:
        """How it is, R-workers that were lost among it; never waits for a step."""
        return self.service.snapshot()

    def generate(
        self,
        prompts: PromptGiven | Sequence[PromptGiven],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        conversation_id: str | Sequence[str] | None = None,
        cache: CacheUse = SHARED,
        progress: bool = False,
        use_tqdm: bool | Callable[..., Any] | None = None,
        **others: Unpack[ArgumentsNotSupported],
    ) -> list[RequestOutput]:
        """Continue every prompt. Results stand in the order of the prompts.

        Args:
            prompts: Texts, lists of token ids, or dicts with ``prompt`` or ``prompt_token_ids``,
                and perhaps ``cache_salt``. A single one is a batch of one.
            params: For all prompts, or one each. None for ``get_default_sampling_params``.
            sampling_params, use_tqdm: Other names of ``params`` and ``progress``.
            conversation_id: Of each prompt, which is the new part of that conversation. An unused
                id begins one.
            cache: The KV blocks they share with other requests, if blocks are kept
                (``prefix_cache``).
            progress: Show on stderr how far it is.
            others: Arguments of vLLM that ask for nothing.

        Returns:
            One output per prompt. A bad prompt's output has its ``error``, and the others don't.
            When the last R-worker is lost, incomplete outputs have a ``WorkerError``.

        Raises:
            RequestError: If the arguments aren't equal numbers of prompts and sampling params.
            ConfigError: If the LLM was closed, or a ``stream`` of it is still being read.
        """
        check_cache(cache)
        batch, uses = as_batch(prompts, cache)
        params = one_of("params", params, "sampling_params", sampling_params)
        every = self._checked_params(params, len(batch))
        progress = progress or bool(use_tqdm)
        refuse_arguments(others)
        ids = as_ids(conversation_id, len(batch))
        if ids is None:
            return self._run_all(_requests(zip(batch, every, uses, strict=True)), every, progress)
        self._warn_of_turns(cache)
        turns = [
            Turn(str(i), whose, TurnPrompter(prompt, self.codec), its, use)
            for i, (whose, prompt, its, use) in enumerate(zip(ids, batch, every, uses, strict=True))
        ]
        return self._run_all(turns, every, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        conversation_id: str | Sequence[str] | None = None,
        cache: CacheUse = SHARED,
        progress: bool = False,
        **others: Unpack[ArgumentsNotSupported],
    ) -> list[RequestOutput]:
        """Continue conversations by the model's chat template, as ``generate`` continues prompts.
        Arguments that both have mean the same.

        Args:
            messages: A conversation, or several: ``[{"role": "user", "content": "…"}, …]``.
            tools: Tools that the model may call, as OpenAI's API has them. The outputs'
                completions have ``tool_calls``, and ``content`` for the other text.
            tool_choice: ``"auto"``, ``"none"``, ``"required"``, or ``{"type": "function",
                "function": {"name": …}}``.
            parallel_tool_calls: If false, at most one call.
            chat_template: A file to use in place of the model's own, or a text with ``{``, which
                is the template itself.
            chat_template_content_format: Contents reach the template as texts (``string``), lists
                of parts (``openai``), or as it takes them (``auto``).
            add_generation_prompt: End prompts with what begins the assistant's turn. None does so
                unless the last message is continued.
            continue_final_message: The answer continues the text of the last message.
            variables, chat_template_kwargs: More names for the template.
            conversation_id: Of each conversation, whose ``messages`` are only the new ones.

        Returns:
            As ``generate``. An output's ``prompt`` is what the template makes of the conversation.

        Raises:
            RequestError, ConfigError: As ``generate``, or if a chat template is missing.
        """
        chats = as_chats(messages)
        params = one_of("params", params, "sampling_params", sampling_params)
        every = self._checked_params(params, len(chats))
        variables = one_of("variables", variables, "chat_template_kwargs", chat_template_kwargs)
        progress = progress or bool(use_tqdm)
        check_cache(cache)
        refuse_arguments(others)
        ids = as_ids(conversation_id, len(chats))
        chosen = Tools.of(tools, tool_choice, parallel_tool_calls)
        definitions = () if chosen is None else chosen.definitions
        how = Rendering.of(add_generation_prompt, continue_final_message, variables, definitions)
        template = _chat_template(self.config.model, chat_template or self._given_template)
        with contextlib.closing(template):
            options = ChatOptions(chat_template_content_format=chat_template_content_format)
            chat_format = ChatFormat.of(template, self.codec.special_tokens, options)
            how = replace(how, style=chat_format.style)
            formats = [chat_format.continuing(how.continued(chat)) for chat in chats]
            answers = [each.answer(chosen) for each in formats]
            every = [
                each.params(its, chosen) if answer is not None else its
                for each, answer, its in zip(formats, answers, every, strict=True)
            ]
            if ids is not None:
                self._warn_of_turns(cache)
                using = self.codec, template
                prompters = [TurnPrompter(Chat(tuple(new), how), *using) for new in chats]
                turns = [
                    Turn(str(place), *each, cache)
                    for place, each in enumerate(zip(ids, prompters, every, strict=True))
                ]
                answered = self._run_all(turns, every, progress)
                return [
                    parsed(output, answer, self.codec)
                    for output, answer in zip(answered, answers, strict=True)
                ]
            prompts, outputs = chat_prompts(chats, template, self.codec, how)
        params = [every[place] for place in prompts]
        given = zip(prompts.values(), params, strict=True)
        requests = _requests((ids, its, cache) for (_, ids), its in given)
        answered = self._run_all(requests, params, progress)
        for (place, (text, _)), output in zip(prompts.items(), answered, strict=True):
            output = replace(output, request_id=str(place), prompt=text)
            outputs[place] = parsed(output, answers[place], self.codec)
        return [outputs[place] for place in range(len(chats))]

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer. Raises ConfigError: If it has none."""
        eos = self._running.spec.eos_token_ids
        model = find_model(self.config.model)
        return ModelTokenizer(self.codec, model, eos, self._given_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of what requests without parameters take: see ``generation_config``."""
        return copy(self._default_params)

    def _checked_params(self, params: object, count: int) -> list[SamplingParams]:
        """Return one for each of ``count`` requests. Raise RequestError if that can't be."""
        every = as_params(params, count, self._default_params)
        if self.config.instances.instances and any(its.logits_processors for its in every):
            raise RequestError(
                Given("logits_processors"),
                " need the sampler in this process, and instances have their own: use "
                "logit_bias, allowed_token_ids or bad_words",
                code="unsupported_field",
            )
        return every

    def forget(self, conversation_id: str) -> None:
        """End a conversation and remove its content. Later turns of it are an error.

        KV blocks that no other conversation shares are freed before the engine's next step. An id
        that no turn has used stays new, and is warned of.
        """
        if not self.conversations.forget(check_id(conversation_id)):
            logger.warning("conversation %r isn't open: nothing is forgotten", conversation_id)

    def stream(
        self,
        requests: Iterable[Arriving],
        on_tick: Callable[[], None] | None = None,
        conversations: Conversations | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Run requests as they come from an iterable. Yield each output once it is complete.

        Requests are taken ahead until the batch stays full, so memory stays flat. Request
        ids must be unique among those unfinished. When the engine breaks down, as with the loss of
        its last R-worker, every request that was taken is yielded with that error.

        Args:
            requests: Asked for the next one when there is room for it.
            on_tick: Called whenever outputs have been yielded, and a few times a second. What it
                raises ends the stream.
            conversations: Those that requests are turns of. None for the LLM's own.
        """
        return self._read(
            requests, on_tick, lambda delta, output: output, conversations, every_step=False
        )

    def deltas(
        self, requests: Iterable[Arriving], on_tick: Callable[[], None] | None = None
    ) -> Generator[Delta, None, None]:
        """Run requests like ``stream``, but yield what is new of each sequence as it comes."""
        return self._read(requests, on_tick, lambda delta, output: delta, every_step=True)

    def _read(
        self,
        requests: Iterable[Arriving],
        on_tick: Callable[[], None] | None,
        pick: Callable[[Delta, RequestOutput | None], T | None],
        conversations: Conversations | None = None,
        *,
        every_step: bool,
    ) -> Generator[T, None, None]:
        """Yield what ``pick`` makes of each delta and output, unless that is None. Raises
        ConfigError: If another reading is not over."""
        batching, instances = self.config.batching, self.config.instances
        most_sequences = QUEUE_AHEAD * batching.max_num_sequences * max(1, instances.most_decoding)
        reading = RequestStream(
            self.service,
            self._checker,
            most_sequences,
            self.conversations if conversations is None else conversations,
            every_step=every_step,
        )
        try:
            if self._reading is not None:
                self._reading.make_way()
            self._reading = reading
            for delta, output in reading.read(requests, on_tick):
                if (picked := pick(delta, output)) is not None:
                    yield picked
        finally:
            reading.end()

    def cancel_waiting(self) -> None:
        """Forget those requests that ``stream`` has taken, and of which nothing has run."""
        if self._reading is not None:
            self._reading.cancel_waiting()

    def _warn_of_turns(self, cache: CacheUse) -> None:
        """Warn where conversation_id saves nothing. Called by what the user has called."""
        why = no_reuse_warning(why_no_reuse(self.config), cache)
        if why:
            warnings.warn(why, stacklevel=3)

    def _run_all(
        self, requests: Iterable[Arriving], params: Sequence[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        """Return one output per request, in the order of their ids, which are numbers."""
        outputs: dict[str, RequestOutput] = {}
        with contextlib.ExitStack() as stack:
            tick = stack.enter_context(_shown(self, len(params), outputs)) if progress else None
            for output in stack.enter_context(contextlib.closing(self.stream(requests, tick))):
                outputs[output.request_id] = output
        lost = next((o.error for o in outputs.values() if isinstance(o.error, WorkerError)), None)
        return [
            _decoded(outputs[str(i)], its, self.codec)
            if str(i) in outputs
            else RequestOutput(str(i), None, (), error=lost)
            for i, its in enumerate(params)
        ]


def _facts_of(config: EngineConfig, running: Any) -> Facts:
    """Return the facts of a ``RunningCluster`` or a ``RunningEngine``."""
    stage_layers: tuple[int, ...] = ()
    if config.instances.instances:
        identity, kv_placement = running.identity, config.r_part.kv_placement
        kv_placement = "r" if kv_placement == "auto" else kv_placement
        decoding = [x for x in running.welcomes if x.role.decodes] or list(running.welcomes)
        num_kv_blocks = sum(x.num_tokens // x.block_size for x in decoding)
    else:
        resolved = running.resolved
        identity, kv_placement = resolved.identity, resolved.config.r_part.kv_placement
        num_kv_blocks = sum(welcome.num_blocks for welcome in running.welcomes)
        stage_layers = tuple(map(len, resolved.layers))
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
        stage_layers=stage_layers,
    )


def _end_conversation(service: EngineService, token_ids: Sequence[int], salt: str) -> None:
    """Tell the engine, between two of its steps."""
    token_ids = tuple(token_ids)
    service.look(lambda running: running.engine.end_conversation(token_ids, salt))


def _defaults(
    model: str, generation_config: str, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    """Return what requests without parameters take. Raises ConfigError, CheckpointError."""
    generation_config = {"vllm": "ignore"}.get(generation_config, generation_config)
    if generation_config not in GENERATION_CONFIGS:
        known = " or ".join(GENERATION_CONFIGS)
        raise ConfigError(Given("generation_config", generation_config), f" is not {known}")
    defaults = generation_defaults(find_model(model), generation_config)
    if defaults and progress is not None:
        progress(told(defaults))
    return defaults


def _decoded(output: RequestOutput, params: SamplingParams, codec: TextCodec) -> RequestOutput:
    """Add the texts of tokens whose logprobs were asked for, if text is wanted."""
    is_wanted = params.logprobs is not None or params.prompt_logprobs is not None
    if not is_wanted or not params.detokenize:
        return output
    names = TokenText(codec.vocabulary_of(params))
    completions = [
        one
        if one.logprobs is None
        else replace(one, logprobs=tuple(_named(step, names) for step in one.logprobs))
        for one in output.completions
    ]
    of_prompt = output.prompt_logprobs and tuple(
        step and _named(step, names) for step in output.prompt_logprobs
    )
    return replace(output, completions=tuple(completions), prompt_logprobs=of_prompt)


def _named(step: TokenLogprob, names: TokenText) -> TokenLogprob:
    ids = step.token_id, *(token for token, _ in step.top)
    return replace(step, texts=tuple(map(names.text_of, ids)))


def _chat_template(model: str, given: str | Path | None) -> ChatTemplate:
    """Return a model's chat template, or the given one. Raises ConfigError: If both lack."""
    template = ChatTemplate.load(find_model(model), given)
    if template is None:
        raise ConfigError(
            f"{model} has no chat template: give a file as chat_template, or use generate",
            code="no_chat_template",
        )
    return template


def _requests(given: Iterable[tuple[Prompt, SamplingParams, CacheUse]]) -> list[PromptRequest]:
    return [PromptRequest(str(i), *each) for i, each in enumerate(given)]


@contextlib.contextmanager
def _shown(
    llm: LLM, num_requests: int, outputs: Mapping[str, RequestOutput]
) -> Iterator[Callable[[], None]]:
    """Show how far a call is. Yield what is to be called meanwhile."""
    tokens_before = llm.stats.num_output_tokens
    num_counted = num_failed = 0

    def tick() -> None:
        nonlocal num_counted, num_failed
        num_failed += sum(not x.ok for x in islice(outputs.values(), num_counted, None))
        num_counted = len(outputs)
        now = llm.snapshot().engine
        bar.update(
            done=len(outputs),
            num_failed=num_failed,
            num_tokens=llm.stats.num_output_tokens - tokens_before,
            workers=now.workers,
            num_running=now.num_running,
        )

    with Progress(sys.stderr, "requests") as bar:
        bar.begin(num_requests)
        yield tick
        tick()
