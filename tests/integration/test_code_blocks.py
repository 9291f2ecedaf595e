"""Programs of the docs and their command lines run, where this host can run them.

Every ``fastdecode`` command line is parsed: its options exist. ``test_readme.py`` runs README's.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastdecode.cli.main import COMMANDS, _parse, main

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "model" / "checkpoint"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IS_SHORTENED = re.compile(r"…|\.\.\.")
COMMAND = re.compile(r"(\$ )?(fastdecode [a-z]|mpirun )(?!\S+: )")
GENERATE = "--model DIR --input in.jsonl --output out.jsonl"

IS_SHOWN_ONLY = re.compile(
    r"--device cuda|--tp 2|mpirun |tcp://|--bind|--key|--export| s\.json |…|\.\.\."
)
"""Marks command lines that are shortened, or need a GPU, other processes or profiles."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Command lines: continued ones joined, comments left out."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        whole = (re.sub(r"\s+#.*| {6,}[A-Z].*", "", line).strip() for line in joined.splitlines())
        return [line.removesuffix(" &") for line in whole if line]


def _blocks() -> list[Block]:
    pages = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        Block(page.relative_to(ROOT).as_posix(), language, text)
        for page in pages
        for language, text in BLOCK.findall(page.read_text("utf-8"))
    ]


BLOCKS = _blocks()
LINES = sorted({line for block in BLOCKS for line in block.lines})
RUN = [
    line
    for line in LINES
    if line.startswith(("fastdecode generate ", "fastdecode size "))
    and not IS_SHOWN_ONLY.search(line)
]
PROGRAMS = [
    block
    for block in BLOCKS
    if "with LLM(" in block.text and "llm.chat(" not in block.text  # no chat template here
]


@pytest.mark.parametrize("line", RUN)
def test_a_command_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"id": 1, "prompt": "Once upon a time", "max_tokens": 4}\n')
    Path("examples").symlink_to(ROOT / "examples")
    words = shlex.split(line.replace("DIR", str(MODEL)))[1:]
    code = main([*words, *(["--kv-memory-gb", "0.05"] if GENERATE in line else [])])
    # Of `size`, 1: nothing fits. Of `generate`, 3: the page shows lines for which there is no room.
    is_meant = (words[0], code) == ("size", 1) or (code == 3 and "0.0006" in words)
    assert code == 0 or is_meant
    assert ("--output " in line) is Path("out.jsonl").exists()


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.page)
def test_a_program_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names = (
        "from fastdecode import LLM, SamplingParams\n"
        "prompt, params = 'Once upon a time', SamplingParams(max_tokens=4)\n"
    )
    code = block.text.replace('LLM("DIR"', f"LLM({str(MODEL)!r}, kv_memory_gb=0.05")
    exec(compile(names + code, block.page, "exec"), {})


def _commands(line: str) -> list[list[str]]:
    """The words of each ``fastdecode`` command in a line, up to where it is shortened."""
    found = []
    for part in re.split(r" : |\bfastdecode launch [^-]*(?:--(?!\s)[^-]*)*-- ", line):
        start = re.search(r"(?:^\$ |^|mpirun .* )fastdecode (?=[a-z])", part)
        if start is not None:
            words = shlex.split(part[start.end() :].split(" > ")[0].split(" | ")[0])
            found.append(words)
    return [words for words in found if words and words[0] in COMMANDS]


@pytest.mark.parametrize("line", [line for line in LINES if COMMAND.match(line)])
def test_a_command_line_has_options_that_exist(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in _commands(line):
        if any(IS_SHORTENED.search(word) for word in words):
            words = [word for word in words if not IS_SHORTENED.search(word)]
        try:
            _parse(words)
        except SystemExit:
            said = capsys.readouterr().err
            assert "are required" in said or "is required" in said, said
            assert IS_SHORTENED.search(line), said
