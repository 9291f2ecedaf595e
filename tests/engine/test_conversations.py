"""Conversations of an LLM: a turn runs what is new and the last drawn token, and
says what a prompt of all tokens says; what fails leaves them as they were."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from checkpoints import prompts
from small_tokenizers import TOKENIZERS

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.conversations.conversations import Conversations, Keeping
from fastdecode.conversations.order import ReaderTurns
from fastdecode.conversations.store import ConversationStore
from fastdecode.conversations.turns import History, HistoryStep, Turn, TurnPrompt, TurnPrompter
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError
from fastdecode.core.progress import Progress
from fastdecode.core.sequence import CacheUse, Completion, RequestOutput
from fastdecode.jobs.opening import open_job
from fastdecode.jobs.options import JobOptions
from fastdecode.jobs.stopping import Stopping

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
CHATML = (
    "{% for message in messages %}<s>{{ message.role }}|{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant|{% endif %}"
)
BLOCK = 16
PRIVATE = CacheUse(is_off=True)


@pytest.fixture(scope="module")
def llm(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    model = tmp_path_factory.mktemp("chats")
    for file in tiny_checkpoint("llama", vocab_size=400).iterdir():
        (model / file.name).symlink_to(file)
    TOKENIZERS["byte-level"].save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    options: dict[str, Any] = {"block_size": BLOCK, "prefix_cache": "on", "kv_memory_gb": 0.01}
    with LLM(str(model), dtype="float32", r_threads=1, **options) as made:
        yield made


def said(output: RequestOutput) -> tuple[int, ...]:
    assert output.error is None, output.error
    return output.prompt_token_ids + output.completions[0].token_ids


def code_of(output: RequestOutput) -> str | None:
    return None if output.error is None else output.error.code


@pytest.mark.parametrize(
    "way",
    [
        {"r_workers": 2, "r_partition": "heads"},
        {"r_workers": 3, "split_tokens": 32, "lanes": 2},
        {"kv_placement": "gpu"},
    ],
    ids=str,
)
def test_wherever_kv_is_a_turn_runs_what_is_new(
    way: dict[str, Any], tiny_checkpoint: Callable[..., Path]
) -> None:
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "block_size": BLOCK, **way}
    if way.get("kv_placement") == "gpu":
        del options["r_threads"]
    with LLM(str(tiny_checkpoint("llama")), prefix_cache="on", **options) as llm:
        past = 0
        for new in prompts((40, 5, 23), seed=6):
            (output,) = llm.generate([new], GREEDY, conversation_id="a")
            assert output.num_cached_tokens == past
            (alone,) = llm.generate([list(output.prompt_token_ids)], GREEDY, cache=PRIVATE)
            assert alone.completions == output.completions
            past = len(said(output)) - 1


def test_a_chats_tokens_are_gone_on_with_as_they_were_drawn(llm: LLM) -> None:
    first, second = ({"role": "user", "content": text} for text in ("The quick", "STOP"))
    (before,) = llm.chat([first], GREEDY, conversation_id="chat")
    ran = llm.stats.num_prompt_tokens
    (after,) = llm.chat([second], GREEDY, conversation_id="chat")
    rest = llm.codec.encode("</s><s>user|STOP</s><s>assistant|", add_special_tokens=False)
    assert after.prompt_token_ids == (*said(before), *rest)
    assert llm.stats.num_prompt_tokens - ran == len(rest) + 1


def test_turns_of_one_call_come_one_after_the_other_and_others_go_on(llm: LLM) -> None:
    asked = prompts((20, 30, 4, 7, 9), seed=2)
    ids = ["x", "y", "x", "x", "y"]
    one, two, three, four, five = llm.generate(asked, GREEDY, conversation_id=ids)
    assert three.prompt_token_ids == (*said(one), *asked[2])
    assert four.prompt_token_ids == (*said(three), *asked[3])
    assert five.prompt_token_ids == (*said(two), *asked[4])


def test_with_a_conversation_go_those_of_its_blocks_that_are_no_others(llm: LLM) -> None:
    (common,) = prompts((2 * BLOCK,), seed=31)
    stays, gone, again = (common + own for own in prompts((20, 30, 4), seed=32))
    llm.generate([stays, gone], GREEDY, conversation_id=["stays", "gone"])
    (before,) = llm.generate([gone], GREEDY)
    assert before.num_cached_tokens == 3 * BLOCK
    llm.forget("gone")
    (after,) = llm.generate([gone + again], GREEDY)
    assert after.num_cached_tokens == 2 * BLOCK
    (turn,) = llm.generate([again], GREEDY, conversation_id="stays")
    assert turn.num_cached_tokens == len(turn.prompt_token_ids) - len(again) - 1


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(llm: LLM) -> None:
    new, again = prompts((12, 3), seed=3)
    (first,) = llm.generate([new], GREEDY, conversation_id="f")
    bad, later = llm.generate([[-1], again], GREEDY, conversation_id=["f", "f"])
    assert (code_of(bad), code_of(later)) == ("invalid_token_id", "previous_turn_failed")
    (long,) = llm.generate([[5] * 5000], GREEDY, conversation_id="f")
    assert code_of(long) == "conversation_too_long"
    (output,) = llm.generate([again], GREEDY, conversation_id="f")
    assert output.prompt_token_ids == (*said(first), *again)


def test_a_turn_that_cannot_be_kept_fails_alone(llm: LLM, tmp_path: Path) -> None:
    class Full(ConversationStore):
        def append(self, conversation_id: str, *more: Any) -> None:
            if conversation_id == "full" and len(more[1].token_ids):
                raise FastDecodeError(f"no space left on {tmp_path}", code="output_failed")
            super().append(conversation_id, *more)

    store = Full(tmp_path / "log", bytes(32))
    some = Conversations(None, store)
    names = ["full", "other", "full", "other", "full"]
    turns = [
        Turn(str(i), whose, TurnPrompter([5 + i] * 3, llm.codec), GREEDY)
        for i, whose in enumerate(names)
    ]
    outputs = {int(each.request_id): each for each in llm.stream(turns, conversations=some)}
    codes = [code_of(outputs[i]) for i in range(5)]
    assert codes == [None, None, "conversation_not_kept", None, "previous_turn_failed"]
    assert str(tmp_path) in str(outputs[2].error)
    before = some.begin("full")
    assert tuple(before.token_ids) == said(outputs[0])


def test_what_nobody_has_used_is_not_forgotten(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm.forget("fresh")
    assert "conversation 'fresh' isn't open: nothing is forgotten" in caplog.text
    (output,) = llm.generate([[5, 6]], GREEDY, conversation_id="fresh")
    assert output.ok


def test_what_was_forgotten_never_begins_anew(llm: LLM) -> None:
    llm.generate([[5, 6]], GREEDY, conversation_id="gone")
    llm.forget("gone")
    llm.forget("gone")
    (output,) = llm.generate([[5, 6]], GREEDY, conversation_id="gone")
    assert code_of(output) == "conversation_expired"


@pytest.mark.parametrize("prompt", [None, b"abc", "", [], [True]], ids=repr)
def test_what_is_no_prompt_is_no_turn_either(llm: LLM, prompt: Any) -> None:
    (alone,) = llm.generate([prompt], GREEDY)
    (turn,) = llm.generate([prompt], GREEDY, conversation_id=[f"new {prompt!r}"])
    assert code_of(turn) == code_of(alone) is not None


@pytest.mark.parametrize("conversation_id", [None, ["new"]])
def test_a_dict_that_is_no_prompt_is_refused_at_once(llm: LLM, conversation_id: Any) -> None:
    with pytest.raises(RequestError, match="a prompt has no 'a'"):
        llm.generate([{"a": 1}], GREEDY, conversation_id=conversation_id)


def test_messages_that_are_changed_afterwards_change_no_conversation(llm: LLM) -> None:
    message = {"role": "user", "content": "The quick"}
    (first,) = llm.chat([message], GREEDY, conversation_id="mutable")
    message["content"] = "STOP"
    (second,) = llm.chat([message], GREEDY, conversation_id="mutable")
    assert second.prompt_token_ids[: len(said(first))] == said(first)
    proxy = MappingProxyType(message)
    (third,) = llm.chat([proxy], GREEDY, conversation_id="mutable")
    assert third.ok
    no_json = {"role": "user", "content": "STOP", "more": {1, 2}}
    (refused,) = llm.chat([no_json], GREEDY, conversation_id="mutable")
    assert code_of(refused) == "chat_template_failed"


def test_turns_that_are_cancelled_while_they_wait_hold_up_nobody() -> None:
    def prompter(history: History) -> TurnPrompt:
        return TurnPrompt((1,), 0, lambda completion: HistoryStep(0, (1,)))

    def turn(name: str) -> Turn:
        return Turn(name, "c", prompter, GREEDY)

    talk = ReaderTurns(Conversations())
    first, due, waiting = turn("1"), turn("2"), turn("3")
    assert [talk.waits(each) for each in (first, due, waiting)] == [False, True, True]
    talk.begin(first)
    talk.end(first, RequestOutput("1", None, (1,), (Completion(0, "", (2,), "length"),)))
    assert talk.due
    talk.cancel_waiting()
    later = turn("4")
    assert not talk.due and not talk.num_waiting and not talk.waits(later)
    with pytest.raises(RequestError, match="earlier turn"):
        talk.begin(later)


def test_an_engine_that_does_not_start_lets_go_of_its_conversations(
    llm: LLM, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"conversations": str(tmp_path), "r_threads": 1}
    with pytest.raises(ConfigError) as failed:
        LLM(llm.config.model, kv_memory_gb=1e-6, **options)
    Keeping(conversations=str(tmp_path)).open(Path(llm.config.model)).close()
    assert "KV block" in str(failed.value)  # whose frames are still there


@pytest.mark.parametrize("conversation_id", ["", "x" * 2000, 7, ["a", "b"]])
def test_what_is_no_id_is_refused(llm: LLM, conversation_id: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate([[5, 6]], GREEDY, conversation_id=conversation_id)
    assert refused.value.code == "invalid_conversation"


def test_several_answers_are_no_turn_and_chats_are_no_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="one answer"):
        llm.generate([[5]], SamplingParams(n=2), conversation_id="n")
    message = {"role": "user", "content": "The quick"}
    llm.generate([[5]], GREEDY, conversation_id="raw")
    (chat,) = llm.chat([message], GREEDY, conversation_id="raw")
    llm.chat([message], GREEDY, conversation_id="cooked")
    (raw,) = llm.generate([[5]], GREEDY, conversation_id="cooked")
    assert code_of(chat) == code_of(raw) == "invalid_conversation"


# --- batches
# ------------------------------------------------------------------------------


class Batch:
    """A batch job's files, and runs of it."""

    on_error = "refuse"

    def __init__(self, directory: Path, llm: LLM, lines: list[dict[str, Any]]) -> None:
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self.turns = directory / "out.jsonl.turns"
        self._llm = llm
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, **begin: bool) -> dict[str, dict[str, Any]]:
        """custom_id → body."""
        sampling = {"temperature": 0.8, "max_tokens": 7, "ignore_eos": True}
        options = JobOptions(
            input=self.input, output=self.output, sampling=sampling, run_seed=5, **begin,
            on_error=self.on_error,
        )  # fmt: skip
        config = EngineConfig.of(self._llm.config.model, dtype="float32")
        with open_job(options, config, lambda line: None) as job:
            job.run(self._llm, Stopping(60), Progress(io.StringIO()))
        answers = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({answer["id"] for answer in answers}) == len(answers)
        return {answer["custom_id"]: answer["response"]["body"] for answer in answers}


def line(custom_id: str, whose: str | None, **body: Any) -> dict[str, Any]:
    is_chat = "messages" in body
    url = "/v1/chat/completions" if is_chat else "/v1/completions"
    told = {**body, "return_token_ids": True, "conversation_id": whose}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": told}


LINES = [
    line("a1", "a", prompt=[5, 6, 7]),
    line("b1", "b", messages=[{"role": "user", "content": "The quick"}]),
    line("lone", None, prompt=[9, 9]),
    line("a2", "a", prompt=[8] * 30),
    line("b2", "b", messages=[{"role": "user", "content": "STOP"}]),
    line("bad", "c", prompt=[399] * 4000),
    line("c2", "c", prompt=[5]),
    line("a3", "a", prompt=[4]),
]


def said_of(bodies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: body["error"]["code"] if "error" in body else body["choices"][0]["token_ids"]
        for name, body in bodies.items()
    }


def test_a_batch_has_its_turns_in_order_and_goes_on_after_any_crash(
    llm: LLM, tmp_path: Path
) -> None:
    """The turns' file gets a turn before the output gets its answer. Every state that a crash
    can leave behind is resumed."""
    batch = Batch(tmp_path, llm, LINES)
    bodies = batch.run()
    expected = said_of(bodies)
    assert expected["bad"] == "conversation_too_long" and expected["c2"] == "previous_turn_failed"
    first, last = bodies["a1"]["usage"], bodies["a3"]["usage"]
    assert last["prompt_tokens"] == first["prompt_tokens"] + 7 + 30 + 7 + 1
    answers = batch.output.read_bytes().splitlines(keepends=True)
    whole = batch.turns.read_bytes()
    names = [json.loads(answer)["custom_id"] for answer in answers]
    is_turn = [name not in ("lone", "bad", "c2") for name in names]
    for count in range(2, len(answers), 1 if TRIES_ALL else 3):
        num_turns = sum(is_turn[:count])
        for kept in {num_turns, num_turns + is_turn[count]}:
            batch.output.write_bytes(b"".join(answers[:count]))
            batch.turns.write_bytes(whole)
            with sqlite3.connect(batch.turns) as connection:
                connection.execute("DELETE FROM turns WHERE number > ?", (kept,))
            connection.close()
            assert said_of(batch.run(resume=True)) == expected


def test_bodies_that_cannot_be_turns_are_bad_lines(llm: LLM, tmp_path: Path) -> None:
    bad = [
        line("x", "x", prompt=[[1], [2]]),
        line("y", "", prompt=[1]),
        line("z", "z", prompt=[1], n=2),
    ]
    for one in bad:
        with pytest.raises(FastDecodeError, match="conversation_id"):
            Batch(tmp_path, llm, [one]).run()


def test_turns_after_a_bad_line_fail_whenever_they_are_run(llm: LLM, tmp_path: Path) -> None:
    lines = [
        line("a1", "a", prompt=[5, 6]),
        line("b1", "b", prompt=[7]),
        line("a1", "a", prompt=[8]),  # a duplicate
        line("b2", "b", prompt=[9], nonsense=1),
        line("a3", "a", prompt=[9]),
        line("b3", "b", prompt=[9]),
    ]
    batch = Batch(tmp_path, llm, lines)
    batch.on_error = "skip"
    batch.run()
    whole = batch.output.read_bytes()
    answers = [json.loads(answer) for answer in whole.splitlines()]
    codes = {
        int(answer["id"].rsplit("_", 1)[1]): answer["response"]["body"]["error"]["code"]
        for answer in answers
        if answer["response"]["status_code"] >= 400
    }
    assert sorted(codes) == [3, 4, 5, 6] and codes[5] == codes[6] == "previous_turn_failed"
    kept = [raw for raw in whole.splitlines(True) if b"previous_turn_failed" not in raw]
    batch.output.write_bytes(b"".join(kept))
    batch.run(resume=True)
    assert sorted(batch.output.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_an_overwritten_output_takes_its_turns_with_it(llm: LLM, tmp_path: Path) -> None:
    batch = Batch(tmp_path, llm, [line("a1", "a", prompt=[5, 6])])
    batch.run()
    assert batch.turns.exists()
    batch.input.write_text(json.dumps(line("lone", None, prompt=[5, 6])) + "\n")
    batch.run(overwrite=True)
    assert not batch.turns.exists()
    batch.turns.write_text(batch.input.read_text())
    batch.input = batch.turns
    with pytest.raises(ConfigError, match="input and turns are the same file"):
        batch.run(overwrite=True)
    assert batch.turns.exists()
