"""``fastdecode size`` as its users see it: the documented answers word for
word, exit codes, errors, files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fastdecode.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def _examples(page: str) -> list[tuple[str, str]]:
    """Each command that a page shows, and its output."""
    block = r"```console\n\$ fastdecode (size [^\n]*)\n(.*?)```"
    return re.findall(block, (DOCS / page).read_text("utf-8"), flags=re.S)


GUIDE = _examples("guides/sizing.md")
EXAMPLES = GUIDE
QUESTION = ["--model", "Llama-2 7B", "--gpu", "A10", "--cpu", "EPYC 7452", "--seq-len", "1024"]


def size(*arguments: str) -> int:
    return main(["size", *arguments])


@pytest.mark.parametrize(("command", "answer"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_documented_answers(command: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The pages are the snapshot; "…" as the last line leaves the rest out. If a change of
    the model is meant, change the page with it."""
    assert main(shlex.split(command)) == 0
    said = capsys.readouterr().out
    assert said == answer or (answer.endswith("\n…\n") and said.startswith(answer[:-2]))


def test_all_that_is_missing_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        size()
    said = capsys.readouterr().err.splitlines()[0]
    assert all(word in said for word in ("MODEL", "--gpu G", "--cpu C"))


def test_explain_shows_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(*QUESTION, "--explain") == 0
    text = capsys.readouterr().out
    sources = "NVIDIA A10 Tensor Core GPU datasheet", "EPYC 7452 product page", "IEEE 802.3bj"
    assert all(part in text for part in (*sources, "STREAM"))
    assert max(map(len, text.splitlines())) <= 110


def test_stages_are_planned_as_one_of_them_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has half of the layers, a GPU and as many R-workers; a token goes through both."""
    question = [*QUESTION, "--batch", "256", "--tpot", "0.4"]
    assert size(*question, "--pp", "2", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    staged, plan = tree["stages"], tree["plan"]
    assert tree["question"]["tpot_s"] == 0.2 and plan["batch"] == 128
    assert staged["batch"] == 256 and staged["sockets"] == 2 * plan["sockets"]
    assert staged["lanes"] == 2 * plan["lanes"]
    assert 0 < staged["tpot_s"] <= 0.4
    assert staged["tokens_per_s"] == pytest.approx(256 / staged["tpot_s"])
    first, last = staged["stages"]
    assert first["num_layers"] + last["num_layers"] == 32
    assert last["first_layer"] == first["num_layers"]
    # 6.74 G parameters of two bytes, each once.
    assert first["weight_bytes"] + last["weight_bytes"] == pytest.approx(13.48e9, rel=1e-3)
    assert size(*question, "--pp", "2") == 0
    text = capsys.readouterr().out
    assert "in 2 pipeline stages" in text and max(map(len, text.splitlines())) <= 110
    for refused in (["--pp", "0"], ["--pp", "99"], ["--pp", "2", "--emit", "there"]):
        assert size(*question, *refused) == 2


def test_a_stage_has_no_embedding_that_is_another_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ten layers of Llama-3 70B, its embedding and its head (4.2 GB) don't fit into an A10."""
    question = ["--model", "Llama-3 70B", "--gpu", "A10", "--cpu", "EPYC 7452", "--seq-len", "1024"]
    assert size(*question, "--pp", "8", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert max(stage["weight_bytes"] for stage in tree["stages"]["stages"]) < 20e9
    assert tree["stages"]["tokens_per_s"] > 3000


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(*QUESTION, "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert size(*QUESTION) == 0
    text = capsys.readouterr().out
    assert tree["format"] == "fastdecode.plan" and tree["version"] == 1 and tree["feasible"] is True
    assert f"{tree['plan']['sockets']} sockets on {tree['plan']['hosts']} hosts" in text
    assert tree["plan"]["expected"]["tokens_per_s"] == pytest.approx(4753, abs=1)
    assert {row["provenance"] for row in tree["inputs"]} == {"given", "datasheet", "default"}
    assert tree["plan"]["binding"] in [row["name"] for row in tree["plan"]["constraints"]]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ([], 0),
        (["--latency", "10"], 1),
        (["--max-sockets", "1", "--batch", "1024"], 1),
        (["--survive", "2", "--nics", "2", "--headroom", "0.3", "--dram-gb", "512"], 0),
        (["--kv-dtype", "int8", "--start-interval", "64", "--tpot", "0.2"], 0),
    ],
)
def test_exit_codes(more: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert size(*QUESTION, *more) == code
    captured = capsys.readouterr()
    assert ("Infeasible" in captured.out) is (code == 1)
    assert captured.err == ""
    assert size(*QUESTION, *more, "--json") == code
    assert json.loads(capsys.readouterr().out)["feasible"] is (code == 0)


def replaced(option: str, value: str) -> list[str]:
    words = list(QUESTION)
    words[words.index(option) + 1] = value
    return words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (replaced("--model", "Llama-2 8B"), "Did you mean"),
        (replaced("--gpu", "A1O0"), "Did you mean A10 or A10G or A100-80GB"),
        (replaced("--cpu", "Epic 7452"), "Did you mean EPYC 7452"),
        ([*QUESTION, "--nic", "1000GbE"], "Did you mean"),
        (replaced("--seq-len", "0"), "--seq-len 0 is not"),
        (replaced("--seq-len", "-5"), "--seq-len -5 is not"),
        (replaced("--seq-len", "5000"), "at most 4096 tokens"),
        ([*QUESTION, "--latency", "-1"], "--latency"),
        ([*QUESTION, "--tpot", "nan"], "--tpot"),
        ([*QUESTION, "--headroom", "inf"], "--headroom"),
        ([*QUESTION, "--gpus", "0"], "--gpus"),
        ([*QUESTION, "--batch", "99999999999"], "--batch"),
        ([*QUESTION, "--dram-gb", "-3"], "--dram-gb"),
        ([*QUESTION, "--dtype", "int3"], "--dtype int3"),
        ([*QUESTION, "--kv-dtype", "int3"], "--kv-dtype"),
        ([*QUESTION, "--output-len", "3"], "--seq-len"),
        (replaced("--gpu", "none.json"), "No such file"),
        ([*QUESTION, "--prices", "none.toml"], "No such file"),
        ([*replaced("--gpu", "T4"), "--dtype", "bfloat16"], "no bfloat16"),
    ],
)
def test_bad_input_is_a_usage_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fastdecode size: ")
    assert message in captured.err and "Traceback" not in captured.err


def test_a_profile_in_the_wrong_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    path.write_text("{}")
    assert size(*replaced("--cpu", str(path))) == 2
    assert "not a usable profile" in capsys.readouterr().err


def test_emitted_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new" / "launch"
    assert size(*QUESTION, "--emit", str(directory)) == 0
    files = {path.name: path.read_text() for path in directory.iterdir()}
    assert set(files) == {"hostfile", "rankfile", "run.sh", "job.sbatch", "plan.json"}
    plan = json.loads(files["plan.json"])["plan"]
    ranks = files["rankfile"].splitlines()
    assert [line.split("=")[0] for line in ranks] == [
        f"rank {i}" for i in range(plan["sockets"] + 1)
    ]
    slots = [
        int(line.split("slots=")[1]) for line in files["hostfile"].splitlines() if "slots=" in line
    ]
    assert slots[0] == 1 and sum(slots[1:]) == plan["sockets"] and len(slots) - 1 == plan["hosts"]
    for name, shell in (("run.sh", "sh"), ("job.sbatch", "bash")):
        assert subprocess.run([shell, "-n", str(directory / name)], check=False).returncode == 0
    line = files["run.sh"].partition("\nmpirun ")[2]
    r_workers = re.findall(
        r": -n (\d+) --host r\d+:(\d+) fastdecode r-worker --numa-node auto", line
    )
    assert all(ranks == slots for ranks, slots in r_workers)
    assert [int(ranks) for ranks, _ in r_workers] == slots[1:]
    assert f"--max-num-sequences {plan['batch']} --lanes {plan['lanes']}" in line
    assert '--input "$INPUT" --output "$OUTPUT"' in line
    assert (
        "#SBATCH hetjob" in files["job.sbatch"]
        and f"--ntasks={plan['sockets']}" in files["job.sbatch"]
    )
    (tmp_path / "file").write_text("")
    assert size(*QUESTION, "--emit", str(tmp_path / "file")) == 2
    assert size(*QUESTION, "--latency", "1", "--emit", str(directory)) == 2


def test_the_emitted_slurm_job_shares_its_nodes_out(tmp_path: Path) -> None:
    """Slurm's and our own commands are stubs on the PATH; the script is run as it is."""
    assert size(*QUESTION, "--emit", str(tmp_path)) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())["plan"]
    nodes = " ".join(f"n{i}" for i in range(1 + plan["hosts"]))
    stubs = {"scontrol": 'printf "%s\\n" $3', "fastdecode": 'printf "%s\\n" "$@"'}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    s_node, _, r_nodes = nodes.partition(" ")
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": s_node, "SLURM_JOB_NODELIST_HET_GROUP_1": r_nodes}
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sbatch"), "in put.jsonl", "out.jsonl"],
        env={**os.environ, **groups, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.splitlines()
    hosts = dict(part.split(":") for part in words[words.index("--hosts") + 1].split(","))
    assert hosts.pop("n0") == "0"
    assert len(hosts) == plan["hosts"] and sum(map(int, hosts.values())) == plan["sockets"]
    assert words[words.index("--input") + 1] == "in put.jsonl"


def test_emitted_names_are_quoted(tmp_path: Path) -> None:
    assert size("--model", "Llama-2 7B", *QUESTION[2:], "--emit", str(tmp_path)) == 0
    assert "--model 'Llama-2 7B'" in (tmp_path / "run.sh").read_text()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    assert size(*QUESTION, "--plot", str(path), "--tpot", "0.5") == 0
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in path.read_bytes()
    if suffix == "svg":
        text = path.read_text()
        assert all(
            f"<!-- {part} -->" in text for part in ("tokens/s", "R-part binds", "S-part binds")
        )


def test_times_may_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for tpot, latency in (("0.2", "300"), ("200ms", "300s"), ("2e5us", "3e5 ms")):
        assert size(*QUESTION, "--tpot", tpot, "--latency", latency) in (0, 1)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] == told[2]
    with pytest.raises(SystemExit):
        size(*QUESTION, "--tpot", "5 parsecs")
    assert "is no time: give seconds, or like 5ms" in capsys.readouterr().err


def test_plot_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size(*QUESTION, "--plot", str(tmp_path / "plot.doc")) == 2
    told = capsys.readouterr()
    assert ".png, .svg or .pdf" in told.err
    assert not told.out  # before anything is planned
    pytest.importorskip("matplotlib")
    assert size(*QUESTION, "--plot", str(tmp_path / "no" / "plot.png")) == 2
    assert "can't write" in capsys.readouterr().err


def test_quantised_weights(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--model", "Qwen/Qwen3-32B-FP8", "--gpu", "H200", "--cpu", "EPYC 9654",
                "--seq-len", "1024", "--batch", "64", "--lanes", "2")  # fmt: skip
    assert size(*question) == 0
    text = capsys.readouterr().out
    assert "weights take 65.5 GB: FP8 in blocks of 128x128 on disk, 34.3 GB; decoded to" in text
    assert max(map(len, text.splitlines())) <= 110
    assert size(*question, "--weights", "kept", "--json") in (0, 1)
    asked = json.loads(capsys.readouterr().out)["question"]
    assert asked["quantised"] == "FP8 in blocks of 128x128" and asked["keeps_quantised"] is True
