"""Scripts written for vLLM's offline API, and what their parameters mean."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from fastdecode import LLM, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.sequence import Logprob
from fastdecode.core.vllm_names import engine_options
from fastdecode.engine.llm import OPTION_NAMES

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/model/checkpoint"
PROMPTS = ["Once upon a time", "The old map showed"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), dtype=torch.float32, kv_memory_gb=0.05, tensor_parallel_size=1) as llm:
        yield llm


def continued(llm: LLM, **params: Any) -> Any:
    """The first prompt's first completion."""
    given = {"temperature": 0, "max_tokens": 24, **params}
    return llm.generate(PROMPTS[:1], sampling_params=SamplingParams(**given))[0].outputs[0]


def test_the_first_lines_of_every_script(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        first = output.outputs[0]
        assert output.finished and first.finished() and output.prompt == prompt
        assert first.text == output.text and first.finish_reason == "length"
        assert llm.get_tokenizer().decode(first.token_ids) == first.text
        assert first.logprobs is None and first.cumulative_logprob is None


def test_prompts_may_be_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    texts = [output.text for output in llm.generate(PROMPTS, GREEDY)]
    asked: list[Any] = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids, "cache_salt": "mine"}]
    assert [output.text for output in llm.generate(asked, GREEDY)] == texts
    assert llm.generate({"prompt": PROMPTS[0]}, GREEDY)[0].text == texts[0]
    for bad in ({"prompt": "x", "multi_modal_data": {"image": 1}}, {}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(bad, GREEDY)


def test_classes_of_prompts_and_structured_outputs(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    first, second = llm.generate(
        [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids)], GREEDY
    )
    assert first.text == second.text
    wanted = StructuredOutputsParams(choice=["Positive", "Negative"])
    (output,) = llm.generate(PROMPTS[0], SamplingParams(structured_outputs=wanted, max_tokens=24))
    assert output.text in ("Positive", "Negative")


def test_the_reason_of_a_stop_is_what_was_said(llm: LLM) -> None:
    whole = continued(llm)
    word = whole.text.split()[2]
    by_text = continued(llm, stop=["never", word])
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", word)
    token = whole.token_ids[3]
    by_token = continued(llm, stop_token_ids=[token])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    assert whole.stop_reason is None and whole.finish_reason == "length"
    eos = llm.get_tokenizer().eos_token_id
    by_eos = continued(llm, allowed_token_ids=[eos], stop_token_ids=[eos])
    assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)


def test_logprobs_of_a_prompt_have_vllms_shape(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert step is not None and isinstance(step[token], Logprob)
        assert step[token].decoded_token == llm.get_tokenizer().decode([token])


def test_a_failed_prompt_raises_its_own_error(llm: LLM) -> None:
    good, bad = llm.generate(["Once", ""], GREEDY)
    assert good.outputs
    with pytest.raises(RequestError, match="empty"):
        bad.outputs  # noqa: B018


def test_logprobs_are_mappings_with_ranks_and_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=12, logprobs=3)
    completion = llm.generate(PROMPTS[:1], params)[0].outputs[0]
    assert completion.logprobs is not None
    ranks = set()
    for token, step in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(step)) == token and 3 <= len(step) <= 4
        drawn = step[token]
        assert isinstance(drawn, Logprob) and drawn.rank is not None
        ranks.add(drawn.rank)
        assert drawn.decoded_token in completion.text or "\ufffd" in completion.text
        likelier = [other for other in step.values() if other.logprob > drawn.logprob]
        assert len(likelier) == min(drawn.rank - 1, 3)
    assert max(ranks) > 4, "a token that isn't among the likeliest was drawn"
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    total = sum(step[token].logprob for token, step in pairs)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_bad_words_are_never_said(llm: LLM) -> None:
    free = llm.generate(PROMPTS, GREEDY)
    words = [free[0].text.split()[1], free[1].text.split()[2]]
    params = SamplingParams(temperature=0, max_tokens=24, bad_words=words)
    for output, before in zip(llm.generate(PROMPTS, params), free, strict=True):
        assert output.text != before.text
        assert not any(word in output.text.split() for word in words)


def test_stop_strings_and_tokens_may_stay_in_the_text(llm: LLM) -> None:
    whole = continued(llm)
    stop = whole.text[5:9]
    cut, kept = (continued(llm, stop=stop, include_stop_str_in_output=x) for x in (False, True))
    assert kept.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == kept.token_ids
    token = whole.token_ids[4]
    cut, kept = (
        continued(llm, stop_token_ids=[token], include_stop_str_in_output=x) for x in (False, True)
    )
    assert kept.token_ids == cut.token_ids and kept.token_ids[-1] == token
    assert kept.text == cut.text + llm.get_tokenizer().decode(token)


def test_special_tokens_may_stay_in_the_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    special = tokenizer.all_special_ids[0]
    forced = {"logit_bias": {special: 100}, "max_tokens": 2, "ignore_eos": True}
    assert continued(llm, **forced).text == ""
    shown = continued(llm, skip_special_tokens=False, **forced)
    oracle = AutoTokenizer.from_pretrained(DEMO)
    assert shown.text == oracle.decode(shown.token_ids) == oracle.convert_ids_to_tokens(special) * 2


def test_a_long_prompt_may_keep_its_end(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time there was a baker who sang")
    cut = SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=5)
    (output,) = llm.generate([ids], cut)
    (expected,) = llm.generate([ids[-5:]], SamplingParams(temperature=0, max_tokens=8))
    assert output.prompt_token_ids == tuple(ids[-5:]) and output.text == expected.text
    limit = llm.facts.max_model_len
    long = SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=-1)
    (output,) = llm.generate([(ids * limit)[: 2 * limit]], long)
    assert len(output.prompt_token_ids) == limit - 8


def test_logits_processors_change_what_is_drawn(llm: LLM) -> None:
    seen: list[tuple[int, ...]] = []

    def no_token_twice(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(output))
        logits[output] = -torch.inf
        return logits

    def not_of_the_prompt(
        prompt: list[int], output: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor(prompt), -torch.inf)

    done = continued(llm, logits_processors=[no_token_twice, not_of_the_prompt])
    assert len(set(done.token_ids)) == len(done.token_ids) == 24
    assert not set(done.token_ids) & set(llm.get_tokenizer().encode(PROMPTS[0]))
    assert seen == [done.token_ids[:count] for count in range(24)]


def test_a_processor_that_raises_fails_its_request_alone(llm: LLM) -> None:
    def broken(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("why")

    params = [SamplingParams(temperature=0, logits_processors=[broken]), GREEDY]
    bad, good = llm.generate(PROMPTS, params)
    assert bad.error is not None and bad.error.code == "logits_processor_failed"
    assert "KeyError" in str(bad.error) and good.ok


def test_processors_where_the_sampler_is_elsewhere_are_refused() -> None:
    options: dict[str, Any] = {"instances": ["prefill", "decode"]}
    with LLM(str(DEMO), dtype="float32", kv_memory_gb=0.05, **options) as llm:
        params = SamplingParams(logits_processors=[lambda output, logits: logits])
        with pytest.raises(RequestError, match="logits_processors need the sampler"):
            llm.generate("Once", params)


def test_params_may_be_changed_and_are_checked_again(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    assert params == SamplingParams(max_tokens=3)
    with pytest.raises(RequestError, match="top_p"):
        params.top_p = 2
    assert params.top_p == 1, "it keeps what it had"
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        params.max_token = 3  # type: ignore[attr-defined]
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("name", "instead"),
    [("best_of", "n completions"), ("use_beam_search", "beam"), ("top_q", "did you mean top_p")],
)
def test_parameters_that_arent_there_say_what_is(name: str, instead: str) -> None:
    with pytest.raises(RequestError, match=instead):
        SamplingParams(**{name: 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"quantization": "awq"}, "recognised by their config.json"),
        ({"trust_remote_code": True}, "never run"),
        ({"tokenizer": "other/model"}, "model directory"),
        ({"tp": 1, "tensor_parallel_size": 1}, "give one of them"),
        ({"generation_config": "mine"}, "auto or ignore"),
        ({"tensor_paralel_size": 1}, "no option"),
    ],
    ids=str,
)
def test_options_that_arent_there_say_what_is(options: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        LLM(str(DEMO), **options)


VLLMS_OPTIONS: dict[str, Any] = {
    "runner": "auto", "convert": "auto", "tokenizer": None, "tokenizer_mode": "auto",
    "skip_tokenizer_init": False, "trust_remote_code": False, "allowed_local_media_path": "",
    "allowed_media_domains": None, "tensor_parallel_size": 1, "dtype": "auto",
    "quantization": None, "revision": None, "tokenizer_revision": None,
    "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0, "offload_group_size": 0,
    "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": set(),
    "enforce_eager": False, "enable_return_routed_experts": False, "return_sampling_mask": False,
    "disable_custom_all_reduce": False, "hf_token": None, "hf_overrides": {},
    "mm_processor_kwargs": None, "pooler_config": None, "structured_outputs_config": None,
    "profiler_config": None, "attention_config": None, "kv_cache_memory_bytes": None,
    "compilation_config": None, "quantization_config": None, "logits_processors": None,
    "spec_method": None, "spec_model": None, "spec_tokens": None,
    "swap_space": 4, "max_seq_len_to_capture": 8192, "task": "auto", "max_model_len": None,
    "max_num_seqs": None, "max_num_batched_tokens": None, "block_size": None,
    "kv_cache_dtype": "auto", "enable_prefix_caching": None, "pipeline_parallel_size": 1,
    "load_format": "auto", "max_logprobs": 20, "enable_lora": False, "max_loras": 1,
}  # fmt: skip
VLLMS_SAMPLING: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "seed": None, "stop": None, "stop_token_ids": None, "bad_words": None,
    "thinking_token_budget": None, "include_stop_str_in_output": False, "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "detokenize": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "output_kind": Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"]).FINAL_ONLY,
    "stream_interval": None, "structured_outputs": None, "logit_bias": None,
    "allowed_token_ids": None, "extra_args": None, "skip_clone": False,
    "repetition_detection": None, "logprob_token_ids": None, "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None, "flat_logprobs": False, "best_of": None,
    "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False,
}  # fmt: skip
VLLMS_ARGUMENTS: dict[str, Any] = {
    "use_tqdm": False, "lora_request": None, "priority": None, "tokenization_kwargs": None,
    "mm_processor_kwargs": None,
}  # fmt: skip


def test_no_default_of_vllm_is_refused(llm: LLM) -> None:
    options = engine_options(VLLMS_OPTIONS, OPTION_NAMES, str(DEMO))
    assert EngineConfig.of(str(DEMO), **options).s_part.gpu_memory_fraction == 0.92
    assert not {"block_size", "max_num_sequences", "quantization"} & set(options)
    params = SamplingParams(**VLLMS_SAMPLING)
    assert params == SamplingParams()
    params.spaces_between_special_tokens = True  # type: ignore[attr-defined]
    greedy = SamplingParams(**{**VLLMS_SAMPLING, "temperature": 0})
    (output,) = llm.generate(PROMPTS[0], greedy, **VLLMS_ARGUMENTS)
    assert output.outputs[0].text == continued(llm, max_tokens=16).text


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("priority", [0, 1], "in the order in which they come"),
        ("lora_request", "mine", "merge them"),
        ("tokenization_kwargs", {"truncation": True}, "prompt_token_ids"),
        ("use_tdqm", True, "is no argument"),
    ],
)
def test_arguments_that_arent_there_say_what_is(
    llm: LLM, name: str, value: object, instead: str
) -> None:
    for call in (llm.generate, llm.chat):
        with pytest.raises(RequestError, match=instead):
            call(PROMPTS if call == llm.generate else CHAT, **{name: value})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("beam_search", "no beam search"),
        ("embed", "generate text"),
        ("sleep", "close the LLM"),
        ("generat", "has no attribute 'generat'"),
    ],
)
def test_methods_that_arent_there_say_what_is(llm: LLM, name: str, instead: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=instead):
        getattr(llm, name)


CHAT = [{"role": "user", "content": "Who lived in the mill?"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chats_as_vllms_users_write_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    more: dict[str, Any] = {**VLLMS_ARGUMENTS, "chat_template": TEMPLATE, "tools": None,
                            "chat_template_kwargs": None}  # fmt: skip
    del more["use_tqdm"]
    spelled = {**more, "chat_template_content_format": "auto", "add_generation_prompt": True}
    (output,) = llm.chat(CHAT, params, False, continue_final_message=False, **spelled)
    assert output.prompt == "<user>Who lived in the mill?<assistant>"
    ids = llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids == tuple(ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    (again,) = llm.chat(parts, params, **more)
    assert (again.prompt, again.text) == (output.prompt, output.text)
    begun = [*CHAT, {"role": "assistant", "content": "It was "}]
    (going,) = llm.chat(begun, params, continue_final_message=True, **more)
    assert going.prompt == "<user>Who lived in the mill?<assistant>It was "
    with pytest.raises(RequestError, match="exclude each other"):
        llm.chat(begun, params, continue_final_message=True, add_generation_prompt=True, **more)
    with pytest.raises(RequestError, match="keeps whole messages"):
        llm.chat(begun, params, continue_final_message=True, conversation_id="c", **more)


def test_a_template_may_be_the_llms(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    with LLM(str(DEMO), kv_memory_gb=0.05, chat_template=str(tmp_path / "t.jinja")) as other:
        assert other.chat(CHAT, GREEDY)[0].prompt == "Who lived in the mill?!"
        assert other.get_tokenizer().apply_chat_template(CHAT, tokenize=False) == (
            "Who lived in the mill?!"
        )


def test_a_turn_of_a_conversation_has_its_prompt_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    (output,) = llm.chat(CHAT, params, chat_template=TEMPLATE, conversation_id="mill")
    assert output.prompt == "<user>Who lived in the mill?<assistant>"


def test_vllms_options_that_ask_for_nothing_are_accepted(llm: LLM) -> None:
    model = str(DEMO)
    options: dict[str, Any] = {
        "tokenizer": model, "trust_remote_code": False, "quantization": None, "dtype": "float",
        "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 8, "seed": 5,
        "gpu_memory_utilization": 0.5, "pipeline_parallel_size": 1, "disable_log_stats": True,
    }  # fmt: skip
    drawn = []
    for _ in range(2):
        with LLM(model, kv_memory_gb=0.05, **options) as other:
            config = other.config
            drawn.append([output.text for output in other.generate(PROMPTS)])
    assert (config.s_part.dtype, config.s_part.cuda_graphs) == ("float32", "off")
    assert (config.cache.prefix_cache, config.batching.max_num_sequences) == ("off", 8)
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1], "the seed decides"


def test_defaults_of_the_models_generation_config(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    said = {"eos_token_id": 1, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (model / "generation_config.json").write_text(json.dumps(said))
    told: list[str] = []
    with LLM(str(model), kv_memory_gb=0.05, progress=told.append) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 20, 1.1)
    assert "temperature 0.6, top_k 20" in told[0]
    with LLM(str(model), kv_memory_gb=0.05, generation_config="ignore") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_the_tokenizer_is_transformers(llm: LLM) -> None:
    ours, oracle = llm.get_tokenizer(), AutoTokenizer.from_pretrained(DEMO)
    text = "Once upon a time, the baker said: “hello”"
    assert ours.encode(text) == oracle.encode(text)
    assert ours([text, "a"])["input_ids"] == oracle([text, "a"])["input_ids"]
    ids = ours.encode(text)
    assert ours.decode(ids) == oracle.decode(ids)
    assert ours.decode([1, *ids], skip_special_tokens=True) == text
    assert ours.convert_ids_to_tokens(ids) == oracle.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(ours.tokenize(text)) == ids[1:]  # without <|begin|>
    for name in ("eos_token", "bos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(oracle, name), name
        assert getattr(ours, f"{name}_id") == getattr(oracle, f"{name}_id"), name
    assert ours.bos_token_id == ours(text).input_ids[0] and ours.special_tokens_map
    assert ours([text]).attention_mask == oracle([text]).attention_mask
    assert (len(ours), ours.get_vocab()) == (len(oracle), oracle.get_vocab())
    chat = [{"role": "user", "content": "hello"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    options: dict[str, Any] = {"chat_template": template, "tokenize": False}
    expected = oracle.apply_chat_template(chat, **options)
    assert ours.apply_chat_template(chat, **options) == expected
    own: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    expected = oracle.apply_chat_template(chat, **own)
    assert ours.apply_chat_template(chat, **own) == expected == "<|begin|>Oscar: hello\nNoah:"


USERS_SCRIPT = """
import torch
from fastdecode import LLM, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt

llm = LLM("model", dtype=torch.bfloat16, tensor_parallel_size=2, r_workers=2)
params = SamplingParams(temperature=0.8, stop=["\\n"], stop_token_ids=[2], max_tokens=8)
params.max_tokens = 9
prompts = [{"prompt": "Hello"}, {"prompt": "Hi"}]
outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
text: str = outputs[0].outputs[0].text
for step in outputs[0].outputs[0].logprobs or ():
    first: float = step[next(iter(step))].logprob
LLM("model", r_workers="2")  # wrong
LLM("model", quantization="awq")  # wrong
SamplingParams(best_of=2)  # wrong
"""


def test_a_users_script_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(USERS_SCRIPT)
    stubs = tmp_path / "mypy.ini"
    stubs.write_text("[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-torch.*]\n"
                     "follow_imports = skip\nignore_missing_imports = True\n")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", stubs, "--cache-dir", ROOT / ".mypy_cache",
         script],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = [n for n, line in enumerate(USERS_SCRIPT.splitlines(), 1) if line.endswith("# wrong")]
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert found == wrong, done.stdout
