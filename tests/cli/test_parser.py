"""Options as dataclasses declare them; help by group; errors of command lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fastdecode.cli.main import main
from fastdecode.cli.options import add_options, as_typed, read_options
from fastdecode.cli.parser import Parser, add_model
from fastdecode.cli.vllm_words import as_here
from fastdecode.core.config.options import REQUIRED, check_options, duration, option, switch
from fastdecode.core.errors import ConfigError


@dataclass(frozen=True)
class SPart:
    dtype: str = option("auto", "a common option", common=True)
    count: int = option(2, "how many", low=1, high=9)
    share: float | None = option(None, "a part", read=duration, metavar="S", high=9)
    mode: str = option("fast", "one of two", choices=("fast", "slow"))
    cuda_graphs: str | None = option(None, "a rare option")
    names: tuple[str, ...] = option((), "repeatable")
    sizes: tuple[int, ...] = option((), "repeatable")
    lanes: int | None = option(None, "how many, or auto", auto=True)
    is_on: bool = option(True, "can be off", flag="--on")
    text: bool = option(True, "no text", flag="--no-text", is_switch=True)
    no_hands: bool = switch("a name that begins like a negation")
    first: bool = switch("an alternative", is_alternative=True)
    second: bool = switch("another", is_alternative=True)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Files:
    input: Path = option(REQUIRED, "what to read", short="-i", metavar="FILE")


def parser() -> Parser:
    made = Parser(prog="tool", description="Do something.")
    add_model(made)
    add_options(made, Files)
    add_options(made, SPart, "S-part")
    return made


def ended(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Return what the command prints before it exits."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_options_are_read_as_their_dataclass_declares_them() -> None:
    words = "m -i f --count 3 --share 5ms --names a --names b --sizes 1 --lanes auto --no-on"
    args = parser().parse_args([*words.split(), "--no-text", "--no-hands", "--second"])
    assert read_options(args, Files) == Files(Path("f")) and args.model == "m"
    given = {"count": 3, "share": 0.005, "names": ("a", "b"), "sizes": (1,), "second": True}
    given |= {"no_hands": True}
    assert read_options(args, SPart) == SPart(**given, is_on=False, text=False)
    assert read_options(parser().parse_args(["m", "-i", "f"]), SPart) == SPart()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--count 10", "--count 10 is not a whole number from 1 to 9"),
        ("--share 10s", "--share 10.0 is not a number from -inf to 9"),
    ],
)
def test_a_value_beyond_its_limits_is_refused_by_its_option(words: str, says: str) -> None:
    args = parser().parse_args(["m", "-i", "f", *words.split()])
    with pytest.raises(ConfigError) as refused:
        read_options(args, SPart)
    assert as_typed(refused.value, args.flags) == says


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
    assert "--help=x is not a group of options: arguments" in refusal(["--help=x"], capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["m", "--input", "f", "--dtpye", "x"], "unknown option --dtpye: did you mean --dtype?"),
        (["m", "--input", "f", "--zzzz"], "unknown option --zzzz: see tool --help=all"),
        (["m", "--inp", "f"], "unknown option --inp: did you mean --input?"),
        (["m", "n", "--input", "f"], "unrecognized arguments: n"),
        (["--input", "f"], "one of the arguments MODEL --model is required"),
        (["m"], "the following arguments are required: --input/-i"),
        (["m", "--input", "f", "--count", "x"], "argument --count: invalid int value: 'x'"),
        (["m", "--input", "f", "--share", "x"], "'x' is no time: give seconds, or like 5ms"),
        (["m", "--input", "f", "--mode", "x"], "argument --mode: invalid choice: 'x'"),
        (["m", "--input", "f", "--mode", "slwo"], "invalid choice: 'slwo': did you mean slow?"),
        (["m", "-i", "f", "--first", "--second"], "not allowed with argument --first"),
        (["m", "--model", "n", "-i", "f"], "not allowed with argument"),
    ],
)
def test_a_bad_command_line_is_refused_behind_one_line_of_usage(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usage, error = refusal(words, capsys).splitlines()
    assert error.startswith("tool: error: ") and says in error
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
    assert "top run: error: unknown option --sead: did you mean --seed?" in capsys.readouterr().err
    assert "invalid choice: 'generat': did you mean generate?" in ended(["generat"], capsys)


@pytest.mark.parametrize("command", ["generate", "run-batch", "serve"])
def test_no_default_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "None" not in ended([command, "--help=all"], capsys, code=0)


FLAGS = ["--tp", "--pp", "--kv-dtype", "--dtype", "--prefix-cache", "--cuda-graphs"]
FLAGS += ["--max-num-sequences", "--port"]
SERVER_FLAGS = [*FLAGS, "--tls-key", "--tls-cert", "--unix-socket", "--tool-parser", "--seed"]


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("m --tensor-parallel-size 2 --port 1", "m --tp=2 --port 1"),
        ("--tensor-parallel-size=2 m", "--tp=2 m"),
        ("--pipeline-parallel-size 3", "--pp=3"),
        ("--max-num-seqs 8", "--max-num-sequences=8"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-dtype=fp8_e4m3"),
        ("--enable-prefix-caching m", "--prefix-cache=on m"),
        ("--no-enable-prefix-caching m", "--prefix-cache=off m"),
        ("--enforce-eager", "--cuda-graphs=off"),
        ("--dtype half", "--dtype=float16"),
        ("--dtype bfloat16", "--dtype=bfloat16"),
        ("--swap-space 4 --max-logprobs 20 m", "m"),
        ("--disable-log-stats --disable-log-requests --enable-auto-tool-choice m", "m"),
        ("--no-trust-remote-code --enable-chunked-prefill m", "m"),
        ("--limit-mm-per-prompt {} m", "m"),
        ("--tokenizer m m", "m"),
        ("--ssl-keyfile k --ssl-certfile c", "--tls-key=k --tls-cert=c"),
        ("--uds s --tool-call-parser hermes", "--unix-socket=s --tool-parser=hermes"),
        ("m -- --tensor-parallel-size 2", "m -- --tensor-parallel-size 2"),
        ("--seed 5 --prot 1", "--seed 5 --prot 1"),
    ],
)
def test_command_line_of_vllm_is_said_as_here(words: str, here: str) -> None:
    assert as_here(words.split(), SERVER_FLAGS) == here.split()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--quantization awq", "quantisation|quantised"),
        ("--trust-remote-code", "code of a checkpoint is never run"),
        ("--no-enable-chunked-prefill", "always run in chunks"),
        ("--enable-expert-parallel", "give ep"),
        ("--enable-lora", "adapters are not applied"),
        ("--speculative-config {}", "no speculative decoding"),
        ("--tensor-parallel-size", "needs a value"),
    ],
)
def test_option_of_vllm_without_anything_like_it_is_refused(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        as_here(words.split(), SERVER_FLAGS)


@pytest.mark.parametrize("name", ["serve", "generate", "run-batch"])
def test_commands_take_names_of_vllm(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = ended([name, "m", "--tensor-parallel-size", "two"], capsys)
    assert "argument --tp: invalid int value: 'two'" in said
    said = ended([name, "m", "--trust-remote-code"], capsys)
    assert "--trust-remote-code is not supported: code" in said


def test_a_key_in_a_command_line_is_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--api-key", "first-key-0001"], ["--api-key=first-key-0001"]):
        for command in (["serve", "m"], ["top", "http://localhost:1"]):
            said = ended([*command, *words], capsys)
            assert "--api-key-file" in said and "first-key" not in said


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in ((["help"], "COMMAND"), (["help", "size"], "fastdecode size")):
        assert shown in ended(words, capsys, code=0).splitlines()[0]
