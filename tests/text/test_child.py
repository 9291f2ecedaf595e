"""The process that a model's own programs run in: it answers, ends when it
should, and takes nothing with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import psutil
import pytest

from fastdecode.core.errors import CHILD_DIED, RequestError
from fastdecode.text import child as child_module
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.child import Limits
from fastdecode.text.encoder import Encoder

CHECKPOINT = Path(__file__).parents[2] / "examples" / "model" / "checkpoint"
NOW = datetime(2026, 2, 3)
LIMITS = Limits(memory_bytes=512 << 20, cpu_s=1, open_cpu_s=5, slowness=30)


def said(template: ChatTemplate, content: str) -> str:
    return template.render([{"role": "user", "content": content}], NOW)


Find: TypeAlias = Callable[[], psutil.Process]


@pytest.fixture
def child() -> Find:
    """``child()`` is the one process that the test has started; other tests may
    have left theirs."""
    others = set(psutil.Process().children())

    def find() -> psutil.Process:
        (process,) = set(psutil.Process().children()) - others
        return process

    return find


def test_one_process_answers_one_question_after_the_other(child: Find) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", "x", {}, LIMITS)
    first = child()
    for content in ("a", "é 😀 漢字", "half \ud83d", "x" * 300_000):
        assert said(template, content) == f"<{content}>"
    assert child() == first
    template.close()
    template.close()
    assert not first.is_running()


def test_after_its_death_the_next_question_has_another(
    child: Find, caplog: pytest.LogCaptureFixture
) -> None:
    source = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in "
        "range(99999) %}{% endfor %}"
    )
    template = ChatTemplate(source + "{% endfor %}{% endif %}fine", "/its/path", {}, LIMITS)
    first = child()
    with pytest.raises(RequestError, match="more than 1 s") as caught:
        said(template, "loop")
    assert caught.value.code == "chat_template_failed"
    assert "/its/path" in caplog.text and "/its/path" not in str(caught.value)
    assert not first.is_running()
    assert said(template, "a") == "fine"
    assert child() != first
    template.close()


def kills(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_child_killed_while_idle_is_replaced(child: Find, number: signal.Signals) -> None:
    template = ChatTemplate("fine", "x", {}, LIMITS)
    encoder = Encoder(CHECKPOINT / "tokenizer.json")
    for owner in (template, encoder):
        process = owner._child._process
        assert process is not None
        kills(process, number)
    assert said(template, "a") == "fine"
    assert encoder.encode("Once", add_special_tokens=False)
    template.close()
    encoder.close()


@pytest.mark.parametrize(
    ("num_deaths", "number", "code"),
    [
        (1, signal.SIGKILL, ""),
        (1, signal.SIGABRT, ""),
        (2, signal.SIGKILL, CHILD_DIED),
        (2, signal.SIGTERM, CHILD_DIED),
        (2, signal.SIGABRT, "chat_template_failed invalid_prompt"),  # as for lack of memory
    ],
)
def test_child_that_ends_while_asked_is_replaced_once(
    num_deaths: int, number: signal.Signals, code: str
) -> None:
    template = ChatTemplate("fine", "x", {}, LIMITS)
    encoder = Encoder(CHECKPOINT / "tokenizer.json")
    send, left = child_module._send, 0

    def fatal(process: subprocess.Popen[bytes], raw: bytes) -> None:
        nonlocal left
        if left and b'"limits"' not in raw:
            left -= 1
            kills(process, number)
        send(process, raw)

    asks: list[Callable[[], object]] = [
        lambda: said(template, "a"),
        lambda: encoder.encode("a", add_special_tokens=False),
    ]
    with mock.patch.object(child_module, "_send", fatal):
        for ask in asks:
            left = num_deaths
            with pytest.raises(RequestError) if code else contextlib.nullcontext() as caught:
                assert ask()
            assert caught is None or caught.value.code in code
            assert left == 0 and ask(), "the next question has another child"
    template.close()
    encoder.close()


def test_an_interrupt_at_the_keyboard_is_not_for_it(child: Find) -> None:
    template = ChatTemplate("fine", "x", {}, LIMITS)
    assert os.getpgid(child().pid) != os.getpgid(0)
    template.close()


def test_it_ends_with_the_process_that_asks() -> None:
    script = """
import os, psutil
from fastdecode.text import child as child_module
from fastdecode.text.chat_template import ChatTemplate
template = ChatTemplate("fine", "x", {})
print(psutil.Process().children()[0].pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.wait_procs([psutil.Process(pid)], timeout=30)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_it_finds_no_module_in_the_working_directory(tmp_path: os.PathLike[str]) -> None:
    script = """
import os, pathlib
pathlib.Path("jinja2.py").write_text("raise SystemExit('a stranger')")
from fastdecode.text import child as child_module
from fastdecode.text.chat_template import ChatTemplate
print(ChatTemplate("fine", "x", {}).render([], __import__("datetime").datetime(2026, 1, 1)))
"""
    # As the command `fastdecode` runs: its directory is where it is installed, not where one works.
    command = [sys.executable, "-c", "import sys; sys.path.remove('')\n" + script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("program", ["template_program", "tokenizer_program"])
def test_it_loads_little(program: str) -> None:
    script = (
        f"import sys, fastdecode.text.{program}; print({{'torch', 'numpy', 'numba'}} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_an_answer_is_for_whoever_asked() -> None:
    """Whichever thread that is; and who was interrupted leaves no answer behind for the next."""
    template = ChatTemplate("<{{ messages[0].content }}>", "x", {}, LIMITS)
    wrong: list[str] = []

    def ask(name: str) -> None:
        wrong.extend(name for i in range(100) if said(template, f"{name}{i}") != f"<{name}{i}>")

    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    def interrupted(process: object, deadline: float) -> bytes:
        raise KeyboardInterrupt

    with mock.patch.object(child_module, "_receive", interrupted), pytest.raises(KeyboardInterrupt):
        said(template, "first")
    assert said(template, "second") == "<second>"
    template.close()
