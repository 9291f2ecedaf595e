"""Conversations outlive a process, also one that is killed, and forgotten ones leave nothing."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from fastdecode.conversations.conversations import Conversations, Keeping
from fastdecode.conversations.store import ConversationStore
from fastdecode.conversations.turns import History, HistoryStep, Spelled
from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError

MODEL = bytes(range(32))
DAY = datetime(2026, 3, 1, 9, 30)


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def opened(path: Path, limits: Keeping | None = None, clock: Clock | None = None) -> Conversations:
    return Conversations(limits, ConversationStore(path, MODEL), clock or Clock(), lambda: DAY)


def talk(conversations: Conversations, whose: str, *added: int, name: str = "") -> History:
    """A turn that adds tokens. Returns what the conversation has come to."""
    before = conversations.begin(whose)
    messages = ({"role": "user", "content": "grüezi"},)
    step = HistoryStep(len(before.token_ids), added, messages, Spelled.of("ab", "</s>"))
    conversations.end(whose, name, before, step)
    return before.then(step)


def bytes_of(path: Path) -> bytes:
    """Everything that is on disk of a store."""
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))


def tokens(conversations: Conversations, whose: str) -> list[int]:
    before = conversations.begin(whose)
    conversations.leave(whose)
    return list(before.token_ids)


def test_another_process_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "turns.log"
    first = opened(path)
    talk(first, "a", 1, 2, 3)
    talk(first, "b", 9)
    expected = talk(first, "a", 4)
    first.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = opened(path)
    found = again.begin("a")
    assert found == expected and list(found.token_ids) == [1, 2, 3, 4] and found.begun == DAY
    assert found.spelled is not None and found.spelled.rest_of("ab</s>c") == "c"
    assert tokens(again, "b") == [9] and tokens(again, "new") == []


def test_tokens_that_a_turn_did_not_keep_are_replaced(tmp_path: Path) -> None:
    first = opened(tmp_path / "log")
    before = talk(first, "a", 1, 2, 3)
    first.begin("a")
    first.end("a", "", before, HistoryStep(1, (7, 8)))
    first.close()
    assert tokens(opened(tmp_path / "log"), "a") == [1, 7, 8]


@pytest.mark.parametrize("place", range(0, 20_480, 331))
def test_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path, place: int) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", *range(1000))
    talk(first, "b", 5)
    first.close()
    whole = bytearray(path.read_bytes())
    if place >= len(whole):
        pytest.skip("the file is shorter")
    whole[place] ^= 4
    path.write_bytes(whole)
    try:
        again = opened(path)
    except ConfigError:
        return
    assert tokens(again, "a") == list(range(1000)) and tokens(again, "b") == [5]


WRITER = """
import sys
from pathlib import Path
from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.turns import HistoryStep
from fastdecode.conversations.store import ConversationStore
some = Conversations(None, ConversationStore(Path(sys.argv[1]), bytes(range(32)), sync_turns=3))
number = int(sys.argv[2])
while True:
    whose = str(number % 7)
    before = some.begin(whose)
    some.end(whose, "", before, HistoryStep(len(before.token_ids), (number,) * 50))
    print(number, flush=True)
    if number % 40 == 39:
        some.forget(f"gone {number // 40}")
    number += 1
"""
NUM_KILLS = 12


def test_killed_writer_loses_no_turn_and_invents_none(tmp_path: Path) -> None:
    path, chance, number = tmp_path / "log", random.Random(7), 0
    for _ in range(NUM_KILLS):
        words = [sys.executable, "-c", WRITER, str(path), str(number)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 60)):
                number = int(writer.stdout.readline()) + 1
            writer.send_signal(signal.SIGKILL)
            number += sum(1 for _ in writer.stdout)
        some = opened(path)
        found = sorted({token for whose in range(7) for token in tokens(some, str(whose))})
        assert found in (list(range(number)), list(range(number + 1)))
        number = len(found)
        some.close()


def test_what_is_forgotten_leaves_no_token_and_never_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    secret = (0x53544152, 0x21212121)
    talk(first, "mine", *secret)
    talk(first, "other", 5)
    assert b"RATS" in bytes_of(path) and b"mine" in bytes_of(path)
    first.forget("mine")
    assert b"RATS" not in bytes_of(path) and b"mine" not in bytes_of(path)
    first.close()
    again = opened(path)
    with pytest.raises(RequestError) as expired:
        again.begin("mine")
    assert expired.value.code == "conversation_expired" and tokens(again, "other") == [5]


def test_idle_conversations_expire_and_too_many_end_the_idlest_but_none_that_talks() -> None:
    clock = Clock()
    some = Conversations(Keeping(max_conversations=2, conversation_ttl_s=60), None, clock)
    for whose in ("a", "b"):
        clock.now_s += 1
        talk(some, whose, 1)
    before = some.begin("a")
    talk(some, "c", 1)
    with pytest.raises(RequestError, match="over"):
        some.begin("b")
    some.end("a", "", before, HistoryStep(1, (2,)))
    assert tokens(some, "a") == [1, 2]
    clock.now_s += 61
    with pytest.raises(RequestError, match="over"):
        some.begin("c")


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"something else, and longer than a header is by far and wide, isn't it")
    with pytest.raises(ConfigError, match="holds no conversations"):
        ConversationStore(path, MODEL)
    path.unlink()
    held = ConversationStore(path, MODEL)
    with pytest.raises(ConfigError, match="another process"):
        ConversationStore(path, MODEL)
    held.close()
    with pytest.raises(ConfigError, match="another model"):
        ConversationStore(path, bytes(32))
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE turns (number)")
    connection.close()
    with pytest.raises(ConfigError, match="holds no conversations"):
        ConversationStore(tmp_path / "other.db", MODEL)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="can't keep"):
        ConversationStore(link, MODEL)


def test_turns_that_do_not_count_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    for name in ("1", "2"):
        talk(first, "a", int(name), name=name)
    first.close()
    log = ConversationStore(path, MODEL, counts=lambda name: name == "1")
    assert log.names == {"1"} and tokens(Conversations(None, log), "a") == [1]
    log.close()
    assert tokens(opened(path), "a") == [1]


def test_turn_that_continues_from_missing_tokens_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", 1)
    talk(first, "a", 2)
    first.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM turns WHERE number = 1")
    connection.close()
    with pytest.raises(ConfigError, match="turn 2 continues from missing tokens"):
        ConversationStore(path, MODEL)


def test_a_log_that_nobody_closed_is_let_go_of_and_a_closed_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    opened(path)
    log = ConversationStore(path, MODEL)
    log.close()
    with pytest.raises(FastDecodeError, match="closed"):
        log.forget(["a"])
    path.chmod(0o644)
    ConversationStore(path, MODEL).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="can't keep conversations"):
        ConversationStore(path, MODEL)


@pytest.mark.parametrize("room", [0, 7, 90])
def test_turn_without_room_leaves_the_conversation_unchanged(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", 1, 2)
    with files_of_at_most(path.with_name("log-wal").stat().st_size + room):
        with pytest.raises(FastDecodeError, match=str(path)) as full:
            talk(first, "a", 3)
        assert tokens(first, "a") == [1, 2] and full.value.code == "output_failed"
        assert "choose another disk" in str(full.value) and str(full.value) in caplog.text
    talk(first, "b", 9)
    talk(first, "a", 4)
    first.close()
    again = opened(path)
    assert tokens(again, "a") == [1, 2, 4] and tokens(again, "b") == [9]


def test_turn_is_refused_while_earlier_ones_cannot_be_synced(tmp_path: Path) -> None:
    class Failing(ConversationStore):
        fails = False

        def sync(self) -> None:
            if self.fails:
                raise FastDecodeError("I/O error", code="output_failed")
            super().sync()

    log = Failing(tmp_path / "log", MODEL, sync_turns=1)
    some = Conversations(None, log)
    talk(some, "a", 1)
    log.fails = True
    with pytest.raises(FastDecodeError):
        talk(some, "a", 2)
    log.fails = False
    assert tokens(some, "a") == [1]
    some.close()
    assert tokens(opened(tmp_path / "log"), "a") == [1]


def test_turns_continue_while_endings_cannot_be_recorded(tmp_path: Path) -> None:
    path, clock, limits = tmp_path / "log", Clock(), Keeping(conversation_ttl_s=60)
    some = opened(path, limits, clock)
    talk(some, "old", 1)
    clock.now_s += 61
    with files_of_at_most(path.with_name("log-wal").stat().st_size):
        assert tokens(some, "new") == []
        with pytest.raises(RequestError, match="over"):
            some.begin("old")
    tokens(some, "new")
    some.close()
    with pytest.raises(RequestError, match="over"):
        opened(path, None, clock).begin("old")


def test_forgotten_conversations_give_their_room_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    some = opened(path)
    for whose in range(20):
        talk(some, f"c{whose}", *range(whose, whose + 900))
        talk(some, "stays", whose)
    some.close()
    longest = path.stat().st_size
    some = opened(path)
    for whose in range(20):
        some.forget(f"c{whose}")
    some.close()
    assert path.stat().st_size < longest / 2 and path.stat().st_mode & 0o777 == 0o600
    again = opened(path)
    assert tokens(again, "stays") == list(range(20))
    with pytest.raises(RequestError, match="over"):
        again.begin("c3")


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match="can't keep conversations"):
        ConversationStore(path, MODEL)
    assert path.stat().st_size == 0
