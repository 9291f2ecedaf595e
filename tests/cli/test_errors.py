"""Whoever types options reads of options; whoever calls Python, of parameters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from fastdecode.cli.main import main
from fastdecode.cli.options import add_sampling_options, as_typed
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.sequence import SamplingParams

FLAGS = {
    **{name: "--" + name.replace("_", "-") for name in ("kv_memory_gb", "device", "key")},
    "length_quantile": "--length-quantile",
    "r_worker_addresses": "--r-worker",
}


@pytest.mark.parametrize(
    ("words", "told", "typed"),
    [
        (
            (Given("kv_memory_gb", 1e-05), " is not enough"),
            "kv_memory_gb=1e-05 is not enough",
            "--kv-memory-gb 1e-05 is not enough",
        ),
        (
            (Given("length_quantile", 0.5), " needs ", Given("key")),
            "length_quantile=0.5 needs key",
            "--length-quantile 0.5 needs --key",
        ),
        (
            (Given("device", ""), " is none; use ", Given("device", "cpu"), ", or"),
            "device='' is none; use device='cpu', or",
            "--device '' is none; use --device cpu, or",
        ),
        (
            (Given("r_worker_addresses", ["a", "b"]), ": too many"),
            "r_worker_addresses=['a', 'b']: too many",
            "--r-worker a --r-worker b: too many",
        ),
        # Texts stay what they are, and so do parameters that the command has no option for.
        (("the lanes of /device=3/kv_memory_gb=1",), "the lanes of /device=3/kv_memory_gb=1", None),
        ((Given("block_size", 16), " stays"), "block_size=16 stays", None),
        ((Given("seed", 1 << 300), " is odd"), "seed=a whole number of 301 bits is odd", None),
    ],
)
def test_parameters_become_options(
    words: tuple[str | Given, ...], told: str, typed: str | None
) -> None:
    error = ConfigError(*words)
    assert str(error) == error.message == told
    assert as_typed(error, FLAGS) == (typed or told)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--kv-memory-gb", "0.00001"],
            "hold one KV block of 43008 bytes (3 layers, 64 tokens): give it more memory "
            "(--kv-memory-gb)",
        ),
        (["--kv-memory-gb", "0.0000001"], "--kv-memory-gb 1e-07 is not a number of GB"),
        (["--lanes", "0"], "--lanes 0 is not a whole number from 1 to 64"),
        (["--schedule", "fixed-f"], "fixed intervals need --expected-output-tokens"),
        (
            ["--kv-placement", "gpu", "--r-workers", "2"],
            "--r-workers 2 contradicts --kv-placement gpu: KV on the device needs no R-workers",
        ),
        *(
            (
                [option, "3", "--r-worker", "tcp://127.0.0.1:1"],
                f"{option} is for R-workers that this process starts: ",
            )
            for option in ("--r-workers", "--r-threads", "--kv-memory-gb")
        ),
        (["--kv-placement", "swap"], "needs at least 3 stages and lanes"),
        (["--temperature", "-1"], "--temperature -1.0: must be"),
    ],
)
def test_generate_names_the_option(
    options: list[str],
    says: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt_token_ids": [5]}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", "--model", str(tiny_checkpoint("llama")), *files, *options]) == 2
    assert says in capsys.readouterr().err


def test_every_sampling_parameter_that_a_command_can_give_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    options = {action.dest for action in parser._actions} - {"help", "generation_config"}
    others = {"logit_bias", "logits_processors", "reasoning_marks", "structured_outputs"}
    assert options == {each.name for each in fields(SamplingParams)} - others
