"""Deltas of an LLM put together are its outputs, to the byte; interrupts leave
it as usable as before; chats."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TOKENIZERS
from values import replace

from examples import examples
from fastdecode import LLM, PromptRequest, SamplingParams
from fastdecode.core.delta import OutputFold
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.sequence import RequestOutput

VOCAB = 400
WAIT_S = 120.0
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}:{% endif %}"
)


def with_tokenizer(model: Path, directory: Path, kind: str) -> Path:
    shutil.copytree(model, directory)
    TOKENIZERS[kind].save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def llms(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LLM]]:
    model = tiny_checkpoint("llama", vocab_size=VOCAB)
    kinds = ("byte-level", "llama")
    made = {
        kind: LLM(
            str(with_tokenizer(model, tmp_path_factory.mktemp("tokenizer") / kind, kind)),
            dtype="float32",
            r_threads=1,
            kv_memory_gb=0.01,
            max_num_sequences=6,
        )
        for kind in kinds
    }
    yield made
    for llm in made.values():
        llm.close()


def folded(llm: LLM, requests: list[PromptRequest]) -> list[RequestOutput]:
    """The outputs that a reader of deltas puts together."""
    folds = {
        r.request_id: OutputFold(r.request_id, None, tuple(r.prompt), r.params.n) for r in requests
    }  # type: ignore[arg-type]
    outputs: dict[str, RequestOutput] = {}
    for delta in llm.deltas(iter(requests)):
        output = folds[delta.request_id].add(delta)
        if output is not None:
            outputs[delta.request_id] = output
    return [outputs[request.request_id] for request in requests]


def without_texts(output: RequestOutput) -> RequestOutput:
    """As deltas put together: tokens by their ids alone."""
    completions = []
    for each in output.completions:
        steps = each.logprobs and tuple(replace(step, texts=()) for step in each.logprobs)
        completions.append(replace(each, logprobs=steps))
    return replace(output, completions=tuple(completions))


# Common letters, so that stop strings are said, and beginnings of them too.
STOPS = st.lists(st.text("aeiou ntsr\ufffd", min_size=1, max_size=3), max_size=3)


@settings(max_examples=examples(40))
@given(
    kind=st.sampled_from(["byte-level", "llama"]),
    stops=st.lists(STOPS, min_size=1, max_size=4),
    seed=st.integers(0, 1 << 20),
    n=st.integers(1, 3),
    min_tokens=st.integers(0, 8),
    logprobs=st.sampled_from([None, 0, 2]),
)
def test_deltas_put_together_are_the_outputs(
    llms: dict[str, LLM],
    kind: str,
    stops: list[list[str]],
    seed: int,
    n: int,
    min_tokens: int,
    logprobs: int | None,
) -> None:
    asked = [
        SamplingParams(
            stop=tuple(stop),
            seed=seed + i,
            n=n,
            min_tokens=min_tokens,
            logprobs=logprobs,
            max_tokens=30,
            ignore_eos=True,
        )
        for i, stop in enumerate(stops)
    ]
    given_prompts = prompts([3 + i for i in range(len(asked))], seed=seed, vocab=VOCAB)
    expected = [without_texts(x) for x in llms[kind].generate(given_prompts, asked)]
    requests = [
        PromptRequest(str(i), p, s)
        for i, (p, s) in enumerate(zip(given_prompts, asked, strict=True))
    ]
    assert folded(llms[kind], requests) == expected


@contextlib.contextmanager
def steps_held(llm: LLM, after: int) -> Iterator[None]:
    """Make no more than ``after`` steps: a slow reader finds the first tokens alone."""
    engine, may_go_on, numbers = llm._running.engine, threading.Event(), itertools.count()
    step = engine.step

    def held() -> None:
        if next(numbers) >= after:
            assert may_go_on.wait(WAIT_S)
        step()

    engine.step = held
    try:
        yield
    finally:
        may_go_on.set()
        del engine.step


def test_tokens_come_while_others_are_still_to_come(llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with steps_held(llms["byte-level"], 9):
        deltas = llms["byte-level"].deltas([PromptRequest("a", [5, 6, 7], params)])
        first = next(deltas)
        assert first.finish_reason is None and 1 <= len(first.token_ids) < 10
        deltas.close()
    assert llms["byte-level"].generate([[5]], SamplingParams(max_tokens=1))[0].ok


# --- interrupts
# ------------------------------------------------------------------------------


def interrupted(act: Callable[[], object], after_s: float) -> bool:
    """Whether a Ctrl-C, so long after the beginning, came before the end."""
    done = threading.Event()

    def interrupt() -> None:
        if not done.wait(after_s):
            signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        try:
            act()
        finally:
            done.set()
            thread.join()
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_at_any_moment_leaves_the_llm_usable(llama: str) -> None:
    asked = prompts((20, 3, 7, 11), seed=1)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=10 + 9 * i, ignore_eos=True)
        for i in range(4)
    ]
    with LLM(llama, dtype="float32", r_threads=1, kv_memory_gb=0.01, max_num_sequences=3) as llm:
        expected = llm.generate(asked, params)
        chance, num_interrupts = random.Random(7), 0
        for _ in range(examples(40)):
            num_interrupts += interrupted(
                lambda: llm.generate(asked, params), chance.uniform(0.0, 0.1)
            )
            assert llm.generate(asked, params) == expected
    assert num_interrupts > examples(5)


def test_an_interrupted_start_leaves_no_thread(llama: str) -> None:

    def tell(text: str) -> None:
        if text.startswith("loading"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        LLM(llama, dtype="float32", r_threads=1, kv_memory_gb=0.01, progress=tell)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


# --- chats
# ------------------------------------------------------------------------------


def test_chats_equal_generate_of_their_template(llms: dict[str, LLM], tmp_path: Path) -> None:
    llm, params = llms["byte-level"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    chats = [[{"role": "user", "content": "The quick"}], [{"role": "user", "content": "STOP"}]]
    texts = ["user: The quick\nassistant:", "user: STOP\nassistant:"]
    outputs = llm.generate(
        [llm.codec.encode(text, add_special_tokens=False) for text in texts], params
    )
    expected = [replace(one, prompt=text) for one, text in zip(outputs, texts, strict=True)]
    assert llm.chat(chats, params) == expected
    assert llm.chat(chats[0], params) == expected[:1]
    (named,) = llm.chat(chats[0], params, variables={"name": "Noah"})
    (bare,) = llm.chat(chats[0], params, add_generation_prompt=False)
    assert len({named.prompt_token_ids, bare.prompt_token_ids, expected[0].prompt_token_ids}) == 3
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}STOP")
    (own,) = llm.chat(chats[0], params, chat_template=tmp_path / "own.jinja")
    written = llm.codec.encode("The quickSTOP", add_special_tokens=False)
    assert own.prompt_token_ids == tuple(written)


def test_a_chat_that_the_template_refuses_costs_the_others_nothing(llms: dict[str, LLM]) -> None:
    good, bad = [{"role": "user", "content": "a"}], [{"role": "system", "content": "a"}]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 3, 4)]
    first, refused, last = llms["llama"].chat([good, bad, good], params)
    assert refused.error is not None and refused.error.code == "chat_template_failed"
    assert [len(o.completions[0].token_ids) for o in (first, last)] == [2, 4]
    assert [o.request_id for o in (first, refused, last)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "messages", [None, "hi", [], [[]], [{"content": "x"}], [[{"role": "user"}], "hi"]]
)
def test_what_is_no_chat_is_refused(llms: dict[str, LLM], messages: object) -> None:
    if messages == []:
        assert llms["llama"].chat([]) == []
        return
    with pytest.raises(RequestError) as refused:
        llms["llama"].chat(messages)  # type: ignore[arg-type]
    assert refused.value.code == "invalid_messages"


def test_a_model_without_a_template_has_no_chats(llama: str) -> None:
    with (
        LLM(llama, dtype="float32", r_threads=1, kv_memory_gb=0.01) as llm,
        pytest.raises(ConfigError, match="chat_template") as refused,
    ):
        llm.chat([{"role": "user", "content": "x"}])
    assert refused.value.code == "no_chat_template"
