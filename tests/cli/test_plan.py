"""``fastdecode plan`` as its users see it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fastdecode.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    example
    for page in ("disaggregation.md",)
    for example in re.findall(
        r"```console\n\$ fastdecode (plan [^\n]*)\n(.*?)```",
        (DOCS / page).read_text("utf-8"),
        flags=re.S,
    )
]
SPLIT = ["disaggregate", "--machines", "7", "--prompt-time", "3.1", "--token-time", "0.1"]
SWAP = ["swap", "--prompt-tokens", "9", "--tokens", "9", "--token-time", "1", "--batch", "2"]


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.parametrize(("command", "answer"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_documented_answers(command: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == answer


def test_streaming_and_memory_of_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    streaming = ["--tokens", "200", "--kv-gb", "10.7", "--bandwidth-gbps", "20"]
    memory = ["--layers", "70", "--weights-gb", "4.93", "--prompt-kv-gb", "0.918"]
    memory += ["--token-kv-gb", "0.918", "--memory-gb"]
    assert plan(*SPLIT, *streaming, *memory, "320", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["overhead"] == pytest.approx(4.28 / 3.1) and answer["splits"] == [[2, 5]]
    assert not answer["wins"] and answer["continuous"]["wins"]
    assert plan(*SPLIT, *streaming, *memory, "20") == 1
    assert "nothing fits: 7 machines can't hold prompts and tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*SPLIT, "--tokens", "0"], "--tokens 0 is not a whole number from 1 to 10000000"),
        ([*SPLIT, "--tokens", "9", "--overhead", "0.5"], "--overhead 0.5 is not a number of"),
        ([*SPLIT, "--tokens", "9", "--kv-gb", "1"], "Give --kv-gb and --bandwidth-gbps together"),
        ([*SPLIT, "--tokens", "9", "--layers", "2"], "--weights-gb and --prompt-kv-gb and"),
        ([*SWAP, "--kv-kb", "-1", "--bandwidth-gb", "25"], "--kv-kb -1.0 is not a number above 0"),
    ],
)
def test_refusals_name_the_option(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith(f"fastdecode plan {arguments[0]}: ")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    profile = {
        "prompt_tokens": 8, "model_gb": 10, "kv_gb_per_token": 0.01,
        "microbatches": [{"sequences": 4, "prompt_s": 2.0, "token_s": 0.1}],
    }  # fmt: skip
    (tmp_path / "machine.json").write_text(json.dumps(profile))
    lines = [{"num_prompt_tokens": 8, "num_output_tokens": 1 + i % 9} for i in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"--profile={tmp_path / 'machine.json'}", f"--trace={tmp_path / 'trace.jsonl'}"]


def test_pipelines(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("pipelines", *files, "--machines", "1,4", "--price", "3", "--rate", "2") == 0
    told = capsys.readouterr()
    table = [line.split() for line in told.out.splitlines()]
    assert [row[:2] for row in table[1:]] == [
        ["1", "one"], ["1", "data-parallel"], ["1", "disaggregated"],
        ["4", "one"], ["4", "data-parallel"], ["4", "disaggregated"],
    ]  # fmt: skip
    assert table[2][2:] == ["nothing", "fits"] and "NumPy PCG64, seed 0" in told.err
    assert plan("pipelines", *files, "--machines", "2", "--json", "--price", "3.6") == 0
    (row,) = json.loads(capsys.readouterr().out)["machines"]
    found = row["disaggregated"]
    assert (found["prompt_stages"], found["token_stages"]) == (1, 1)
    assert found["cost"] == pytest.approx(found["makespan_s"] * 2 * 3.6 / 3600)


def test_pipelines_that_nothing_fits_on(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("pipelines", *files, "--machines", "1", "--memory-gb", "1") == 1
    assert capsys.readouterr().out.count("nothing fits") == 3
    assert plan("pipelines", *files, "--machines", "1,x") == 2
    assert "--machines 1,x: give whole numbers from 1 to 256" in capsys.readouterr().err
