"""How an HTTP process that reads nothing is noticed, on a virtual clock."""

from __future__ import annotations

from fastdecode.server.serving import Silence

LOOK_S = 0.1


def looks(silence: Silence, begin_s: float, num: int) -> list[bool]:
    """What so many looks have found that begin at a time."""
    turns = [silence.look(begin_s + LOOK_S * i) for i in range(num)]
    return [turn for turn in turns if turn is not None]


def test_an_answer_that_does_not_come_in_time_is_noticed_once() -> None:
    silence = Silence(5.0)
    silence.asked()
    assert looks(silence, 0.0, 50) == []
    assert looks(silence, 5.0, 300) == [True]
    silence.heard()
    assert looks(silence, 40.0, 10) == [False]


def test_answers_in_time_are_no_silence() -> None:
    silence = Silence(5.0)
    for i in range(20):
        silence.asked()
        assert looks(silence, 4.0 * i, 40) == []
        silence.heard()


def test_nothing_is_owed_that_was_not_asked_for() -> None:
    assert looks(Silence(1.0), 0.0, 1000) == []


def test_a_pause_of_the_engines_process_itself_is_not_counted() -> None:
    silence = Silence(5.0)
    silence.asked()
    assert silence.look(0.0) is None
    assert silence.look(3600.0) is None
