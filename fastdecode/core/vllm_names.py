"""What scripts for vLLM say: names that mean something here under another name,
and names of what isn't here, with what is there instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypedDict

from fastdecode.core.errors import ConfigError, Given, RequestError
from fastdecode.core.structured import StructuredOutputs

StructuredOutputsParams: TypeAlias = StructuredOutputs


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


OPTION_NAMES: Final[Mapping[str, str]] = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "max_num_seqs": "max_num_sequences",
    "max_num_batched_tokens": "max_step_tokens",
    "gpu_memory_utilization": "gpu_memory_fraction",
    "kv_cache_dtype": "kv_dtype",
    "enable_prefix_caching": "prefix_cache",
    "enforce_eager": "cuda_graphs",
}
"""vLLM's name of an option → the name here."""

_VALUES: Final[Mapping[str, Mapping[Any, Any]]] = {
    "prefix_cache": {True: "on", False: "off"},
    "cuda_graphs": {True: "off", False: "auto"},
    "load_format": {"auto": "safetensors", "dummy": "random"},
    "dtype": {"half": "float16", "float": "float32"},
}
"""Option → values that vLLM's scripts give it → what they are here."""

_NO_CODE = "code of a checkpoint is never run: docs/reference/models.md lists the families"
_QUANTISED = (
    "quantised checkpoints are recognised by their config.json: leave it out, and see "
    "docs/guides/quantised.md"
)
_LOCAL = "give the model as a directory, or as NAME@REVISION of the local Hugging Face cache"
_SPECULATIVE = "there is no speculative decoding: larger batches make decoding fast here"
_NO_LORA = "adapters are not applied: merge them into the weights first"
_NO_OFFLOAD = "weights stay on the S-worker's devices: split them with tp or pp"

_LEAVE_OUT: Final = "leave it out"
_FUNCTIONS = "give functions to SamplingParams(logits_processors=[...])"
_NO_POOLING = "models generate text; there is no pooling"
_TEXT_ONLY = "prompts are text; there are no images, audio or video"
_NO_BEAMS = "there is no beam search: ask for n completions with logprobs=0"
_DELTAS = "LLM.deltas gives tokens as they come, LLM.generate whole outputs"
_NO_REPETITION = "leave it out, and give repetition_penalty or frequency_penalty"
_OF_LOGPROBS = "give logprobs, and look for the tokens among the likeliest"

OPTIONS_NOT_SUPPORTED: Final[Mapping[str, tuple[Collection[object], str]]] = {
    "quantization": ((), _QUANTISED),
    "trust_remote_code": ((False,), _NO_CODE),
    "tokenizer": ((), "the tokenizer is the model directory's: put its files there"),
    "tokenizer_mode": (("auto",), "the tokenizer is read from tokenizer.json"),
    "skip_tokenizer_init": ((False,), "give detokenize=False in SamplingParams"),
    "revision": ((), _LOCAL),
    "tokenizer_revision": ((), _LOCAL),
    "download_dir": ((), _LOCAL),
    "hf_token": ((False,), _LOCAL),
    "hf_overrides": (({},), "edit config.json in a copy of the model directory"),
    "served_model_name": ((), "give it to fastdecode serve as --served-model-name"),
    "swap_space": ((0, 4), "preempted sequences keep their KV where it is; see kv_memory_gb"),
    "cpu_offload_gb": ((0,), _NO_OFFLOAD),
    "offload_group_size": ((0,), _NO_OFFLOAD),
    "offload_num_in_group": ((1,), _NO_OFFLOAD),
    "offload_prefetch_step": ((1,), _NO_OFFLOAD),
    "offload_params": ((set(), []), _NO_OFFLOAD),
    "kv_cache_memory_bytes": ((), "give kv_memory_gb, in GB of 1e9 bytes"),
    "num_gpu_blocks_override": ((), "give kv_memory_gb, in GB of 1e9 bytes"),
    "data_parallel_size": ((1,), "start one LLM, or one fastdecode serve, for each replica"),
    "enable_expert_parallel": ((False,), "give ep, the number of S-workers that share experts"),
    "distributed_executor_backend": ((), "S-workers are MPI ranks: see fastdecode launch"),
    "speculative_config": ((), _SPECULATIVE),
    "enable_lora": ((False,), _NO_LORA),
    "max_loras": ((1,), _NO_LORA),
    "max_lora_rank": ((16,), _NO_LORA),
    "enable_chunked_prefill": ((True,), "prompts are always run in chunks: prefill_chunk"),
    "scheduling_policy": (("fcfs",), "requests run in the order in which they come"),
    "async_scheduling": ((True, False), ""),
    "max_logprobs": ((20,), "a request may ask for up to 100 logprobs"),
    "logits_processors": (([],), _FUNCTIONS),
    "override_generation_config": (({},), "give the values to SamplingParams"),
    "structured_outputs_config": (({},), "give structured_outputs to SamplingParams"),
    "guided_decoding_backend": (("auto", "guidance"), "the package llguidance is used"),
    "reasoning_parser": (("",), "LLM.chat finds the marks in the chat template"),
    "disable_log_stats": ((True, False), ""),
    "disable_custom_all_reduce": ((True, False), ""),
    "use_tqdm_on_load": ((True, False), ""),
    "runner": (("auto", "generate"), _NO_POOLING),
    "convert": (("auto", "none"), _NO_POOLING),
    "task": (("auto", "generate"), _NO_POOLING),
    "compilation_config": ((), "cuda_graphs says whether steps are captured"),
    "max_seq_len_to_capture": ((8192,), "cuda_graphs says whether steps are captured"),
    "limit_mm_per_prompt": (({},), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "allowed_local_media_path": (("",), _TEXT_ONLY),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids"),
    "enable_sleep_mode": ((False,), "close the LLM: that frees its memory"),
    "enable_return_routed_experts": ((False,), _LEAVE_OUT),
    "return_sampling_mask": ((False,), _LEAVE_OUT),
}
"""vLLM's option → values besides None that ask for nothing, and what is there instead."""

SAMPLING_NOT_SUPPORTED: Final[Mapping[str, tuple[Collection[object], str]]] = {
    "best_of": (
        (1,),
        "ask for n completions with logprobs=0, and keep the one with the greatest "
        "cumulative_logprob",
    ),
    "use_beam_search": ((False,), _NO_BEAMS),
    "length_penalty": ((1,), _NO_BEAMS),
    "early_stopping": ((False,), _NO_BEAMS),
    "spaces_between_special_tokens": ((True,), "the tokenizer's decoder sets spaces: leave it out"),
    "output_kind": (("CUMULATIVE", "FINAL_ONLY"), _DELTAS),
    "stream_interval": ((1,), _DELTAS),
    "skip_clone": ((True, False), ""),
    "extra_args": (({},), _LEAVE_OUT),
    "logprob_token_ids": (([],), _OF_LOGPROBS),
    "prompt_logprob_token_ids": (([],), _OF_LOGPROBS),
    "prompt_logprob_start": ((0,), "prompt_logprobs gives those of all tokens"),
    "flat_logprobs": ((False,), "leave it out: logprobs are mappings of token id to Logprob"),
    "guided_decoding": ((), "its newer name is structured_outputs"),
    "thinking_token_budget": ((), "leave it out, and limit the answer by max_tokens"),
    "repetition_detection": ((), _NO_REPETITION),
    "watermarking": ((False,), "answers have no watermark"),
    "skip_reading_prefix_cache": ((False,), "give cache=CacheUse(is_off=True) to LLM.generate"),
    "routed_experts_prompt_start": ((0,), _LEAVE_OUT),
    "trace_decode_token_ids": (([],), _LEAVE_OUT),
}
"""The same for vLLM's sampling parameters."""

ARGUMENTS_NOT_SUPPORTED: Final[Mapping[str, tuple[Collection[object], str]]] = {
    "lora_request": ((), _NO_LORA),
    "prompt_adapter_request": ((), _NO_LORA),
    "priority": ((0,), "requests run in the order in which they come"),
    "tokenization_kwargs": (({},), "give token ids as prompt_token_ids"),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "guided_options_request": ((), "give structured_outputs to SamplingParams"),
}
"""The same for arguments of ``LLM.generate`` and ``LLM.chat``."""

_CLOSE: Final = "close the LLM: that frees its memory"
_TRACE: Final = "fastdecode generate --trace FILE records every step"
_COUNTERS: Final = "LLM.stats and LLM.snapshot() have the counters"

METHODS_NOT_SUPPORTED: Final[Mapping[str, str]] = {
    "beam_search": _NO_BEAMS,
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _NO_POOLING),
    **dict.fromkeys(("sleep", "wake_up"), _CLOSE),
    **dict.fromkeys(("start_profile", "stop_profile"), _TRACE),
    **dict.fromkeys(("get_metrics", "llm_engine"), _COUNTERS),
    "reset_prefix_cache": "give requests a new cache_salt: they share no earlier blocks",
}
"""vLLM's attribute of an ``LLM`` → what is there instead."""


class ArgumentsNotSupported(TypedDict, total=False):
    """Arguments of vLLM's ``LLM.generate`` and ``LLM.chat`` that may ask for nothing."""

    lora_request: None
    prompt_adapter_request: None
    priority: int | Sequence[int] | None
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    guided_options_request: None


def engine_options(options: Mapping[str, Any], known: Iterable[str], model: str) -> dict[str, Any]:
    """``LLM``'s options with the names and values that they have here.

    Args:
        options: as given, by name; some may be vLLM's.
        model: the model directory: its tokenizer may be named, too.

    Raises:
        ConfigError: (code ``unsupported_option``) vLLM has the option, and it
            isn't there; or both names of one option were given.
    """
    known = frozenset(known)
    named: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:  # not given
            continue
        if name not in known and name in OPTIONS_NOT_SUPPORTED:
            nothing, instead = OPTIONS_NOT_SUPPORTED[name]
            is_own = name == "tokenizer" and value == model
            if not is_own and not _asks_nothing(value, nothing):
                text = f" is not supported: {instead}"
                raise ConfigError(Given(name, value), text, code="unsupported_option")
            continue
        here = name if name in known else OPTION_NAMES.get(name, name)
        if here in named or (here != name and options.get(here) is not None):
            raise ConfigError(Given(name), f" is {here}, which is given too: give one of them")
        if here == "dtype" and type(value).__module__ == "torch":
            value = str(value).removeprefix("torch.")
        is_plain = isinstance(value, (bool, str))
        named[here] = _VALUES.get(here, {}).get(value, value) if is_plain else value
    return named


def _asks_nothing(value: object, nothing: Collection[object]) -> bool:
    """Whether a value is None, one of these, or a list of them."""
    value = getattr(value, "name", value)  # of an enum
    if isinstance(value, (list, tuple)) and value:
        return all(_asks_nothing(each, nothing) for each in value)
    is_plain = isinstance(value, (bool, int, float, str, list, dict, set))
    return value is None or (is_plain and value in nothing)


def supported_sampling(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The sampling parameters among these, without vLLM's others that ask for nothing.
    Raises RequestError: one does ask for something, or is no sampling parameter."""
    _refuse_others(given, known, SAMPLING_NOT_SUPPORTED, "sampling parameter")
    return {name: value for name, value in given.items() if name in known}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raises RequestError: one of these arguments of a call isn't vLLM's, or asks for
    something."""
    _refuse_others(given, (), ARGUMENTS_NOT_SUPPORTED, "argument")


def _refuse_others(
    given: Mapping[str, Any],
    known: Collection[str],
    others: Mapping[str, tuple[Collection[object], str]],
    what: str,
) -> None:
    for name, value in given.items():
        if name in known:
            continue
        if name in others:
            nothing, instead = others[name]
            if _asks_nothing(value, nothing):
                continue
            text = f" is not supported: {instead}"
        else:
            near = difflib.get_close_matches(name, known, n=1)
            text = f" is no {what}{f': did you mean {near[0]}?' if near else ''}"
        raise RequestError(Given(name), text, code="unsupported_field")
