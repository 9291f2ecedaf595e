"""``fastdecode simulate`` as a user meets it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fastdecode.cli.simulate import add_simulate
from fastdecode.core.errors import ConfigError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_simulate(parser)
    args = parser.parse_args(arguments)
    code: int = args.run(args)
    return code


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    line = json.dumps({"num_prompt_tokens": 8, "num_output_tokens": 32, "max_tokens": 40})
    path.write_text(f"{line}\n" * 40)
    return str(path)


def test_compares_the_modes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--trace", trace, "--max-num-sequences", "8") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["stabilized", "fixed-f", "greedy", "synchronized"]
    assert "output tokens/s" in out


def test_prints_json_of_the_chosen_modes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--lanes 1 --length-quantile 0.9 --block-size 8 --kv-tokens 320 --kv-tokens 400"
    hardware = "--s-time 1:0.01,64:0.02 --r-workers 2 --r-time 1e-5 --r-time 0:0.001,100:0.002"
    words = f"--json {options} {hardware}".split()
    assert run("--trace", trace, "--schedule", "greedy, stabilized", *words) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert list(modes) == ["greedy", "stabilized"]
    for mode in modes.values():
        assert mode["summary"]["requests"] == 40
        assert mode["summary"]["output_tokens"] == 40 * 32
        assert len(mode["steps"]["load_tokens"]) == mode["summary"]["steps"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--schedule", "fastest"], "--schedule='fastest'"),
        (["--s-time", "soon"], "--s-time='soon'"),
        (["--r-workers", "0"], "r_workers=0"),
        (["--link-time", "-1"], "link_time=-1"),
        (["--r-workers", "3", "--r-time", "1", "--r-time", "2"], "--r-time was given 2 times"),
        (["--kv-tokens", "5"], "--kv-tokens"),
        (["--lanes", "0"], "lanes=0"),
        (["--max-step-tokens", "8"], "max_step_tokens=8 must exceed"),
        (["--length-quantile", "1.5"], "length_quantile=1.5"),
    ],
)
def test_bad_options_are_named(trace: str, arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        run("--trace", trace, *arguments)
    assert caught.value.exit_code == 2
