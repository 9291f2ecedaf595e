"""An instance that lies, before real ones: each request's answer is one engine's,
the healthy instance isn't lost, and the controller goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from instance_processes import Process, assert_all_is_free, controller, engine, instances
from instance_runs import params, prompts, tokens

from examples import TRIES_ALL
from fastdecode import LLM

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from lying_instance import HARMLESS, LIES, ONLY_PREFILL, lying_instance

PATIENT_S = 30.0
ROLES = ("prefill", "decode")
CASES = [
    (role, lie)
    for number, lie in enumerate(LIES)
    for role in (("prefill",) if lie in ONLY_PREFILL else ROLES)
    if TRIES_ALL or lie in ONLY_PREFILL or role == ROLES[number % 2]
]


@pytest.fixture(scope="module")
def three(model: str) -> Iterator[list[Process]]:
    """One that prefills and one that decodes stand behind the liar, by turns; and one
    for both is healthy."""
    options = ("--worker-silence-s", str(PATIENT_S))
    with instances(model, "prefill", "decode", "both", options=options) as processes:
        yield processes


@pytest.mark.parametrize(("role", "lie"), CASES, ids=lambda case: case.replace(" ", "-"))
def test_a_lie_costs_no_request_and_no_healthy_instance(
    model: str, one: LLM, three: list[Process], role: str, lie: str
) -> None:
    asked, how = prompts(16, seed=61), params(16, seed=61, n=2)
    expected = tokens(one.generate(asked, how))
    behind = three[role == "decode"]
    others = [process for process in three if process is not behind]
    with lying_instance(behind.address, lie, PATIENT_S) as liar:
        lies = Process(behind.job, role, liar.address)
        with controller(
            model, [lies, *others], worker_silence_s=PATIENT_S, worker_timeout_s=5.0
        ) as llm:
            outputs = llm.generate(asked, how)
            assert not [output.error for output in outputs if output.error]
            assert tokens(outputs) == expected
            assert liar.has_lied.wait(PATIENT_S)
            if lie not in HARMLESS:
                assert llm.until(lambda: engine(llm).remote[0].turn > 0), "it came back"
            assert not any(each.turn for each in engine(llm).remote[1:])
            assert llm.until(lambda: not any(
                each.broken or each.stranded for each in engine(llm).remote))  # fmt: skip
            outputs = llm.generate(asked, how)
            assert not [output.error for output in outputs if output.error]
            assert tokens(outputs) == expected
            assert_all_is_free(llm)
