"""Config keys that change a result: each row reads every key that transformers' code for the
same family reads, but for those listed here with a reason."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from families import FAMILIES, config_of

from fastdecode.core.errors import FastDecodeError, UnsupportedModelError
from fastdecode.core.model import config_reader
from fastdecode.core.model.families import ROWS, read_model_spec
from fastdecode.core.model.rows import Row

NOT_READ = {
    "training": (
        "attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embedding_dropout",
        "hidden_dropout", "initializer_range", "layerdrop", "output_router_logits",
        "resid_pdrop", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise",
    ),
    "what transformers returns, and how it computes the same": (
        "_attn_implementation", "_is_quantized", "enable_moe_fp32_combine", "num_labels",
        "output_attentions", "output_hidden_states", "pretraining_tp", "reorder_and_upcast_attn",
        "return_dict", "slow_but_exact", "use_cache", "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    ),
    "embeddings of padding, which no prompt has": ("pad_token_id",),
    "other heads than a language model's": (
        "summary_activation", "summary_first_dropout", "summary_last_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    "images and video": (
        "get_text_config", "image_token_id", "layer_scale_init_value", "mm_tokens_per_image",
        "num_channels", "patch_size", "projector_bias", "video_token_id", "vision_config",
    ),
}  # fmt: skip
NOT_READ_BY = {
    "falcon": {"head_dim": "the heads divide the hidden size, or transformers refuses it"},
    "gpt_neox": {"head_dim": "the heads divide the hidden size in all of its other code"},
    "llama4_text": {
        "attn_scale": "queries are scaled beyond floor_scale tokens, more than are served",
        "attn_temperature_tuning": "as attn_scale",
    },
    "olmoe": {"sliding_window": "no mask is made for it: only some kernels are passed it"},
    "step3p5": {
        "gating": "its config class has the constant True",
        "hidden_act": "its config class sets silu, whatever the file says",
        "per_layer_config": "how transformers reads heads by layer, which is read",
    },
}
KEYS_NOT_READ = {"mrope_section": "sections are the same for text"}
"""Keys of rotary embeddings: accepted, and refused in families that don't have them."""


@cache
def reads_of_ours(family: str) -> frozenset[str]:
    seen: set[str] = set()

    class Recorded(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            seen.add(str(key))
            return super().__contains__(key)

    class Reader(config_reader.ConfigReader):
        def __init__(self, fields: Any, where: str) -> None:
            super().__init__(Recorded(fields), where)

        def find(self, *names: str) -> tuple[str, object]:
            seen.update(names)
            return super().find(*names)

    names = [name for name in sys.modules if name.startswith("fastdecode.core.model.")]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if hasattr(sys.modules[name], "ConfigReader"):
                patch.setattr(sys.modules[name], "ConfigReader", Reader)
        for config in variants(row_of(family)):
            try:
                read_model_spec(config, name="demo")
            except FastDecodeError:
                continue  # a config class's own defaults may make no model
    return frozenset(seen)


def row_of(family: str) -> Row:
    return next(row for row in ROWS if row.family == family)


def variants(row: Row) -> Iterator[dict[str, Any]]:
    """Configs that lead through a row's branches."""
    whole = {"architectures": [row.architectures[0]]}
    for config in configs_of(row.family):
        text = config.get("text_config", config)
        changes: tuple[dict[str, Any], ...] = (
            {}, {"layer_types": None}, {"mlp_layer_types": None}, {"use_sliding_window": True},
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 9},
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        )  # fmt: skip
        for change in changes:
            changed = {**text, "model_type": row.family, **change}
            yield {**whole, "text_config": changed} if "text_config" in config else {
                **changed, **whole
            }  # fmt: skip


def configs_of(family: str) -> Iterator[dict[str, Any]]:
    config_class = transformers.CONFIG_MAPPING[family]
    yield json.loads(config_class().to_json_string(use_diff=False))
    for seed in range(6 if family in FAMILIES else 0):
        try:
            yield json.loads(config_of(family, seed))
        except Exception:
            continue  # transformers refuses some draws


@cache
def reads_of_theirs(family: str) -> tuple[set[str], set[str]]:
    """Fields of the config, and keys of objects such as ``rope_parameters``, that the
    language model's code names."""
    config_class = transformers.CONFIG_MAPPING[family]
    file = Path(str(sys.modules[config_class.__module__].__file__))
    tree = ast.parse((file.parent / file.name.replace("configuration", "modeling")).read_text())
    fields, keys = set(), set()
    others = ("Vision", "Classification", "Answering", "DoubleHeads")
    for part in tree.body:
        if isinstance(part, ast.ClassDef) and any(word in part.name for word in others):
            continue
        for node in ast.walk(part):
            match node:
                case ast.Attribute(value=owner, attr=name) if is_config(owner):
                    fields.add(name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[owner, ast.Constant(value=str(name)), *_],
                ) if is_config(owner):
                    fields.add(name)
                case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
                    if "rope_" in ast.unparse(owner):
                        keys.add(name)
                case ast.Call(
                    func=ast.Attribute(value=owner, attr="get"),
                    args=[ast.Constant(value=str(name)), *_],
                ) if "rope_" in ast.unparse(owner):
                    keys.add(name)
    return fields, keys


def is_config(node: ast.AST) -> bool:
    names = ("config", "text_config")
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
    return False


@pytest.mark.parametrize("family", [row.family for row in ROWS if row.family != "mimo"])
def test_row_reads_every_key_that_changes_the_result(family: str) -> None:
    """MiMo's code comes with its checkpoints; transformers has none."""
    fields, keys = reads_of_theirs(family)
    assert "num_attention_heads" in fields or "n_head" in fields or "n_heads" in fields
    aliases = getattr(transformers.CONFIG_MAPPING[family], "attribute_map", {})
    same = {*aliases.items(), *((b, a) for a, b in aliases.items())}
    ours = reads_of_ours(family)
    known = {*ours, *(b for a, b in same if a in ours)}
    known |= {name for names in NOT_READ.values() for name in names}
    known |= NOT_READ_BY.get(family, {}).keys() | KEYS_NOT_READ.keys()
    assert (fields | keys) - known == set()


def test_lists_of_keys_hold_only_what_rows_leave_out() -> None:
    left = {row.family: reads_of_theirs(row.family)[0] - reads_of_ours(row.family)
            for row in ROWS if row.family != "mimo"}  # fmt: skip
    everywhere = set().union(*left.values())
    assert {name for names in NOT_READ.values() for name in names} <= everywhere
    assert all(keys.keys() <= left[family] for family, keys in NOT_READ_BY.items())


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "scaling", "key"),
    [
        ("LlamaForCausalLM", {"type": "dynamic", "factor": 2.0, "alpha": 4.0}, "alpha"),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 2.0, "attn_factor": 0.5}, "attn_factor"),
        ("LlamaForCausalLM", {"rope_type": "default", "llama_4_scaling_beta": 0.1},
         "llama_4_scaling_beta"),
        ("LlamaForCausalLM", {"rope_type": "default", "mrope_section": [8, 4, 4]},
         "mrope_section"),
        ("LlamaForCausalLM", {"rope_type": "default", "rope_thta": 1e6}, "rope_thta"),
        ("LlamaForCausalLM", {"full_attention": {"rope_type": "default", "scale": 2}}, "scale"),
        ("LlamaForCausalLM", {"full_attention": {}, "linear_attention": {"rope_theta": 9.0}},
         "linear_attention"),
        ("HunYuanDenseV1ForCausalLM", {"type": "dynamic", "alpha": 4.0, "beta": 1.0}, "beta"),
    ],
)  # fmt: skip
def test_rope_scaling_refuses_unknown_key(
    architecture: str, scaling: dict[str, Any], key: str
) -> None:
    config = {**LLAMA, "architectures": [architecture], "max_position_embeddings": 64}
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModelError, match=f"{key!r} isn't known"):
            read_model_spec({**config, name: scaling}, name="demo")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 2.0, "finetuned": True, "type": "yarn"},
        {"rope_type": "linear", "factor": 2.0, "alpha": None, "mscale": 1.0, "offset": False},
    ],
)
def test_rope_scaling_takes_keys_that_change_nothing(scaling: dict[str, Any]) -> None:
    spec = read_model_spec({**LLAMA, "max_position_embeddings": 64, "rope_scaling": scaling},
                           name="demo")  # fmt: skip
    assert spec.max_model_len == 128


def test_mellum_divides_where_the_key_is_missing() -> None:
    config = {**LLAMA, "architectures": ["MellumForCausalLM"], "max_position_embeddings": 64}
    for given, divides in (({}, True), ({"norm_topk_prob": False}, False)):
        moe = read_model_spec({**config, **given}, name="demo").moe
        assert moe is not None
        assert moe.router.renorm is divides
