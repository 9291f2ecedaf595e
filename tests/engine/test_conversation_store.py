"""What conversations have come to outlives a process, is cut where it is torn,
and is gone when it is forgotten."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from fastdecode.conversations.compaction import SUFFIX
from fastdecode.conversations.conversations import ConversationLimits, Conversations
from fastdecode.conversations.history import History, HistoryStep, Spelled
from fastdecode.conversations.turn_log import TurnLog
from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError

MODEL = bytes(range(32))
DAY = datetime(2026, 3, 1, 9, 30)


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def opened(
    path: Path, limits: ConversationLimits | None = None, clock: Clock | None = None
) -> Conversations:
    return Conversations(limits, TurnLog(path, MODEL), clock or Clock(), lambda: DAY)


def talk(conversations: Conversations, whose: str, *added: int, name: str = "") -> History:
    """A turn that adds tokens. Returns what the conversation has come to."""
    before = conversations.begin(whose)
    messages = ({"role": "user", "content": "grüezi"},)
    step = HistoryStep(len(before.token_ids), added, messages, Spelled.of("ab", "</s>"))
    conversations.end(whose, name, before, step)
    return before.then(step)


def tokens(conversations: Conversations, whose: str) -> list[int]:
    before = conversations.begin(whose)
    conversations.end(whose, "", before)
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


def test_a_torn_or_flipped_end_is_cut_off_and_what_was_before_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", 1)
    num_whole = path.stat().st_size
    talk(first, "a", 2)
    first.close()
    whole = path.read_bytes()
    for end in range(num_whole, len(whole)):
        path.write_bytes(whole[:end])
        again = opened(path)
        assert tokens(again, "a") == [1] and path.stat().st_size == num_whole
        again.close()
    for place in range(num_whole, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        again = opened(path)
        assert tokens(again, "a") == [1]
        again.close()


def test_what_is_forgotten_leaves_no_token_and_never_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    secret = (0x53544152, 0x21212121)
    talk(first, "mine", *secret)
    talk(first, "other", 5)
    assert b"RATS" in path.read_bytes() and b"mine" in path.read_bytes()
    first.forget("mine")
    assert b"RATS" not in path.read_bytes() and b"mine" not in path.read_bytes()
    first.close()
    again = opened(path)
    with pytest.raises(RequestError) as expired:
        again.begin("mine")
    assert expired.value.code == "conversation_expired" and tokens(again, "other") == [5]


def test_a_crash_in_the_middle_of_forgetting_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "mine", 0x53544152)
    before = path.read_bytes()
    first.forget("mine")
    first.close()
    path.write_bytes(before + path.read_bytes()[len(before) :])  # over, and not erased yet
    again = opened(path)
    with pytest.raises(RequestError, match="over"):
        again.begin("mine")
    assert b"RATS" not in path.read_bytes()


def test_idle_conversations_expire_and_too_many_end_the_idlest_but_none_that_talks() -> None:
    clock = Clock()
    some = Conversations(ConversationLimits(most=2, ttl_s=60), None, clock)
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
        TurnLog(path, MODEL)
    path.unlink()
    held = TurnLog(path, MODEL)
    with pytest.raises(ConfigError, match="another process"):
        TurnLog(path, MODEL)
    held.close()
    with pytest.raises(ConfigError, match="another model"):
        TurnLog(path, bytes(32))
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="can't keep"):
        TurnLog(link, MODEL)


def test_turns_that_do_not_count_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    for name in ("1", "2"):
        talk(first, "a", int(name), name=name)
    first.close()
    log = TurnLog(path, MODEL, counts=lambda name: name == "1")
    assert log.names == {"1"} and tokens(Conversations(None, log), "a") == [1]
    log.close()
    assert tokens(opened(path), "a") == [1]


def test_a_crash_in_the_middle_of_an_erasure_loses_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "mine", 0x53544152)
    begin, end = 64, path.stat().st_size
    talk(first, "other", 5)
    before = path.read_bytes()
    first.forget("mine")
    first.close()
    after = path.read_bytes()
    for num_erased in range(12, end - begin, 7):
        at = begin + num_erased
        path.write_bytes(after[:at] + before[at:end] + after[end:])
        again = opened(path)
        assert tokens(again, "other") == [5] and path.read_bytes() == after
        with pytest.raises(RequestError, match="over"):
            again.begin("mine")
        again.close()


def test_damage_before_whole_turns_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", 1)
    end = path.stat().st_size
    talk(first, "b", 2)
    first.close()
    whole = path.read_bytes()
    for place in range(64, end, 5):
        flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        path.write_bytes(flipped)
        with pytest.raises(ConfigError, match="damaged at byte 64"):
            TurnLog(path, MODEL)
        assert path.read_bytes() == flipped


def test_a_log_that_nobody_closed_is_let_go_of_and_a_closed_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    opened(path)
    log = TurnLog(path, MODEL)
    log.close()
    with pytest.raises(FastDecodeError, match="closed"):
        log.forget(["a"])
    path.chmod(0o644)
    TurnLog(path, MODEL).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="can't keep conversations"):
        TurnLog(path, MODEL)


@pytest.mark.parametrize("room", [0, 7, 90])
def test_a_turn_without_room_for_it_leaves_the_conversation_as_it_was(
    tmp_path: Path, room: int
) -> None:
    path = tmp_path / "log"
    first = opened(path)
    talk(first, "a", 1, 2)
    with files_of_at_most(path.stat().st_size + room):
        with pytest.raises(FastDecodeError, match=str(path)) as full:
            talk(first, "a", 3)
        assert tokens(first, "a") == [1, 2] and full.value.code == "output_failed"
    talk(first, "b", 9)
    talk(first, "a", 4)
    first.close()
    again = opened(path)
    assert tokens(again, "a") == [1, 2, 4] and tokens(again, "b") == [9]


def test_a_turn_that_cannot_be_synced_is_gone(tmp_path: Path) -> None:
    class Failing(TurnLog):
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


def test_turns_go_on_though_what_is_over_cannot_be_recorded_and_that_is_made_up_for(
    tmp_path: Path,
) -> None:
    path, clock, limits = tmp_path / "log", Clock(), ConversationLimits(ttl_s=60)
    some = opened(path, limits, clock)
    talk(some, "old", 1)
    clock.now_s += 61
    with files_of_at_most(path.stat().st_size):
        assert tokens(some, "new") == []
        with pytest.raises(RequestError, match="over"):
            some.begin("old")
    tokens(some, "new")
    some.close()
    with pytest.raises(RequestError, match="over"):
        opened(path, None, clock).begin("old")


def test_what_was_forgotten_takes_no_room_for_long(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = TurnLog(path, MODEL, worth_bytes=1)
    some = Conversations(None, log)
    for whose in range(20):
        talk(some, f"c{whose}", *range(whose, whose + 50))
        talk(some, "stays", whose)
    longest = path.stat().st_size
    with path.open("rb") as before:
        for whose in range(20):
            some.forget(f"c{whose}")
        assert not any(before.read()[64:]), "who held the old file open reads nothing either"
    assert path.stat().st_size < longest / 2 and path.stat().st_mode & 0o777 == 0o600
    assert not path.with_name("log" + SUFFIX).exists()
    with pytest.raises(ConfigError, match="another process"):
        TurnLog(path, MODEL)
    talk(some, "stays", 99)
    some.forget("stays")
    talk(some, "late", 7)
    some.close()
    again = opened(path)
    assert tokens(again, "late") == [7]
    for whose in ("c3", "stays"):
        with pytest.raises(RequestError, match="over"):
            again.begin(whose)


def test_a_crash_while_a_log_is_written_anew_leaves_one_that_is_whole(tmp_path: Path) -> None:
    path, beside = tmp_path / "log", tmp_path / ("log" + SUFFIX)
    first = opened(path)
    talk(first, "a", 1)
    talk(first, "b", *[0x53544152] * 90)
    first.forget("b")
    first.close()
    whole = path.read_bytes()
    beside.write_bytes(whole[:70])
    assert tokens(opened(path), "a") == [1] and not beside.exists()
    log = TurnLog(path, MODEL, worth_bytes=1)
    log.close()
    assert path.stat().st_size < len(whole) and tokens(opened(path), "a") == [1]


def test_without_room_for_another_file_the_log_stays_as_long_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    some = Conversations(None, TurnLog(path, MODEL, worth_bytes=1))
    talk(some, "a", *range(90))
    talk(some, "b", 5)
    path.with_name("log" + SUFFIX).mkdir()
    some.forget("a")
    talk(some, "b", 6)
    some.close()
    assert tokens(opened(path), "b") == [5, 6]
