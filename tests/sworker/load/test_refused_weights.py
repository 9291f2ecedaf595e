"""Loading: every way in which a checkpoint can be broken."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import copy_with, edit_config, load

from examples import examples
from fastdecode.core.errors import CapacityError, CheckpointError, ConfigError
from sworker.load.weights import load_model


def refused(path: Path, match: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=match):
        load(path)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("layers.1.self_attn.k_proj", r"lacks .*'model\.layers\.1\.self_attn\.k_proj\.weight'"),
        ("mlp", r"9 tensors .*\.\.\."),
        ("lm_head", "lm_head"),
        ("embed", "token embedding"),
    ],
)
def test_missing_tensors(part: str, match: str, llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a", lambda t: {n: x for n, x in t.items() if part not in n})
    refused(copy, match)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.layers.0.self_attn.q_proj.bias", r"q_proj\.bias.*no place"),
        ("model.layers.3.mlp.up_proj.weight", r"layers\.3"),
        ("v_head.weight", "v_head"),
    ],
)
def test_unexpected_tensors(name: str, match: str, llama: Path, tmp_path: Path) -> None:
    refused(copy_with(llama, tmp_path / "a", lambda t: {**t, name: torch.ones(2)}), match)


def test_misshaped_tensors(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    edit_config(copy, intermediate_size=81)
    refused(copy, r"shape \[.*80.*\].*calls for \[.*81.*\]")
    transposed = copy_with(
        llama,
        tmp_path / "b",
        lambda t: {n: x.T.contiguous() if "o_proj" in n else x for n, x in t.items()},
    )
    refused(transposed, r"o_proj.*\[72, 48\].*\[48, 72\]")


def test_integer_weights(llama: Path, tmp_path: Path) -> None:
    whole = copy_with(llama, tmp_path / "a", lambda t: {n: x.char() for n, x in t.items()})
    refused(whole, "dtype I8")


def test_code_of_a_checkpoint_is_never_run_and_said_once(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copy_with(llama, tmp_path / "a")
    edit_config(copy, auto_map={"AutoConfig": "x.Y"})
    spec, _ = load_model(copy, device="cpu")
    assert spec.family == "llama"
    (record,) = caplog.records
    assert "'auto_map'" in record.message
    assert "never run" in record.message


def test_pickled_weights(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, r"pickled.*save_pretrained")


def test_missing_files(llama: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "not a directory.*never downloaded")
    refused(llama / "config.json", "not a directory")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"no config\.json")
    copy = copy_with(llama, tmp_path / "a")
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    refused(copy, r"neither model\.safetensors nor .*weights\.safetensors")


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ' * 5000, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(name: str, text: str, llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    (copy / name).write_text(text, encoding="latin-1")
    refused(copy, rf"{name}.*JSON")


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1000, -1])
def test_truncated_weights(size: int, llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    refused(copy, "not a whole safetensors file")
    file.write_bytes(data + b"\0")
    refused(copy, "not a whole safetensors file")


def test_lfs_pointer(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    (copy / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    refused(copy, "git lfs pull")


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    changed = json.dumps(change(header) or header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 191]},
        {"dtype": "F32", "shape": [48], "data_offsets": [-192, 0]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 192]},  # overlaps
        {"dtype": "F32", "shape": [48], "data_offsets": [1 << 60, (1 << 60) + 192]},
        {"dtype": "F32", "shape": [-48], "data_offsets": [0, -192]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 1 << 126]},
        {"dtype": "F31", "shape": [48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": "48", "data_offsets": [0, 192]},
        {"dtype": "F32", "data_offsets": [0, 192]},
        None,
    ],
)
def test_lying_headers(entry: object, llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    rewrite_header(copy, lambda header: {**header, "model.norm.weight": entry})
    refused(copy, "not a whole safetensors file")


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(position=st.integers(0, 4000), byte=st.integers(0, 255))
def test_any_damage_to_a_header_is_noticed_or_harmless(
    position: int, byte: int, llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "a"
    if not copy.exists():
        copy_with(llama, copy)
    data = bytearray((llama / "model.safetensors").read_bytes())
    data[position] = byte
    (copy / "model.safetensors").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        load(copy)


@pytest.fixture
def sharded(llama: Path, tmp_path: Path) -> Path:
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(
        tmp_path / "s", max_shard_size="50KB"
    )
    return tmp_path / "s"


def edit_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/x.safetensors", "x.bin", 3, "..\\x.safetensors"]
)
def test_index_that_leaves_the_directory(shard: object, sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    refused(sharded, r"model\.norm\.weight.*not a \*\.safetensors file name within")


def test_index_that_does_not_fit(sharded: Path) -> None:
    names = sorted(file.name for file in sharded.glob("*.safetensors"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    elsewhere = next(name for name in names if name != index["model.norm.weight"])
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": elsewhere}))
    refused(sharded, rf"'model\.norm\.weight' is in {elsewhere}, which doesn't hold it")
    (sharded / names[0]).unlink()
    refused(sharded, rf"1 of {len(names)} shards .* missing: {names[0]}")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(weight_map: object, sharded: Path) -> None:
    edit_index(sharded, lambda index: index.update({"weight_map": weight_map}))
    refused(sharded, "weight_map")


def test_devices_and_dtypes_that_cannot_be_used(llama: Path) -> None:
    for device in ("abacus", "cuda:99"):
        with pytest.raises(ConfigError, match=device):
            load_model(llama, device=device)
    with pytest.raises(ConfigError, match="int8"):
        load_model(llama, device="cpu", dtype=torch.int8)


def test_out_of_memory_is_a_refusal(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def scarce(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.float32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(CapacityError, match="GiB"):
        load(llama)
