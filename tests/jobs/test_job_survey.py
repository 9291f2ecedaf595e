"""What a batch job keeps of its input: sets of lines, duplicates, hashes, in little memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fastdecode.core.errors import ConfigError
from fastdecode.core.progress import Progress
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs import lines as lines_module
from fastdecode.jobs.formats import LineError, OpenAILines, SimpleLines
from fastdecode.jobs.lines import DuplicateFinder, LineReader, LineSet, LineSource
from fastdecode.jobs.manifest import identify_model
from fastdecode.jobs.survey import kind_of_lines, survey
from fastdecode.openai.requests import RequestReader


def test_a_million_lines_take_a_few_bytes_each() -> None:
    lines, finder = LineSet(), DuplicateFinder()
    for number in range(1, 1_000_001):
        lines.add(number)
    for number in range(1, 10_001):
        finder.add(number, f"request-{number}")
    assert len(lines._bits) <= 2 * 1_000_000 // 8
    assert len(finder._digests) + 8 * len(finder._numbers) == 24 * 10_000


def test_lines_are_counted_as_an_editor_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10)
    raw = b"one\n\n  \nfour\r\n" + b"x" * 11 + b"\n" + b"y" * 25 + b"\nseven"
    reader = LineReader(io.BytesIO(raw))
    assert list(reader) == [(1, b"one\n"), (4, b"four\r\n"), (5, None), (6, None), (7, b"seven")]
    assert reader.sha256 == hashlib.sha256(raw).hexdigest()


def _openai_line(custom_id: str, **body: Any) -> str:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "p", **body},
    }
    return json.dumps(line)


def test_refusal_names_each_kind_of_bad_line_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = [_openai_line(str(i)) for i in range(50)]
    path.write_text("\n".join([*good, *good[:30], _openai_line("3", stream=True), "{"]))
    found = survey(LineSource(path), OpenAILines(RequestReader({}, ("m",), False), ""))
    found_lines = found.num_lines, found.last_line, len(found.bad), len(found.duplicates)
    assert found_lines == (82, 82, 32, 31)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    text = str(found.refusal(LineSource(path)))
    assert text.count("duplicate_custom_id") == 1
    assert "line 51: duplicate_custom_id: its custom_id was used by line 1:" in text
    assert "one of its own (and 29 more like it)\n" in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["a,b"] * 30, ["line 1: invalid_json_line", "(and 29 more like it)"]),
        (["{" * (i + 1) for i in range(30)], ["(and 29 more like it)"]),
        (['{"custom_id": "x"}'], ["line 1 ('x'): invalid_method"]),
        ([_openai_line(str(i), temperature=-i) for i in range(1, 9)], ["(and 7 more like it)"]),
        ([_openai_line(str(i), **{f"x{chr(97 + i)}": 1}) for i in range(25)],
         ["'xa'", "'xt'", "and 5 more\n"]),
    ],
)  # fmt: skip
def test_refusal_of_a_file_counts_lines_of_a_kind(
    tmp_path: Path, lines: list[str], shown: list[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    found = survey(LineSource(path), OpenAILines(RequestReader({}, ("m",), False), ""))
    text = str(found.refusal(LineSource(path)))
    assert f"{len(lines)} of the {len(lines)} lines" in text
    assert len(text.splitlines()) <= 3 + 20
    for each in shown:
        assert each in text, text


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_files_that_are_not_utf8_are_refused_once(
    tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(pack("".join(_openai_line(str(i)) + "\n" for i in range(3)).encode(encoding)))
    with pytest.raises(ConfigError, match=r"in\.jsonl is not UTF-8.* save it as UTF-8"):
        kind_of_lines(LineSource(path))


@pytest.mark.parametrize("blank", ["", "\n", "\r\n", " \n\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_part_of_a_line(
    tmp_path: Path, blank: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "in.jsonl"
    text = blank + "".join(_openai_line(str(i)) + "\n" for i in range(3))
    path.write_bytes(pack(text.encode("utf-8-sig")))
    source, lines = LineSource(path), OpenAILines(RequestReader({}, ("m",), False), "")
    assert kind_of_lines(source) == "openai"
    found = survey(source, lines)
    assert (found.num_lines, len(found.bad)) == (3, 0)


def test_a_line_in_another_encoding_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(f'{{"custom_id": "{x}"}}'.encode("latin-1") for x in "äö"))
    found = survey(LineSource(path), OpenAILines(RequestReader({}, ("m",), False), ""))
    assert "line 1: invalid_json_line: line 1 is not valid JSON: 'utf-8" in str(
        found.refusal(LineSource(path))
    )


def test_labels_beside_a_body_are_taken() -> None:
    lines = OpenAILines(RequestReader({}, ("m",), False), "")
    said = json.loads(_openai_line("x"))
    for label in ({"metadata": {"run": 1}}, {"user": "u"}, {"comment": None}):
        assert lines.parse(json.dumps({**said, **label}).encode(), 1).line_id == "x"
    with pytest.raises(LineError, match="unknown field 'comment'"):
        lines.parse(json.dumps({**said, "comment": "x"}).encode(), 1)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ('{"id": 1, "prompt": "p"}', "simple"),
        ('{"prompt": "p"}', "simple"),
        ('{"id": 1, "custom_id": "x"}', "openai"),
        (_openai_line("x"), "openai"),
        ("{}", None),
        ("", "openai"),
        ('oops\n\n[1]\n{"id": 1}', "simple"),
    ],
)
def test_the_format_is_that_of_the_first_readable_line(
    tmp_path: Path, first: str, expected: str | None
) -> None:
    (tmp_path / "in").write_text(first + "\n" + _openai_line("y"))
    assert kind_of_lines(LineSource(tmp_path / "in")) == expected
    (tmp_path / "in").write_text("")
    assert kind_of_lines(LineSource(tmp_path / "in")) is None


def test_a_line_of_the_other_format_is_bad(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"id": 1, "prompt": "p"}\n' + _openai_line("y"))
    found = survey(LineSource(tmp_path / "in"), SimpleLines(SamplingParams()))
    assert [number for number, _, _ in found.complaints.values()] == [2]


def test_a_models_identity_changes_with_each_of_its_files(tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "a.safetensors": bytes(2_000_000),
        "README.md": b"hi",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = identify_model(tmp_path)
    assert set(before) == {"config.json", "tokenizer.json", "a.safetensors"}
    (tmp_path / "README.md").write_bytes(b"other")
    assert identify_model(tmp_path) == before
    (tmp_path / "a.safetensors").write_bytes(bytes(1_000_000) + b"\1" * 20_000 + bytes(980_000))
    assert identify_model(tmp_path) != before
    (tmp_path / "a.safetensors").write_bytes(bytes(1_999_999) + b"\1")
    assert identify_model(tmp_path) != before
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    assert identify_model(tmp_path)["a.safetensors"] != before["a.safetensors"]
    (tmp_path / "own.jinja").write_text("x")
    assert "--chat-template" in identify_model(tmp_path, tmp_path / "own.jinja")


def test_progress_says_what_is_done_and_when_the_rest_will_be() -> None:
    now, out = [0.0], io.StringIO()
    progress = Progress(out, clock=lambda: now[0], now=lambda: datetime(2026, 11, 25, 9, 30))
    with progress:
        progress.begin(total=1000, done=400)
        for second in range(1, 25):
            now[0] = second
            state = {"num_failed": 2, "num_tokens": 50 * second, "workers": (3, 4)}
            progress.update(done=400 + 2 * second, **state)
    shown = out.getvalue().splitlines()
    assert shown == [
        "2026-11-25 09:30:00 lines 420/1000, 2 failed, 50 tok/s, ETA 0:04:50, R-workers 3/4",
        "2026-11-25 09:30:00 lines 440/1000, 2 failed, 50 tok/s, ETA 0:04:40, R-workers 3/4",
        "2026-11-25 09:30:00 lines 448/1000, 2 failed, 50 tok/s, ETA 0:04:36, R-workers 3/4",
    ]


def test_progress_speaks_of_no_r_workers_where_there_are_none() -> None:
    progress = Progress(io.StringIO(), clock=lambda: 0.0)
    progress.update(done=1, num_failed=0, num_tokens=5, workers=(0, 0))
    assert "ETA" in progress.line() and "R-workers" not in progress.line()


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    with Progress(out, clock=lambda: now[0]) as progress:
        progress.begin(total=10, done=0)
        for tick in range(20):
            now[0] = tick * 0.25
            progress.update(done=0, num_failed=0, num_tokens=0, workers=(1, 1))
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r\x1b[Klines 0/10, 0 failed, 0 tok/s, ETA -, R-workers 1/1") == 10
