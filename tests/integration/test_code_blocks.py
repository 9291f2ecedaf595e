"""Every code block of the docs runs in a test, or stands in one table with the reason.

Every ``fastdecode`` command line is parsed, too, also where it isn't run: its options
exist. README's blocks have a test of their own (``test_readme.py``).
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

RUN_BY = {
    ("docs/guides/sizing.md", "$ fastdecode size"): "tests/cli/test_size.py",
    ("docs/design/disaggregation.md", "$ fastdecode plan"): "tests/cli/test_plan.py",
    ("docs/design/goodput.md", "$ fastdecode plan"): "tests/cli/test_plan.py",
    ("docs/guides/serving.md", "fastdecode serve examples"): "tests/integration/test_readme.py",
    ("docs/guides/serving.md", "from openai import"): "tests/server/test_openai_client.py",
    ("docs/guides/conversations.md", "asked = {"): "tests/server/test_conversations.py",
    ("docs/guides/structured.md", "from openai import"): "tests/server/test_structured_server.py",
    ("docs/guides/structured.md", "(output,) = llm"): "tests/engine/test_structured_outputs.py",
}
"""(page, first words) of blocks that other tests run."""

LISTED = {
    ("CONTRIBUTING.md", "git clone"): "sets a checkout up, as this one was",
    ("docs/design/architecture.md", "S-worker     x"): "a picture",
    ("docs/design/stages.md", "first stage"): "a picture",
    ("docs/design/stages.md", "compute      |"): "a picture",
    ("docs/design/goodput.md", "python -c"): "reads a published trace, which is not in the tree",
    ("docs/guides/batch.md", "{"): "a file's format; tests/jobs read and write such lines",
    ("docs/guides/batch.md", "$ fastdecode run-batch"): "shows times and paths; "
    "tests/cli/test_run_batch.py runs such jobs",
    ("docs/guides/batch.md", "fastdecode run-batch: finishing"): "output of a run that is stopped",
    ("docs/guides/cluster.md", "LLM("): "needs R-workers on other hosts",
    ("docs/guides/cluster.md", "PASS"): "output that depends on the hosts",
    ("docs/guides/conversations.md", 'with LLM("DIR"'): "needs a model of your own; "
    "tests/engine/test_conversations.py runs these calls",
    ("docs/guides/conversations.md", "{"): "a file's format; tests/jobs read such lines",
    ("docs/guides/generate.md", "{"): "a file's format; tests/cli/test_generate.py reads it",
    ("docs/guides/gpu.md", "fastdecode generate: "): "an error's text",
    ("docs/guides/gpu.md", "RIGHT"): "output that needs a GPU",
    ("docs/guides/models.md", "GRANITE"): "part of fastdecode/core/model",
    ("docs/guides/quantised.md", "weights are"): "a line of progress of a large model",
    ("docs/guides/serving.md", "$ "): "shows times; tests/integration/test_readme.py asks a server",
    ("docs/guides/sizing.md", "currency"): "a file's format; tests/cost_model read it",
    ("docs/guides/sizing.md", "[gpu."): "a file's format; tests/cost_model read such files",
}  # fmt: skip
"""(page, first words) of blocks that aren't run, and why."""

LINES_NOT_RUN = {
    r"--device cuda|--tp 2|gpu_first": "needs a GPU",
    r"mpirun |fastdecode launch ": "needs MPI ranks or other hosts; tests/mpi run such jobs",
    r"tcp://|--bind|--key|--export": "needs other processes or hosts; "
    "tests/cli/test_generate_zmq.py runs such jobs",
    r"^python (-m pytest|benchmarks|tests/)|^benchmarks/": "takes minutes, or is a test itself",
    r"^fastdecode (serve|instance|bench-serve)": "runs until it is stopped; tests/server",
    r"^fastdecode (calibrate|bench|doctor|r-worker)": "measures this host; "
    "tests/cli/test_calibrate_and_bench.py",
    r"^fastdecode (simulate|plan)|^python -c": "needs a file; tests/cli/test_simulate.py",
    r"^fastdecode (cache|merge|run-batch)": "needs an earlier run's files; tests/cli/test_cache.py",
    r" s\.json ": "needs profiles of `fastdecode calibrate`; tests/cli/test_size.py",
    r"^pip ": "needs a network; tests/core/test_package.py builds the package",
    r"^\{": "a line of a file",
    r"…|\.\.\.": "shortened",
}  # fmt: skip
"""Why a command line of a block isn't run, by what it says; the first that fits."""


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

    @property
    def is_program(self) -> bool:
        return self.language == "python" and 'LLM("' in self.text and "with " in self.text

    def known_in(self, table: dict[tuple[str, str], str]) -> list[tuple[str, str]]:
        """The table's entries that mean it."""
        return [key for key in table if key[0] == self.page and self.text.startswith(key[1])]


def _blocks() -> list[Block]:
    pages = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        Block(page.relative_to(ROOT).as_posix(), language, text)
        for page in pages
        for language, text in BLOCK.findall(page.read_text("utf-8"))
    ]


BLOCKS = _blocks()
OF_COMMANDS = [
    block
    for block in BLOCKS
    if not (block.is_program or block.known_in(RUN_BY) or block.known_in(LISTED))
]
LINES = sorted({line for block in OF_COMMANDS for line in block.lines})
PROGRAMS = [block for block in BLOCKS if block.is_program and not block.known_in(LISTED)]


def _why_not(line: str) -> str | None:
    """None: it is run."""
    return next((why for words, why in LINES_NOT_RUN.items() if re.search(words, line)), None)


RUN = [line for line in LINES if _why_not(line) is None]


def test_every_block_is_run_or_listed() -> None:
    assert len(BLOCKS) > 80
    for line in RUN:
        assert line.startswith(("fastdecode generate ", "fastdecode size ")), line
    for table in (RUN_BY, LISTED):
        for key in table:
            assert any(key in block.known_in(table) for block in BLOCKS), f"no such block: {key}"
    for test in RUN_BY.values():
        assert (ROOT / test).exists(), test


def test_every_reason_is_that_of_a_line() -> None:
    used = {_why_not(line) for line in LINES}
    assert used == {*LINES_NOT_RUN.values(), None}


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


ALL_LINES = sorted({line for block in BLOCKS for line in block.lines if COMMAND.match(line)})


@pytest.mark.parametrize("line", ALL_LINES)
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
