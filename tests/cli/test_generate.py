"""``fastdecode generate`` as a user runs it: files in, files and exit codes out."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdecode.cli.main import main
from fastdecode.core.errors import pip_command
from fastdecode.engine.setup import launch

Run = Callable[..., tuple[int, list[dict[str, Any]]]]


def line(request_id: object, **rest: object) -> str:
    return json.dumps(
        {"id": request_id, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **rest}
    )


@pytest.fixture
def run(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Run:
    def run(lines: list[str | bytes], *options: str) -> tuple[int, list[dict[str, Any]]]:
        raw = [text.encode() if isinstance(text, str) else text for text in lines]
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(raw))
        model = [str(tiny_checkpoint("llama")), "--dtype", "float32"]
        command = ["generate", *model, "--kv-memory-gb", "0.01"]
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        code = main([*command, *files, *options])
        return code, [
            json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()
        ]

    return run


def test_the_models_defaults_are_named_once(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 3}')
    (tmp_path / "in.jsonl").write_text(line("a", prompt_token_ids=[5]))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(model), *files, "--kv-memory-gb", "0.01"]) == 0
    assert capfd.readouterr().err.count("defaults of generation_config.json: top_k 3") == 1


def test_lines_come_from_a_pipe_and_answers_go_to_one(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = "".join(line(f"q{i}", prompt_token_ids=[5 + i]) + "\n" for i in range(3))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    words = ["generate", str(tiny_checkpoint("llama")), "--kv-memory-gb", "0.01"]
    assert main([*words, "--input", "-", "--output", "-"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert [json.loads(text)["id"] for text in out] == ["q0", "q1", "q2"]
    assert main([*words, "--input", "-", "--output", "-", "--show"]) == 2


def test_every_line_is_answered_in_order(run: Run) -> None:
    lines = [line(f"q{i}", prompt_token_ids=[5 + i] * (1 + i), max_tokens=9 - i) for i in range(8)]
    code, out = run([*lines[:4], "", *lines[4:]])  # blank lines are nothing
    assert code == 0
    assert [answer["id"] for answer in out] == [f"q{i}" for i in range(8)]
    for i, answer in enumerate(out):
        assert set(answer) == {"id", "text", "token_ids", "finish_reason", "usage"}
        assert len(answer["token_ids"]) == 9 - i
        assert answer["finish_reason"] == "length"
        usage = {"prompt_tokens": 1 + i, "completion_tokens": 9 - i, "total_tokens": 10}
        assert answer["usage"] == usage


def test_bad_lines_cost_the_good_ones_nothing(run: Run) -> None:
    good = line("good", prompt_token_ids=[5, 6, 7])
    (_, (alone,)) = run([good])
    bad = {
        "{not json": "invalid_json",
        "[1, 2]": "invalid_json",
        "NaN": "invalid_json",
        '{"prompt_token_ids": [1]}': "invalid_id",
        line(True, prompt_token_ids=[1]): "invalid_id",
        line("a"): "invalid_prompt",
        line("b", prompt="x", prompt_token_ids=[1]): "invalid_prompt",
        line("c", prompt=[1, 2]): "invalid_prompt",
        line("d", prompt_token_ids="abc"): "invalid_prompt",
        line("e", prompt_token_ids=[]): "empty_prompt",
        line("f", prompt_token_ids=[-1]): "invalid_token_id",
        line("g", prompt_token_ids=[10**9]): "invalid_token_id",
        line("h", prompt_token_ids=[5] * 100_000): "prompt_too_long",
        '{"id": "i", "prompt_token_ids": [1], "temperature": NaN}': "invalid_sampling_params",
        line("j", prompt_token_ids=[1], n=0): "invalid_sampling_params",
        line("k", prompt_token_ids=[1], max_tokens=0): "invalid_sampling_params",
        line("l", prompt_token_ids=[1], max_tokens=10**15): "invalid_sampling_params",
        line("m", prompt_token_ids=[1], temprature=1): "unknown_field",
        line("n", prompt="\ud800"): "invalid_text",
        line("good", prompt_token_ids=[9]): "duplicate_id",
        line(7, prompt_token_ids=[-1]): "invalid_token_id",
        line("7", prompt_token_ids=[9]): "duplicate_id",
    }
    last = line("last", prompt_token_ids=[5, 6, 7])
    code, out = run([good, *bad, b'{"id": "o", "prompt": "\xff"}', last])
    assert code == 3
    codes = [answer.get("error", {}).get("code") for answer in out]
    assert codes == [None, *bad.values(), "invalid_json", None]
    assert all(answer["error"]["message"] for answer in out if "error" in answer)
    assert out[0] == alone
    assert out[-1] == {**alone, "id": "last"}
    # What was probably meant.
    assert "temperature" in next(a for a in out if a["id"] == "m")["error"]["message"]


def test_the_first_error_is_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([line("a", prompt_token_ids=[-1]), line("b")])[0] == 3
    assert "First: line 1 ('a'): invalid_token_id: " in capsys.readouterr().err


def test_a_directory_without_a_model_is_refused_before_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", prompt="x"))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(tmp_path), *files]) == 2
    assert "has no config.json" in (said := capsys.readouterr().err) and "tokenizer" not in said


def test_conversations_without_reuse_are_warned_of(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--conversations", str(tmp_path / "kept")]
    assert run([line("a", prompt_token_ids=[5])], *kept, "--prefix-cache", "off")[0] == 0
    assert (
        "warning: every turn computes its whole conversation again: prefix_cache is off"
        in capsys.readouterr().err
    )
    assert run([line("a", prompt_token_ids=[5])], *kept)[0] == 0
    assert "warning" not in capsys.readouterr().err


def test_several_completions_and_logprobs(run: Run) -> None:
    request = line("x", prompt_token_ids=[5, 6], n=3, temperature=1, seed=4, logprobs=2)
    code, (answer,) = run([request])
    assert code == 0
    assert len(answer["completions"]) == 3
    assert answer["usage"]["completion_tokens"] == 12
    for completion in answer["completions"]:
        for token, step in zip(completion["token_ids"], completion["logprobs"], strict=True):
            assert step["token_id"] == token
            assert len(step["top"]) == 2
            assert step["logprob"] <= step["top"][0][1] <= 0


def test_options_are_defaults_that_lines_override(run: Run) -> None:
    lines = [
        '{"id": 1, "prompt_token_ids": [5]}',
        '{"id": 2, "prompt_token_ids": [5], "max_tokens": 2, "seed": null}',
    ]
    code, out = run(lines, "--max-tokens", "6", "--temperature", "0", "--ignore-eos")
    assert code == 0
    assert [len(answer["token_ids"]) for answer in out] == [6, 2]
    assert [answer["id"] for answer in out] == [1, 2]  # as they were given, not as text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_show_on_a_terminal_that_is_not_utf8(
    run: Run, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", shown)
    code, out = run([line("\u4f60\u597d caf\u00e9", prompt_token_ids=[5])], "--show")
    assert code == 0
    assert "error" not in out[0]
    assert b"\\u4f60" in shown.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_summary_that_cannot_be_written_costs_no_answer(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.json")  # which nobody reads
    code, out = run([line(1, prompt_token_ids=[5])], "--summary", str(tmp_path / "s.json"))
    assert code == 1 and "error" not in out[0]


def test_summary_holds_what_was_measured(run: Run, tmp_path: Path) -> None:
    lines = [line(i, prompt_token_ids=[5, 6, 7]) for i in range(3)]
    code, _ = run(
        [*lines, "oops"], "--summary", str(tmp_path / "s.json"), "--r-workers", "2", "--show"
    )
    assert code == 3
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["requests"], summary["failed"]) == (4, 1)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (9, 12)
    assert summary["r_workers"] == 2
    names = "load_s prefill_s decode_s total_s output_tokens_per_s peak_rss_bytes"
    assert all(summary[name] > 0 for name in names.split())
    assert summary["total_s"] > summary["load_s"] + summary["prefill_s"] + summary["decode_s"]
    assert summary["s_share"] + summary["wait_share"] == pytest.approx(1)
    assert 0 < summary["r_share"] < 1


def test_batch_lines_are_for_run_batch(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    given = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(given) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(tiny_checkpoint("llama")), *files]) == 2
    said = capsys.readouterr().err
    assert "has OpenAI batch lines" in said and "use fastdecode run-batch --model" in said
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_file_is_no_work(run: Run) -> None:
    assert run([]) == (0, [])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--input", "missing.jsonl", "--output", "out.jsonl"], "missing.jsonl"),
        (["--input", "in.jsonl", "--output", "no/such/dir/out.jsonl"], "no/such/dir"),
        (["--input", "in.jsonl", "--output", "in.jsonl"], "same file"),
        (
            ["--input", "in.jsonl", "--output", "out.jsonl", "--summary", "no/dir/s.json"],
            "no/dir/s.json",
        ),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--summary", "in.jsonl"], "same file"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--summary", "out.jsonl"], "same file"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--trace", "in.jsonl"], "same file"),
        (["--input", "/dev/null", "--output", "out.jsonl"], "not a file"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--dtype", "float7"], "float7"),
        (["--input", "in.jsonl", "--output", "out.jsonl"], "nowhere"),
    ],
)
def test_usage_errors_are_exit_code_2_and_name_the_input(
    options: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt_token_ids": [1]}\n')
    assert main(["generate", "--model", "nowhere", *options]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert "Traceback" not in message
    assert (tmp_path / "in.jsonl").read_text() == '{"id": 1, "prompt_token_ids": [1]}\n'


def test_a_missing_extra_names_the_pip_command() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import fastdecode.cli.main as c\n"
        "sys.exit(c.main(['generate', '--model', 'm', '--input', 'i', '--output', 'o']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert pip_command("sworker") in done.stderr


def test_a_model_that_cannot_be_loaded_is_told_in_a_line(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee more")

    monkeypatch.setattr(launch, "load_stage", load)
    (tmp_path / "in.jsonl").write_text(line("a", prompt_token_ids=[5]))
    output = tmp_path / "out.jsonl"
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    command = ["generate", "--model", str(tiny_checkpoint("llama")), "--kv-memory-gb", "0.01"]
    assert main([*command, *files]) == 2
    (last,) = capsys.readouterr().err.splitlines()[-1:]
    assert last.startswith("fastdecode generate: the S-worker can't start, there is too little")
    assert last.endswith(
        "Tried to allocate 2.00 GiB. Choose a smaller dtype or model, or lower --kv-memory-gb"
    )
    assert not output.exists()
