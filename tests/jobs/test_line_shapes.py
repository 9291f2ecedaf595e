"""Lines of a shape that was checked: the same verdict as by parsing each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fastdecode.core.sequence import SamplingParams
from fastdecode.jobs import survey as survey_module
from fastdecode.jobs.formats import LineFormat, OpenAILines, SimpleLines
from fastdecode.jobs.lines import WHOLE, LineSource, Shard
from fastdecode.jobs.survey import Survey, survey
from fastdecode.openai.requests import RequestReader

SIMPLE = SimpleLines(SamplingParams())
OPENAI = OpenAILines(RequestReader({}, ("m",), True), "")

texts = st.text(max_size=8) | st.sampled_from(["", "é", "🙂", '"', "\\", "\n", "a", "\ud800"])
ids = st.integers(-3, 30) | st.sampled_from(["a", "b", "", "é", "x" * 200]) | st.floats(0, 1)
simple_lines = st.fixed_dictionaries(
    {"id": ids, "prompt": texts},
    optional={
        "max_tokens": st.sampled_from([1, 5, 0, "x"]),
        "seed": st.integers(-(10**20), 10**20) | st.booleans(),
        "prompt_token_ids": st.lists(st.integers(-2, 9), max_size=3),
        "conversation_id": texts | st.just("y" * 1025),
        "stop": st.sampled_from(["id", '{"id": 3}', [], None]),
        "oops": st.just(1),
    },
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": texts | st.just([{"type": "text"}])})
)
openai_lines = st.fixed_dictionaries(
    {
        "custom_id": ids,
        "method": st.just("POST"),
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        "body": st.fixed_dictionaries(
            {},
            optional={
                "prompt": texts | st.lists(st.integers(0, 9), max_size=3),
                "messages": messages,
                "seed": st.integers(0, 9),
                "user": texts,
                "stream": st.booleans(),
                "metadata": st.dictionaries(st.just("id"), texts),
            },
        ),
    }
)


ODD = (
    b'""', b'"p"', "\"\u00e9\U0001f642\"".encode(), rb'"\u00e9\ud83d\ude42\n\/"', rb'"\ud800"',
    rb'"\udc00"', rb'"\ud800\ud800"', rb'"\ud800x"', rb'"\u12"', rb'"\u+123"', rb'"\x41"',
    b'"\x01"', rb'"\udc00\udc00"',
    b'"\x7f"', b'"\xed\xa0\x80"', b'"\xc3"', b'"\xc0\x80"', b'"\xe0\x80\x80"',
    b'"\xf4\x90\x80\x80"',
    b'"\xf5\x80\x80\x80"', b'"\xc3', b'"\\"', b'"p" "p"', b'"p", "id": "q"', b'"p", "custom_id": 5',
    b"5", b"-5", b"0", b"-0", b"007", b"5.0", b"5e1", b"5x", b"9" * 18, b"9" * 30, b"-",
    b"null", b"true",
    b"[1, 2]", b"[1 ,2 ]", b"[]", b"[1,]", b"[,1]", b"[1", b"[1 2]", b"[1.5]", b"[true]", b"[[1]]",
    b"[01]", b"[-1]", b'["a"]', b"{}", b'{"id": "p"}', b"\x02", b"\x01", b'"' + b"y" * 200 + b'"',
    b'"' + b"y" * 1100 + b'"', b'"a"}', b'"a"}}',
)  # fmt: skip
"""What may stand where a value is free, or almost."""
SIMPLE_KINDS = (
    b'{"id": %s, "prompt": %s}',
    b'{"id": %s, "prompt_token_ids": %s}',
    b'{"id": %s, "seed": 5, "prompt": %s}',
    b'{"id": %s, "prompt": "p", "seed": %s}',
    b'{"id": %s, "prompt": "p", "conversation_id": %s}',
)
_LINE = b'{"custom_id": %%s, "method": "POST", "url": "/v1/%s", "body": {%s}}'
OPENAI_KINDS = (
    _LINE % (b"completions", b'"prompt": %s'),
    _LINE % (b"completions", b'"prompt": "p", "seed": %s'),
    _LINE % (b"completions", b'"prompt": "p", "user": %s, "metadata": {"id": "p"}'),
    _LINE % (b"completions", b'"prompt": "p", "conversation_id": %s'),
    _LINE % (b"chat/completions", b'"messages": [{"role": "user", "content": %s}]'),
    _LINE
    % (
        b"chat/completions",
        b'"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]',
    ),
)


def _written(line: dict[str, Any], is_ascii: bool) -> bytes:
    return json.dumps(line, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


def _facts(found: Survey) -> list[object]:
    every = range(1, found.last_line + 1)
    return [
        found.num_lines, found.num_in_file, found.last_line, found.sha256,
        found.num_turns, sorted(found.complaints.items()),
        [number for number in every if number in found.bad],
        [number for number in every if number in found.duplicates],
    ]  # fmt: skip


def _same(path: Path, lines: LineFormat, shard: Shard = WHOLE) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_module, "MAX_SHAPES", 0)
        each_parsed = survey(LineSource(path), lines, shard=shard)
    assert _facts(survey(LineSource(path), lines, shard=shard)) == _facts(each_parsed)


@settings(max_examples=examples(600, share=10), deadline=None)
@given(
    lines=st.lists(st.tuples(simple_lines | openai_lines, st.booleans()), max_size=12),
    edits=st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from(b'"\\{}[],:1e\n\x01\xc3')), max_size=3
    ),
    is_openai=st.booleans(),
    count=st.integers(1, 3),
)
def test_lines_are_judged_as_if_each_were_parsed(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[dict[str, Any], bool]],
    edits: list[tuple[int, int]],
    is_openai: bool,
    count: int,
) -> None:
    """Drawn lines, twice so that shapes come again, with some bytes changed."""
    raw = bytearray(b"\n".join([_written(*line) for line in lines] * 2))
    for place, byte in edits:
        if place < len(raw):
            raw[place] = byte
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(raw)
    _same(path, OPENAI if is_openai else SIMPLE, Shard(1, count))


@pytest.mark.parametrize(("lines", "kinds"), [(SIMPLE, SIMPLE_KINDS), (OPENAI, OPENAI_KINDS)])
def test_odd_values_in_known_shapes_are_judged_as_if_parsed(
    tmp_path: Path, lines: LineFormat, kinds: tuple[bytes, ...]
) -> None:
    """In each place, after sound lines that have taught the shape."""
    for kind in kinds:
        known = [kind % (b'"%d"' % i, value) for i, value in enumerate(ODD)]
        known += [kind % (b"%d" % (99 + i), value) for i, value in enumerate(ODD)]
        odd = [kind % (value, b'"p"') for value in ODD]
        odd += [kind % (value, b"[5]") for value in ODD]
        odd += [kind % (value, b"5") for value in ODD]
        odd += [kind % (b'"x%d"' % i, value) for i, value in enumerate(ODD)]
        odd += [b"{" + line for line in odd[:3]] + [line + b"}" for line in odd[:3]]
        (tmp_path / "in").write_bytes(b"\n".join(known + odd))
        _same(tmp_path / "in", lines)


def test_lines_of_one_shape_are_parsed_once(tmp_path: Path) -> None:
    parsed: list[int] = []

    class Counted(SimpleLines):
        def parse(self, raw: bytes, number: int) -> Any:
            parsed.append(number)
            return super().parse(raw, number)

    lines = [json.dumps({"id": i, "prompt": f"p{i}", "max_tokens": 4}) for i in range(5000)]
    (tmp_path / "in").write_text("\n".join(lines))
    found = survey(LineSource(tmp_path / "in"), Counted(SamplingParams()))
    assert parsed == [1] and found.num_lines == 5000
