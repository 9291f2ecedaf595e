"""Loading: every way in which a checkpoint can be laid out, and every way in
which it can be broken."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FAMILIES, oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from examples import examples
from fastdecode.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    UnsupportedModelError,
)
from fastdecode.core.model.checkpoint import open_checkpoint
from sworker.load.weights import load_model

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(
        load_model(path, device="cpu", **{"dtype": torch.float32, **options})[1].named_parameters()
    )


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def copy_with(
    source: Path, target: Path, change: Callable[[Tensors], Tensors | None] | None = None
) -> Path:
    """A copy of a single-file checkpoint with changed tensors."""
    shutil.copytree(source, target)
    if change is not None:
        tensors = load_file(target / "model.safetensors")
        save_file(change(tensors) or tensors, target / "model.safetensors")
    return target


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint("llama")


# --- what must load
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_counts(family: str, tiny_checkpoint: Make) -> None:
    spec, model = load_model(tiny_checkpoint(family), device="cpu", dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert spec.num_parameters == count == oracle(tiny_checkpoint(family)).model.num_parameters()
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters())  # type: ignore[attr-defined]
    assert layer == spec.num_layer_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_bare_models_without_a_prefix(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    """Checkpoints of the model without its language-model class lack the outermost prefix."""
    source = tiny_checkpoint(family)

    def strip(tensors: Tensors) -> Tensors:
        prefix = (
            next(name for name in tensors if not name.startswith(("lm_head", "embed_out"))).split(
                "."
            )[0]
            + "."
        )
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    assert_same(load(copy_with(source, tmp_path / "bare", strip)), load(source))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_shards(family: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    source = tiny_checkpoint(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), load(source))
    assert open_checkpoint(tmp_path).spec().num_layers == 3


@pytest.mark.parametrize(
    ("family", "config", "extras"),
    [
        ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
        ("gpt2", {}, {"transformer.h.1.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
                      "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("gpt_neox", {}, {"gpt_neox.layers.2.attention.bias":
                              torch.ones(1, 1, 8, 8, dtype=torch.uint8),
                          "gpt_neox.layers.2.attention.masked_bias": torch.tensor(-1e9),
                          "gpt_neox.layers.2.attention.rotary_emb.inv_freq": torch.ones(3)}),
    ],
)  # fmt: skip
def test_harmless_extras(
    family: str, config: dict[str, Any], extras: Tensors, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, **config)
    extended = copy_with(source, tmp_path / "extended", lambda tensors: {**tensors, **extras})
    assert_same(load(extended), load(source))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(saved: torch.dtype, wanted: torch.dtype, llama: Path, tmp_path: Path) -> None:
    converted = copy_with(
        llama, tmp_path / "x", lambda tensors: {n: t.to(saved) for n, t in tensors.items()}
    )
    expected = {name: tensor.to(saved).to(wanted) for name, tensor in load(llama).items()}
    assert_same(load(converted, dtype=wanted), expected)


def test_dtype_of_the_checkpoint_is_the_default(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "x")
    edit_config(copy, dtype="bfloat16")
    assert all(tensor.dtype == torch.bfloat16 for tensor in load(copy, dtype=None).values())


def test_progress_ends_at_the_total(llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(llama, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    total = 4 * open_checkpoint(llama).spec().num_parameters
    assert done == sorted(done)
    assert calls[-1] == (total, total)


def test_generation_config_has_precedence(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "x")
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert open_checkpoint(copy).spec().eos_token_ids == (5, 6)


def test_model_hash(llama: Path, tiny_checkpoint: Make, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    assert len(open_checkpoint(llama).model_hash) == 64
    assert open_checkpoint(copy).model_hash == open_checkpoint(llama).model_hash, (
        "it isn't a matter of the place"
    )
    edit_config(copy, rope_theta=1e6)
    assert open_checkpoint(copy).model_hash != open_checkpoint(llama).model_hash
    half = copy_with(
        llama, tmp_path / "b", lambda tensors: {n: t.half() for n, t in tensors.items()}
    )
    assert open_checkpoint(half).model_hash != open_checkpoint(llama).model_hash
    assert open_checkpoint(tiny_checkpoint("qwen2")).model_hash != open_checkpoint(llama).model_hash


# --- what must be refused
# ------------------------------------------------------------------------------


def refused(path: Path, match: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=match):
        load(path)


def test_missing_tensors(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    refused(
        copy_with(llama, tmp_path / "a", lambda t: {n: x for n, x in t.items() if n != name}),
        rf"lacks .*'{name}'",
    )
    refused(
        copy_with(llama, tmp_path / "b", lambda t: {n: x for n, x in t.items() if "mlp" not in n}),
        r"9 tensors .*\.\.\.",
    )
    refused(
        copy_with(
            llama, tmp_path / "c", lambda t: {n: x for n, x in t.items() if "lm_head" not in n}
        ),
        "lm_head",
    )
    refused(
        copy_with(
            llama, tmp_path / "d", lambda t: {n: x for n, x in t.items() if "embed" not in n}
        ),
        "token embedding",
    )


def test_unexpected_tensors(llama: Path, tmp_path: Path) -> None:
    def add(name: str) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {**tensors, name: torch.ones(2)}

    refused(
        copy_with(llama, tmp_path / "a", add("model.layers.0.self_attn.q_proj.bias")),
        r"q_proj\.bias.*no place",
    )
    refused(
        copy_with(llama, tmp_path / "b", add("model.layers.3.mlp.up_proj.weight")), r"layers\.3"
    )
    refused(copy_with(llama, tmp_path / "c", add("v_head.weight")), "v_head")


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
    quantised = copy_with(
        llama, tmp_path / "a", lambda t: {n: x.to(torch.int8) for n, x in t.items()}
    )
    refused(quantised, "dtype I8")


def test_unsupported_configs(llama: Path, tmp_path: Path) -> None:
    copy = copy_with(llama, tmp_path / "a")
    edit_config(copy, auto_map={"AutoConfig": "x.Y"})
    refused(copy, "auto_map", UnsupportedModelError)
    edit_config(copy, auto_map=None, architectures=["XForCausalLM"])
    refused(copy, "XForCausalLM", UnsupportedModelError)


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


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": ' * 5000, "\xff"])
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
    "shard",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "x.bin",
        3,
        "..\\x.safetensors",
    ],
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


def test_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from fastdecode.core.errors import MissingExtraError
from fastdecode.core.install import pip_command
try:
    import sworker.load.weights
except MissingExtraError as error:
    assert pip_command("sworker") in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_does_not_load_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, sworker; assert 'torch' not in sys.modules"], check=True
    )
