"""What scripts for vLLM say: names that mean something here under another name,
and names of what isn't here, with what is there instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypedDict

from fastdecode.core.errors import ConfigError, Given, RequestError
from fastdecode.core.structured import StructuredOutputs

StructuredOutputsParams: TypeAlias = StructuredOutputs


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

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
    "prefix_cache": {True: "on", False: "off", None: "auto"},
    "cuda_graphs": {True: "off", False: "auto"},
    "dtype": {"half": "float16", "float": "float32"},
}
"""Option → values that vLLM's scripts give it → what they are here."""

_NO_CODE = "code of a checkpoint is never run: docs/reference/models.md lists the families"
_QUANTISED = (
    "quantised checkpoints are recognised by their config.json: leave it out, and see "
    "docs/guides/quantised.md"
)
_LOCAL = "give the model as a directory, or as NAME@REVISION of the local Hugging Face cache"
_SPECULATIVE = "speculative decoding isn't there: the batch is what makes decoding fast here"
_NO_LORA = "adapters are not applied: merge them into the weights first"
_NO_OFFLOAD = "weights stay on the S-worker's devices: split them with tp or pp"

OPTIONS_NOT_SUPPORTED: Final[Mapping[str, tuple[Collection[object], str]]] = {
    "quantization": ((None,), _QUANTISED),
    "trust_remote_code": ((False, None), _NO_CODE),
    "tokenizer": ((None,), "the tokenizer is the model directory's: put its files there"),
    "tokenizer_mode": (("auto",), "the tokenizer is read from tokenizer.json or tekken.json"),
    "skip_tokenizer_init": ((False,), "give detokenize=False in SamplingParams"),
    "revision": ((None,), _LOCAL),
    "tokenizer_revision": ((None,), _LOCAL),
    "download_dir": ((None,), _LOCAL),
    "hf_token": ((None, False), _LOCAL),
    "hf_overrides": ((None, {}), "edit config.json in a copy of the model directory"),
    "swap_space": ((0,), "preempted sequences keep their KV where it is; see kv_memory_gb"),
    "cpu_offload_gb": ((0,), _NO_OFFLOAD),
    "kv_cache_memory_bytes": ((None,), "give kv_memory_gb, in GB of 1e9 bytes"),
    "data_parallel_size": ((1,), "start one LLM, or one fastdecode serve, for each replica"),
    "enable_expert_parallel": ((False,), "give ep, the number of S-workers that share experts"),
    "distributed_executor_backend": ((None,), "S-workers are MPI ranks: see fastdecode launch"),
    "speculative_config": ((None,), _SPECULATIVE),
    "enable_lora": ((False,), _NO_LORA),
    "enable_chunked_prefill": ((True, None), "prompts are always run in chunks: prefill_chunk"),
    "max_logprobs": ((20,), "a request may ask for up to 100 logprobs"),
    "logits_processors": ((None, []), "give functions to SamplingParams(logits_processors=[...])"),
    "override_generation_config": ((None, {}), "give the values to SamplingParams"),
    "disable_log_stats": ((True, False), ""),
    "disable_custom_all_reduce": ((True, False), ""),
    "runner": (("auto", "generate"), "models generate text; there is no pooling"),
    "task": (("auto", "generate", None), "models generate text; there is no pooling"),
    "compilation_config": ((None,), "cuda_graphs says whether steps are captured"),
    "limit_mm_per_prompt": ((None, {}), "prompts are text; there are no images, audio or video"),
}
"""vLLM's option → values that ask for nothing, and what is there instead."""

SAMPLING_NOT_SUPPORTED: Final[Mapping[str, str]] = {
    "best_of": "ask for n completions with logprobs=0, and keep the one with the greatest "
    "cumulative_logprob",
    "use_beam_search": "there is no beam search: ask for n completions with logprobs=0",
    "length_penalty": "there is no beam search: ask for n completions with logprobs=0",
    "early_stopping": "there is no beam search: ask for n completions with logprobs=0",
    "spaces_between_special_tokens": "the tokenizer's own decoder decides: leave it out",
    "output_kind": "LLM.deltas gives tokens as they come, LLM.generate whole outputs",
    "stream_interval": "LLM.deltas gives tokens as they come",
    "extra_args": "leave it out",
    "logprob_token_ids": "give logprobs, and look for the tokens among the likeliest",
    "flat_logprobs": "leave it out: logprobs are mappings of token id to Logprob",
    "guided_decoding": "its newer name is structured_outputs",
    "thinking_token_budget": "leave it out, and limit the answer by max_tokens",
    "repetition_detection": "leave it out, and give repetition_penalty or frequency_penalty",
}
"""vLLM's sampling parameter → what is there instead."""


def engine_options(options: Mapping[str, Any], known: Iterable[str], model: str) -> dict[str, Any]:
    """``LLM``'s options with the names and values that they have here.

    Args:
        options: as given, by name; some may be vLLM's.
        known: names of options here.
        model: the model directory: its tokenizer may be named, too.

    Raises:
        ConfigError: (code ``unsupported_option``) vLLM has the option, and it
            isn't there; or both names of one option were given.
    """
    known = frozenset(known)
    named: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known and name in OPTIONS_NOT_SUPPORTED:
            _refuse_unless_nothing(name, value, model)
            continue
        here = name if name in known else OPTION_NAMES.get(name, name)
        if here in named or (here != name and here in options):
            raise ConfigError(Given(name), f" is {here}, which is given too: give one of them")
        named[here] = _value_of(here, value)
    return named


def _refuse_unless_nothing(name: str, value: object, model: str) -> None:
    nothing, instead = OPTIONS_NOT_SUPPORTED[name]
    if value in nothing or (name == "tokenizer" and value == model):
        return
    raise ConfigError(
        Given(name, value), f" is not supported: {instead}", code="unsupported_option"
    )


def _value_of(name: str, value: Any) -> Any:
    if name == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    values = _VALUES.get(name, {})
    is_simple = value is None or isinstance(value, (bool, str))
    return values.get(value, value) if is_simple else value


def refuse_sampling_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raises RequestError: a name isn't a sampling parameter."""
    for name in given:
        if name in known:
            continue
        if name in SAMPLING_NOT_SUPPORTED:
            text = f" is not supported: {SAMPLING_NOT_SUPPORTED[name]}"
        else:
            near = difflib.get_close_matches(name, known, n=1)
            text = f" is no sampling parameter{f': did you mean {near[0]}?' if near else ''}"
        raise RequestError(Given(name), text, code="unsupported_field")
