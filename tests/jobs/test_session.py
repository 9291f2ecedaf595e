"""A job's session: what its file records, and damaged, foreign and full files."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from fastdecode.cli.options import as_typed
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, Part, PartId, Residence, SequenceId
from fastdecode.core.resuming import HeldSequence
from fastdecode.core.sequence import COMING, CacheUse, Request, SamplingParams
from fastdecode.core.sequence import Sequence as TokenSequence
from fastdecode.jobs.session import Addresses, JobSession

ADDRESSES = (("tcp://h1:1", "tcp://h1:2"), ("tcp://h2:1", "tcp://h2:2"))


def sequence(
    number: int, name: str = "1.0", index: int = 0, cache: CacheUse | None = None
) -> TokenSequence:
    """Return a sequence with a prompt of three tokens, on holder 1."""
    params = SamplingParams(n=2, max_tokens=100)
    request = Request(name, (5, 6, 7), params, 100, 0, cache or CacheUse(salt="a salt"))
    made = TokenSequence.of(SequenceId(number), request, index)
    made.residence = Residence((Part(PartId(40 + number), HolderId(1), 0, 64),))
    return made


def opened(path: Path, addresses: Sequence[Addresses] = ADDRESSES, **options: int) -> JobSession:
    return JobSession(path, addresses, lambda name: name != "done.0", **options)


def killed(session: JobSession) -> None:
    """End it as a killed process does: nothing more is written, and the lock is gone."""
    session.close(is_over=False)


def known(session: JobSession) -> dict[tuple[str, int], HeldSequence]:
    return {(held.request_id, held.index): held for held in session.held}


def test_what_a_killed_job_knew_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    first = opened(path)
    assert not first.is_resumed and first.held == [] and 0 < first.number < 1 << 63
    first.begin()
    one, other, done = sequence(0), sequence(1, index=1), sequence(2, "done.0")
    for each in (one, other, done):
        first.place(each)
    one.token_ids += [11, 12]
    other.token_ids += [21, COMING]
    first.add([one, other, done])
    other.token_ids[-1] = 22
    first.add([other])

    killed(first)
    second = opened(path)
    assert second.is_resumed and second.number == first.number
    assert set(known(second)) == {("1.0", 0), ("1.0", 1)}
    held = known(second)["1.0", 1]
    assert held.token_ids == (5, 6, 7, 21, 22) and held.num_prompt_tokens == 3
    assert held.parts == (Part(PartId(41), HolderId(1), 0, 64),)
    assert (held.salt, held.num_siblings) == ("a salt", 2)
    begun = second.begun["1.0"]
    assert begun.prompt_token_ids == (5, 6, 7) and begun.drawn == {0: (11, 12), 1: (21, 22)}


def test_only_its_owner_may_read_it_and_it_goes_with_the_job(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    session = opened(path)
    session.begin()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError) as refused:
        opened(path)
    assert as_typed(refused.value, {"output": "--output"}).endswith("or give another --output")
    session.close(is_over=False)
    assert path.exists()
    again = opened(path)
    again.close(is_over=True)
    assert not path.exists() and not list(tmp_path.iterdir())


def test_a_sequence_that_starts_anew_is_where_it_was_last(tmp_path: Path) -> None:
    path, one = tmp_path / "out.session", sequence(0)
    session = opened(path)
    session.begin()
    session.place(one)
    one.token_ids += [11]
    session.add([one])
    one.residence = Residence((Part(PartId(77), HolderId(0), 0, 64),))
    session.place(one)
    one.token_ids += [12]
    session.add([one])
    killed(session)
    held = known(opened(path))["1.0", 0]
    assert held.token_ids == (5, 6, 7, 11, 12) and held.parts[0].part_id == 77


def test_what_is_gone_on_with_is_on_record_before_it_has_come(tmp_path: Path) -> None:
    """Killed again before its requests were submitted: no token is forgotten,
    but holders know it by other names."""
    path, one = tmp_path / "out.session", sequence(0)
    first = opened(path)
    first.begin()
    first.place(one)
    one.token_ids += [11]
    first.add([one])
    killed(first)
    second = opened(path)
    second.begin()
    killed(second)
    third = opened(path)
    assert known(third)["1.0", 0].token_ids == (5, 6, 7, 11)
    assert known(third)["1.0", 0].parts == ()


def test_what_is_over_is_thrown_away_in_time(tmp_path: Path) -> None:
    path, one, other = tmp_path / "out.session", sequence(0), sequence(1, index=1)
    session = JobSession(path, ADDRESSES, None, max_more_bytes=2000)
    session.begin()
    for each in (one, other):
        session.place(each)
    sizes = []
    for token in range(2000):
        one.token_ids.append(token)
        session.add([one])
        if session.is_long:
            session.condense([one])
        sizes.append(path.stat().st_size)
    killed(session)
    assert max(sizes) < 2 * 4 * 2000 + 8 * 4096
    held = known(opened(path))
    assert held["1.0", 0].token_ids[3:] == tuple(range(2000)) and ("1.0", 1) not in held


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_session import opened, sequence
session, one = opened(Path(sys.argv[1])), sequence(0)
session.begin()
session.place(one)
for token in itertools.count():
    one.token_ids.append(token)
    session.add([one])
    if token % 50 == 49:
        session.condense([one])
    print(token, flush=True)
"""


@pytest.mark.parametrize("num_lines", [1, 2, 40, 51, 120])
def test_killed_writer_loses_no_recorded_token(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "out.session"
    words = ["-c", f"import itertools\nfrom pathlib import Path\n{WRITER}", str(path)]
    words += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        last = [int(writer.stdout.readline()) for _ in range(num_lines)][-1]
        writer.send_signal(signal.SIGKILL)
        last += sum(1 for _ in writer.stdout)
    found = known(opened(path))["1.0", 0].token_ids[3:]
    assert found in (tuple(range(last + 1)), tuple(range(last + 2)))


@pytest.mark.parametrize("content", [b"", b"something else", b"FDSESSN\x01".ljust(4096, b"\0")])
def test_another_file_there_is_no_session(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.session"
    path.write_bytes(content)
    session = opened(path)
    assert not session.is_resumed and session.held == [] and session.number
    killed(session)
    assert opened(path).is_resumed  # the new one has taken its place


@pytest.mark.parametrize("replicas", ["Infinity", "NaN", '"x"', "null"])
def test_session_with_a_damaged_record_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replicas: str
) -> None:
    path = tmp_path / "out.session"
    killed(opened(path))
    with sqlite3.connect(path) as connection:
        changed = f"replace(content, '\"num_replicas\":0', '\"num_replicas\":{replicas}')"
        connection.execute(f"UPDATE records SET content = CAST({changed} AS BLOB)")
    connection.close()
    session = opened(path)
    assert not session.is_resumed and f"{path} is damaged" in caplog.text
    killed(session)
    assert opened(path).is_resumed


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"out\.session"):
        opened(path)


def test_r_workers_at_other_places_hold_nothing_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    session = opened(path)
    session.begin()
    session.place(sequence(0))
    killed(session)
    for addresses in (ADDRESSES, (ADDRESSES[0], ("tcp://h2:1", "tcp://h3:2")), ADDRESSES[:1]):
        again = opened(path, addresses)
        assert bool(known(again)["1.0", 0].parts) == (addresses is ADDRESSES)
        killed(again)


def test_caches_that_have_another_share_of_memory_are_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    session = opened(path, num_replicas=1)
    session.begin()
    session.place(sequence(0))
    killed(session)
    again = opened(path, num_replicas=1)
    assert again.is_resumed
    killed(again)
    without = opened(path)
    assert without.number == session.number and not without.is_resumed
    assert known(without)["1.0", 0].token_ids == (5, 6, 7)


def test_what_leaves_nothing_to_others_is_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    session = opened(path)
    session.begin()
    session.place(sequence(0, cache=CacheUse(is_off=True)))
    killed(session)
    held = opened(path).held
    assert len(held) == 1 and not any(each.parts for each in held)


def test_an_output_that_is_begun_anew_has_the_caches_that_were_kept_for_it(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    first = opened(path)
    first.begin()
    first.place(sequence(0))
    killed(first)
    again = JobSession(path, ADDRESSES, None)
    assert again.number == first.number and not again.is_resumed and again.held == []


def test_full_disk_costs_only_what_follows(tmp_path: Path) -> None:
    path, one = tmp_path / "out.session", sequence(0)
    session = opened(path)
    session.begin()
    session.place(one)
    with files_of_at_most(0):
        one.token_ids.append(11)
        session.add([one])
    one.token_ids.append(12)
    session.add([one])
    assert known(opened(path))["1.0", 0].token_ids == (5, 6, 7)


def test_names_of_a_run_before_are_no_more_where_a_new_run_cant_write_its_own(
    tmp_path: Path,
) -> None:
    """Else parts of this run could be taken for those of the one before."""
    path = tmp_path / "out.session"
    first = opened(path)
    first.begin()
    first.place(sequence(0))
    killed(first)
    second = opened(path)
    assert second.held
    with files_of_at_most(0):
        second.begin()
    assert not path.exists() and not opened(path).held


def test_full_disk_at_the_start_keeps_the_session(tmp_path: Path) -> None:
    path = tmp_path / "out.session"
    first = opened(path)
    first.begin()
    first.place(sequence(0))
    killed(first)
    with files_of_at_most(0), pytest.raises(ConfigError, match="can't keep"):
        opened(path)
    assert known(opened(path))["1.0", 0].token_ids == (5, 6, 7)
