"""``fastdecode cache``: what there is, whether it is whole, and an end to it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.store import FILE, ConversationStore
from fastdecode.conversations.turns import HistoryStep
from fastdecode.core.errors import ConfigError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three turns of two conversations, and one that was forgotten."""
    path = tmp_path / FILE
    store = ConversationStore(path, bytes(32))
    some = Conversations(None, store, lambda: 1000.0)
    for whose, added in (("a", (1, 2)), ("gone", (9,)), ("b", (3,)), ("a", (4, 5, 6))):
        before = some.begin(whose)
        some.end(whose, "", before, HistoryStep(len(before.token_ids), added))
    some.forget("gone")
    some.close()
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["cache", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_it_shows_what_there_is(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = log.read_bytes()
    code, text = told(capsys, str(log.parent))
    assert code == 0 and "2 conversation(s), 3 turn(s), 6 tokens; 1 are over" in text
    assert text.splitlines()[-1] == "whole" and log.read_bytes() == before
    found: dict[str, Any] = json.loads(told(capsys, str(log), "--json")[1])
    assert (found["tokens"], found["last_active_s"], found["damage"]) == (6, 1000.0, None)
    assert found["num_bytes"] == len(before)


def damage(path: Path) -> None:
    """Change a token of a turn."""
    whole = bytearray(path.read_bytes())
    whole[whole.index(array("i", (4, 5, 6)).tobytes())] ^= 1
    path.write_bytes(whole)


def test_damage_is_found_and_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, str(log), "--verify") == (0, f"{log}: whole\n")
    damage(log)
    code, text = told(capsys, str(log), "--verify")
    assert code == 1 and "turn 4 is damaged" in text
    with pytest.raises(ConfigError, match="turn 4 is damaged"):
        ConversationStore(log, bytes(32))
    log.write_bytes(log.read_bytes()[:5000])
    assert told(capsys, str(log), "--verify")[0] == 1


def test_it_clears_what_nobody_holds(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = ConversationStore(log, bytes(32))
    assert [told(capsys, str(log), *more)[0] for more in ((), ("--verify",))] == [0, 1]
    code, text = told(capsys, str(log), "--clear")
    assert code == 2 and "another process" in text and log.exists()
    held.close()
    with log.open("rb") as opened:
        assert told(capsys, str(log.parent), "--clear")[0] == 0
        assert not any(opened.read())
    assert not log.exists()


def test_the_doctor_looks_at_it_too(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def findings(place: Path) -> dict[str, str]:
        main(["doctor", "--json", "--conversations", str(place)])
        told = json.loads(capsys.readouterr().out)["findings"]
        return {x["level"]: x["text"] for x in told if x["check"] == "conversations"}

    (text,) = findings(log.parent).values()
    assert "2 in " in text and "of disk free" in text
    assert "is damaged" not in text and "No such file" in findings(log.parent / "none")["FAIL"]
    damage(log)
    assert "is damaged: turn 4" in findings(log.parent)["FAIL"]


def test_where_nothing_is_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, str(tmp_path))
    assert code == 2 and "conversations nor KV blocks in" in text
    other = tmp_path / "other"
    other.write_bytes(b"x" * 99)
    for words in ([], ["--clear"]):
        code, text = told(capsys, str(other), *words)
        assert code == 2 and "holds no conversations" in text and other.exists()
