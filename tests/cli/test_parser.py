"""Short help, whole help, a group's help; errors that say the mend."""

from __future__ import annotations

import re

import pytest

from fastdecode.cli.parser import Parser, Rare, add_model
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.options import REMOVED
from fastdecode.core.errors import ConfigError


def parser() -> Parser:
    made = Parser(prog="tool", description="Do something.")
    add_model(made)
    made.add_argument("--input", required=True, metavar="FILE", help="what to read")
    group = made.add_argument_group("S-part")
    group.add_argument("--dtype", help="a common option")
    group.add_argument("--count", type=int, help=Rare("how many"))
    group.add_argument("--share", type=float, help=Rare("a part"))
    group.add_argument("--mode", choices=("fast", "slow"), help=Rare("one of two"))
    group.add_argument("--cuda-graphs", help=Rare("a rare option"))
    return made


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(words)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_the_short_help_leaves_rare_options_out(capsys: pytest.CaptureFixture[str]) -> None:
    short = shown(["--help"], capsys)
    assert "--dtype" in short and "--cuda-graphs" not in short and "--help=all" in short
    assert "--cuda-graphs" in shown(["--help=all"], capsys)
    group = shown(["--help=S-part"], capsys)
    assert "--cuda-graphs" in group and "--dtype" in group and "what to read" not in group


def test_an_unknown_group_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no such group of options. Groups are" in refusal(["--help=x"], capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["m", "--input", "f", "--dtpye", "x"], "unknown option --dtpye: did you mean --dtype?"),
        (
            ["m", "--input", "f", "--quantization", "awq"],
            "FastDecode has nothing like it. Remove it",
        ),
        (["m", "--input", "f", "--zzzz"], "unknown option --zzzz: see tool --help=all"),
        (["m", "--inp", "f"], "unknown option --inp: did you mean --input?"),
        (["m", "n", "--input", "f"], "unexpected argument 'n'"),
        (["--input", "f"], "missing: MODEL"),
        (["m"], "missing: --input FILE"),
        ([], "missing: MODEL, --input FILE"),
        (["m", "--input"], "--input needs a value behind it"),
        (["m", "--input", "f", "--count", "x"], "--count x is not a whole number"),
        (["m", "--input", "f", "--share", "x"], "--share x is not a number"),
        (["m", "--input", "f", "--mode", "fsat"], "--mode fsat is unknown: did you mean fast?"),
        (
            ["m", "--model", "n", "--input", "f"],
            "--model and MODEL cannot be used together: remove one of them",
        ),
    ],
)
def test_the_reason_comes_first_and_the_usage_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, usage = refusal(words, capsys).splitlines()
    assert first.startswith("tool: ") and says in first
    assert usage == "usage: tool [options] MODEL --input FILE"


@pytest.mark.parametrize("words", [["m"], ["--model", "m"]])
def test_the_model_is_an_argument_or_an_option(words: list[str]) -> None:
    assert parser().parse_args([*words, "--input", "f"]).model == "m"
    assert parser().parse_args(["--input", "f", *words]).model == "m"


def test_subcommands_are_parsed_alike(capsys: pytest.CaptureFixture[str]) -> None:
    top = Parser(prog="top")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("run").add_argument("--seed")
    with pytest.raises(SystemExit):
        top.parse_args(["run", "--sead", "3"])
    assert "top run: unknown option --sead: did you mean --seed?" in capsys.readouterr().err


def test_the_whole_help_of_a_command_with_subcommands_lists_their_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fastdecode.cli.main import main

    texts = []
    for word in ("--help", "--help=all"):
        with pytest.raises(SystemExit) as stopped:
            main([word])
        assert stopped.value.code == 0
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert "prefix-cache" in whole and "plan goodput" in whole
    assert "prefix-cache" not in short


@pytest.mark.parametrize("command", ["generate", "run-batch", "serve"])
def test_no_default_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fastdecode.cli.main import main

    with pytest.raises(SystemExit):
        main([command, "--help=all"])
    assert "None" not in capsys.readouterr().out


def test_options_of_earlier_versions_say_what_took_their_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fastdecode.cli.main import main

    for name, new in REMOVED.items():
        mend = "leave it out" if new is None else f"did you mean {new}?"
        with pytest.raises(ConfigError, match=re.escape(f"no option '{name}': {mend}")):
            EngineConfig.of("dir", **{name: 1})
        flag = "--" + name.replace("_", "-")
        with pytest.raises(SystemExit):
            main(["generate", "m", flag, "1"])
        mend = "Remove it" if new is None else f"did you mean --{new.replace('_', '-')}?"
        assert f"unknown option {flag}: " in (said := capsys.readouterr().err) and mend in said


def test_options_of_vllm_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    from fastdecode.cli.main import main

    with pytest.raises(SystemExit):
        main(["generate", "m", "--tensor-parallel-size", "2"])
    assert "did you mean --tp?" in capsys.readouterr().err


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    from fastdecode.cli.main import main

    for words, shown in ((["help"], "COMMAND"), (["help", "size"], "fastdecode size")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert shown in capsys.readouterr().out.splitlines()[0]
