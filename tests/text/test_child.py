"""The process that a model's own programs run in: it answers, ends when it
should, and takes nothing with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from typing import TypeAlias
from unittest import mock

import psutil
import pytest

from fastdecode.core.errors import RequestError
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.child import Limits

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


def test_a_child_that_is_killed_is_replaced_once(
    child: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", "x", {}, LIMITS)
    first = child()
    first.kill()
    assert said(template, "a") == "<a>" and child() != first

    def kill_first(connection: Connection, raw: bytes) -> None:
        process = child()
        process.kill()
        process.wait()
        send(connection, raw)

    send = Connection.send_bytes
    child().kill()
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send_bytes", kill_first)
        with pytest.raises(RequestError, match="was ended: it broke off") as caught:
            said(template, "a")
    assert caught.value.code == "child_died"
    assert said(template, "b") == "<b>"
    template.close()


def test_it_gets_no_secrets_and_no_interrupt_at_the_keyboard(
    child: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    template = ChatTemplate("fine", "x", {}, LIMITS)
    names = set(child().environ())
    assert "API_TOKEN" not in names and "HOME" not in names and "PATH" in names
    assert os.getpgid(child().pid) != os.getpgid(0)
    template.close()


def test_it_ends_with_the_process_that_asks() -> None:
    script = """
import os, psutil
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
from fastdecode.text.chat_template import ChatTemplate
print(ChatTemplate("fine", "x", {}).render([], __import__("datetime").datetime(2026, 1, 1)))
"""
    # As the command `fastdecode` runs: its directory is where it is installed, not where one works.
    command = [sys.executable, "-c", "import sys; sys.path.remove('')\n" + script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("program", ["child", "tokenizer_files"])
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

    def interrupted(connection: Connection, most: int) -> bytes:
        raise KeyboardInterrupt

    with mock.patch.object(Connection, "recv_bytes", interrupted), pytest.raises(KeyboardInterrupt):
        said(template, "first")
    assert said(template, "second") == "<second>"
    template.close()


def test_child_that_lacks_memory_for_a_question_is_not_taken_for_killed(child: Find) -> None:
    limits = Limits(memory_bytes=300 << 20, cpu_s=20, open_cpu_s=20, slowness=30)
    template = ChatTemplate("<{{ messages[0].content }}>", "x", {}, limits)
    assert said(template, "a") == "<a>"
    with pytest.raises(RequestError) as caught:
        said(template, "a" * (120 << 20))
    assert caught.value.code == "chat_template_failed"
    assert said(template, "b") == "<b>"
    template.close()
