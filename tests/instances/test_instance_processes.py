"""Instances that are processes of their own, over ZeroMQ: the tokens are those of
one engine, whoever is lost on the way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from instance_processes import (
    ENGINE,
    SILENCE_S,
    Process,
    assert_all_is_free,
    controller,
    engine,
    instance,
    instances,
    ready,
)
from instance_runs import answers, params, prompts, requests_of, tokens
from mpi_launch import PATHS, running
from news import WAIT_S, NewsLLM
from raw_messages import RawSubmit
from values import replace
from zmq_r_workers import at, r_workers

from examples import TRIES_ALL
from fastdecode import LLM
from fastdecode.cli.main import main
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import OutputFold
from fastdecode.core.errors import ConfigError, RequestError, WorkerError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import Request, RequestOutput, SamplingParams
from fastdecode.engine.instances.cluster import connect
from fastdecode.engine.instances.registry import greet
from fastdecode.wire.instances import Deltas, InstanceHello, Submit
from fastdecode.wire.messages import Failed

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")


@pytest.fixture(scope="module")
def four(model: str) -> Iterator[list[Process]]:
    with instances(model, "prefill", "prefill", "decode", "decode") as processes:
        yield processes


MANY, FEW = slice(0, 4), slice(1, 3)


@pytest.mark.parametrize(
    ("several", "n"),
    [(MANY, 3), (FEW, 1), *[(MANY, 1), (FEW, 3)] * TRIES_ALL],
    ids=lambda x: {0: "2+2", 1: "1+1"}[x.start] if isinstance(x, slice) else str(x),
)
def test_tokens_are_those_of_one_engine(
    model: str, one: LLM, four: list[Process], n: int, several: slice
) -> None:
    asked, how = prompts(24), params(24, n=n)
    with controller(model, four[several]) as llm:
        assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
        assert llm.stats.num_recomputed == llm.stats.num_moved == llm.stats.num_failed_fetches == 0
        assert llm.stats.num_handed_over > 0 and llm.stats.fetched_bytes > 0
        assert_all_is_free(llm)


def test_prompts_run_with_kv_on_the_device_and_decode_on_r_workers(
    model: str, one: LLM, tmp_path: Path
) -> None:
    """Each instance keeps KV where it likes; none is stranded for having no R-worker.
    The one that decodes reports its state in a file."""
    status = tmp_path / "status.json"
    asked, how = prompts(8, seed=13), params(8, seed=13, n=2)
    on_device = ("--kv-placement", "gpu", "--device", "cpu")
    at = ENGINE.index("--r-threads")
    without_r_workers = ENGINE[:at] + ENGINE[at + 2 :]
    with (
        instance(model, "prefill", *on_device, engine=without_r_workers) as prefill,
        instance(model, "decode", "--status", str(status)) as decode,
        controller(model, [ready(prefill, "prefill"), ready(decode, "decode")]) as llm,
    ):
        for _ in range(2):
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
        assert llm.stats.num_recomputed == llm.stats.num_failed_fetches == 0
        assert llm.stats.num_handed_over > 0 and llm.stats.fetched_bytes > 0
        decode.wait_until(lambda: json.loads(status.read_text())["generation_tokens"] > 0)
        assert json.loads(status.read_text())["num_live_r_workers"] > 0
        os.kill(decode.pid, signal.SIGTERM)
        decode.wait_until(lambda: json.loads(status.read_text())["state"] == "ended")


def test_with_a_key_and_r_workers_at_addresses(model: str, one: LLM, tmp_path: Path) -> None:
    key = str(tmp_path / "key")
    assert main(["r-worker", "--new-key", key]) == 0
    asked, how = prompts(8, seed=41), params(8, seed=41, n=2)
    with contextlib.ExitStack() as stack:
        options = ("--keep-serving", "--key", key)
        _, addresses = stack.enter_context(r_workers("*", "*", options=options))
        few = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off", "--key", key)
        jobs = [
            stack.enter_context(instance(model, "prefill", *at(addresses), engine=few)),
            stack.enter_context(instance(model, "decode", "--key", key)),
        ]
        with NewsLLM(model, instances=[ready(job, "").address for job in jobs], key=key) as llm:
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
            assert llm.stats.num_handed_over > 0 and llm.stats.num_failed_fetches == 0
            assert_all_is_free(llm)


def test_nonsense_ends_the_controller_that_says_it(
    model: str, one: LLM, four: list[Process]
) -> None:
    with controller(model, four) as llm:
        expected = answers(llm.generate(prompts(3), params(3)))
    model_hash = open_checkpoint(model).model_hash
    hello = InstanceHello(model_hash)
    for said in ("no requests", [[1, 2]], 7):
        hub = connect([four[0].address], None, SILENCE_S)
        (line,) = hub.connections
        welcomes, _ = greet(hub, hello, WAIT_S, {})
        assert welcomes[0].role is InstanceRole.PREFILL
        line.send(RawSubmit(said))  # type: ignore[arg-type]
        while not isinstance(refused := line.receive(WAIT_S), Failed):
            assert not isinstance(refused, Deltas)
        assert refused.message
        hub.close()
    with controller(model, four) as llm:
        assert answers(llm.generate(prompts(3), params(3))) == expected
        assert_all_is_free(llm)


def test_a_request_that_cannot_be_run_costs_no_other(model: str, four: list[Process]) -> None:
    """Another instance may have lied to the controller about what is known of it."""
    hello = InstanceHello(open_checkpoint(model).model_hash)
    good = Request("good", (5, 6), SamplingParams(ignore_eos=True), 8, seed=1)
    bad = [
        replace(good, request_id="tokens", prompt_token_ids=(1 << 30,)),
        replace(good, request_id="length", max_tokens=1 << 23),
        replace(good, request_id="sequence", drawn={4: (1,)}),
        replace(good, request_id="drawn", drawn={0: (7,) * 8}),
        replace(good, request_id="stop", params=SamplingParams(stop_token_ids=(1 << 30,))),
    ]
    hub = connect([four[0].address], None, SILENCE_S)
    (line,) = hub.connections
    greet(hub, hello, WAIT_S, {})
    line.send(Submit((*bad, good)))
    ended: dict[str, bool] = {}
    while len(ended) < len(bad) + 1:
        message = line.receive(WAIT_S)
        assert not isinstance(message, Failed)
        for delta in message.deltas if isinstance(message, Deltas) else ():
            if delta.error is not None or delta.finish_reason is not None:
                ended[delta.request_id] = isinstance(delta.error, RequestError)
    assert ended == {"good": False, **{each.request_id: True for each in bad}}
    hub.close()


def test_controllers_come_one_after_another(model: str, one: LLM, four: list[Process]) -> None:
    asked, how = prompts(6, seed=4), params(6, seed=4)
    for _ in range(2):
        with controller(model, four) as llm:
            found = llm.generate(asked, how)
            assert answers(found) == answers(one.generate(asked, how))
            # Totals are of this controller's requests.
            drawn = sum(len(x.token_ids) for output in found for x in output.completions)
            assert llm.stats.num_output_tokens == drawn
            with pytest.raises(WorkerError, match="serves another"):
                LLM(model, instances=[four[0].address], worker_timeout_s=1.0)


def test_roles_change_while_they_run(model: str, one: LLM, four: list[Process]) -> None:
    asked, how = prompts(60, seed=21), params(60, seed=21, n=2)
    chance, ticks = random.Random(2), iter(range(1 << 20))
    roles = list(InstanceRole)
    with controller(model, four) as llm:

        def flip() -> None:
            if next(ticks) % 2:
                name, role = chance.choice(four).address, chance.choice(roles)
                llm.service.look(lambda running: running.engine.set_role(name, role))

        outputs = {o.request_id: o for o in llm.stream(requests_of(asked, how), flip)}
        found = [outputs[str(i)] for i in range(60)]
        assert answers(found) == answers(one.generate(asked, how))
        assert engine(llm).counts.num_moved == 0
        assert_all_is_free(llm)


class Trouble:
    """Has something done to a process when so many tokens have been told."""

    def __init__(self, llm: LLM, after: int, act: Callable[[], object]) -> None:
        self.llm, self.after, self.act = llm, after, act

    def run(self, asked: list[list[int]], how: list[SamplingParams]) -> list[RequestOutput]:
        """The outputs, of which no token was told twice."""
        folds = [OutputFold(str(i), None, tuple(x), how[i].n) for i, x in enumerate(asked)]
        outputs: dict[str, RequestOutput] = {}
        count = 0
        for delta in self.llm.deltas(requests_of(asked, how)):
            count += len(delta.token_ids)
            if self.after >= 0 and count >= self.after:
                self.after = -1
                self.act()
            output = folds[int(delta.request_id)].add(delta)
            if output is not None:
                outputs[delta.request_id] = output
        assert self.after < 0, "nothing happened"
        return [outputs[str(i)] for i in range(len(asked))]


LOSSES = [("prefill", signal.SIGSTOP), ("decode", signal.SIGKILL)]
MORE_LOSSES = [("prefill", signal.SIGKILL), ("decode", signal.SIGSTOP)]


@pytest.mark.parametrize(
    ("role", "trouble"), LOSSES + MORE_LOSSES * TRIES_ALL, ids=lambda x: getattr(x, "name", x)
)
def test_who_is_lost_is_gone_on_without_and_may_come_back(
    model: str, one: LLM, four: list[Process], role: str, trouble: signal.Signals
) -> None:
    asked, how = prompts(30, seed=12), params(30, seed=12, n=2)
    expected = tokens(one.generate(asked, how))
    with instance(model, role) as job:
        hurt = ready(job, role)
        port = hurt.address.rpartition(":")[2]
        with controller(model, [hurt, *four]) as llm:
            act = Trouble(llm, 20, lambda: os.kill(hurt.pid, trouble))
            outputs = act.run(asked, how)
            assert not any(output.error for output in outputs)
            assert tokens(outputs) == expected
            assert llm.until(lambda: engine(llm).clients[0].broken is not None)
            with contextlib.ExitStack() as stack:
                if trouble is signal.SIGSTOP:
                    os.kill(hurt.pid, signal.SIGCONT)
                else:
                    ready(stack.enter_context(instance(model, role, port=port)), role)
                assert llm.until(lambda: engine(llm).clients[0].broken is None)
                assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
                assert_all_is_free(llm)


CONTROLLER = """
import json, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ImportError(f"{name} is not for a controller")

sys.meta_path.insert(0, Forbidden())
from fastdecode.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def command(model: str, processes: list[Process], directory: Path) -> list[str]:
    lines = [{"id": str(i), "prompt_token_ids": x} for i, x in enumerate(prompts(5, seed=2))]
    asked = directory / "in.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        *(sys.executable, "-c", CONTROLLER, "generate", "--model", model, "--input", str(asked)),
        *("--output", str(directory / "out.jsonl"), "--summary", str(directory / "s.json")),
        *("--instances", ",".join(each.address for each in processes)),
        *("--temperature", "0", "--max-tokens", "5", "--ignore-eos"),
    ]


def test_by_its_command_and_without_torch(
    model: str, one: LLM, four: list[Process], tmp_path: Path
) -> None:
    words = command(model, four, tmp_path)
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, **PATHS}
    )
    assert done.returncode == 0, done.stderr
    how = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    outputs = one.generate(prompts(5, seed=2), how)
    assert [tuple(x["token_ids"]) for x in told] == [y.completions[0].token_ids for y in outputs]
    counted = json.loads((tmp_path / "s.json").read_text())["instances"]
    assert (counted["handed_over"], counted["moved"], counted["failed_fetches"]) == (5, 0, 0)


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=lambda x: x.name)
def test_when_the_controller_is_lost_all_is_freed(
    model: str, one: LLM, four: list[Process], tmp_path: Path, trouble: signal.Signals
) -> None:
    words = [*command(model, four, tmp_path), "--worker-silence-s", str(SILENCE_S)]
    words[words.index("--max-tokens") + 1] = "2000"
    words[words.index("--input") + 1] = str(tmp_path / "long.jsonl")
    line = {"id": "a", "prompt_token_ids": [5] * 40, "n": 3}
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({**line, "id": str(i)}) + "\n" for i in range(400))
    )
    with running(words) as lost:
        lost.wait_until(lambda: lost.output().count("\ninstance tcp") == len(four))
        os.kill(lost.pid, trouble)
        with controller(model, four) as llm:  # once they have lost the other one
            asked, how = prompts(8, seed=33), params(8, seed=33)
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
            assert_all_is_free(llm)


def test_what_does_not_fit_together_is_refused_by_name(
    model: str, four: list[Process], tiny_checkpoint: Callable[..., Path]
) -> None:
    addresses = [each.address for each in four]
    with pytest.raises(ConfigError, match="r_workers=2 cannot be set by the controller"):
        LLM(model, instances=addresses, r_workers=2)
    with pytest.raises(ConfigError, match="Remove the others"):
        LLM(model, instances=[*addresses, "prefill", "decode"])
    with pytest.raises(ConfigError, match="give each address once"):
        LLM(model, instances=[addresses[0]] * 2)
    other = str(tiny_checkpoint("qwen2"))
    with pytest.raises(WorkerError, match="another model"):
        LLM(other, instances=addresses)
    refused = pytest.raises(ConfigError, match="in blocks of 32, ")
    with instances(model, "decode", options=("--block-size", "32")) as (larger,), refused:
        LLM(model, instances=[*addresses, larger.address])
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model, instances=addresses, max_model_len=64)
    with pytest.raises(ConfigError, match="kv_dtype='int8': the instances run with"):
        LLM(model, instances=addresses, kv_dtype="int8")
    with pytest.raises(ConfigError, match="dtype='bfloat16': the instances run with float32"):
        LLM(model, instances=addresses, dtype="bfloat16")
    with pytest.raises(ConfigError, match="needs a key"):
        LLM(model, instances=["tcp://8.8.8.8:7000"])
