"""What a checkpoint's config says of quantised weights.

Weights are decoded while they are loaded, from whatever tensors have scales. So the config decides
little: sizes of blocks that shapes leave open, how GPTQ and AWQ pack, and which formats are
refused. ``size`` reads from it what a weight takes on disk."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader

MAX_BLOCK = 1 << 20

_CONFIGS = ("quantization_config", "compression_config", "quantization")
_UNQUANTISED = (
    "Use the checkpoint in bfloat16 that it was made from, or one in FP8, MXFP4, NVFP4, "
    "compressed-tensors int4, AWQ or GPTQ"
)
_REASONS = {
    "bitsandbytes": "its codes index a table of nested scales, which isn't decoded",
    "hqq": "it stores its own objects",
    "aqlm": "its weights are sums of codebook vectors",
    "vptq": "its weights are codebook vectors",
    "quip": "its weights are codebook vectors in a rotated basis",
    "higgs": "its weights lie in a rotated basis",
    "spqr": "its outliers lie apart",
    "bitnet": "its layers scale their activations",
    "exl2": "its rows have different widths",
    "exl3": "its weights are paths in a trellis",
    "torchao": "it stores Python objects",
    "quanto": "it stores Python objects",
}
"""Why these can't be decoded by the one formula; ``read_quantisation`` names
all others just as unknown."""
_HARMLESS = frozenset((
    # Which modules are quantised: those that have scales.
    "modules_to_not_convert", "modules_to_convert", "quant_lm_head", "ignored_layers", "ignore",
    "targets", "exclude_modules", "lm_head", "quantize_lm_head", "modules_in_block_to_quantize",
    "block_name_to_quantize", "to_quant_block_names", "quant_block_list",
    "quant_nontext_module", "module_name_preceding_first_block", "config_groups",
    # How the codes were found.
    "dataset", "tokenizer", "batch_size", "pad_token_id", "max_input_length", "model_seqlen",
    "seqlen", "nsamples", "iters", "lr", "minmax_lr", "lr_scheduler", "momentum", "seed", "amp",
    "gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_quanted_input",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_torch_compile", "enable_alg_ext",
    "not_use_best_mse", "dynamic_max_gap", "model_free", "damp_percent", "damp_auto_increment",
    "desc_act", "static_groups", "true_sequential", "act_group_aware", "mse", "hyb_act", "v2",
    "cache_block_outputs", "failsafe", "offload_to_disk", "offload_to_disk_path", "pack_impl",
    "observer", "observer_kwargs", "actorder", "nblocks", "sampler",
    # Who wrote it, and what another library computes with.
    "quant_method", "method", "meta", "producer", "provider", "version", "autoround_version",
    "quantization_status", "global_compression_ratio", "model_name_or_path",
    "model_file_base_name", "backend", "use_exllama", "disable_exllama", "exllama_config",
    "use_cuda_fp16", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "dequantize",
    "run_compressed", "use_optimized_inference",
    # Activations and KV, which are not quantised here.
    "activation_scheme", "activation_scale_ub", "input_activations", "output_activations",
    "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type", "act_per_tensor",
    "kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype", "static_kv_dtype",
    # What tensors say themselves: dtypes and shapes of scales, zero points that are stored.
    "scale_fmt", "scale_dtype", "zp_dtype", "weight_per_tensor", "group_size", "zero_point",
    "symmetric", "sym", "strategy", "moe_quant_algo",
))  # fmt: skip
"""Keys that change no weight, with those that a method reads; all others are refused by name."""


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a checkpoint are quantised."""

    name: str
    """For messages, e.g. ``FP8``, ``compressed-tensors INT4``."""
    bits: int  # bits of a code
    block: tuple[int, int] | None = None
    """Output and input dims that share a scale, where shapes don't tell."""
    scale_bits: float = 0.0  # bits of scales and zero points that a weight has on average
    packing: str | None = None  # format of ``.qweight`` tensors: AWQ or GPTQ
    zero_offset: int | None = 0
    """Added to GPTQ's stored zero points. None if the codes are symmetric, and zero is the
    middle of their range."""
    skipped: tuple[str, ...] = ()
    """Patterns of modules that aren't quantised; only ``covers`` obeys them."""
    only: tuple[str, ...] = ()  # patterns of the modules that are quantised, if not all
    layers: Mapping[str, Quantisation] = field(default_factory=dict, hash=False)
    """Of modules that are quantised in another way, by name."""

    @property
    def bytes_per_weight(self) -> float:
        """On disk, scales included."""
        return (self.bits + self.scale_bits) / 8

    def covers(self, module: str) -> bool:
        """Whether a module's weight is quantised, by its name in the checkpoint
        (``model.layers.0.mlp.experts.0.up_proj``)."""
        if any(_matches(pattern, module) for pattern in self.skipped):
            return False
        return not self.only or any(_matches(pattern, module) for pattern in self.only)

    def module_bytes(self, module: str, unquantised: float) -> float:
        """Bytes that a weight of this module takes on disk."""
        for pattern, own in self.layers.items():
            if _matches(pattern, module) or module.startswith(f"{pattern}."):
                return own.bytes_per_weight
        return self.bytes_per_weight if self.bits and self.covers(module) else unquantised


def read_quantisation(
    config: Mapping[str, object],
    name: str,
    hf_quant_config: Mapping[str, object] | None = None,
) -> Quantisation | None:
    """What ``config.json``, or else ``hf_quant_config.json`` (in which modelopt
    may say it alone), says of quantised weights; None: nothing.

    Args:
        name: the model's directory or name, for messages.

    Raises:
        UnsupportedModelError: the format isn't one that is decoded; names it,
            the reason, and what to use.
        CheckpointError: a field makes no sense.
    """
    reader = _find(ConfigReader(config, f"{name}/config.json"))
    if reader is None and hf_quant_config:
        outer = ConfigReader(hf_quant_config, f"{name}/hf_quant_config.json")
        reader = outer.mapping("quantization") or outer
    if reader is None or not reader.fields:
        return None
    method = _method(reader)
    read = _METHODS.get(method)
    if read is None:
        why = _REASONS.get(method, "nothing is known of it")
        raise refuse_format(reader, method, why)
    found = read(reader)
    _refuse_unknown_keys(reader)
    return found


def _refuse_unknown_keys(reader: ConfigReader) -> None:
    if unknown := reader.unknown(_HARMLESS):
        why = "the key isn't known, and leaving it out could give wrong weights"
        raise refuse_format(reader, f"with {unknown[0]}", why)


def refuse_format(reader: ConfigReader, what: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{reader.where}: weights quantised as {what!r} can't be decoded: {why}. {_UNQUANTISED}."
    )


def _find(reader: ConfigReader) -> ConfigReader | None:
    found = reader.mapping(*_CONFIGS)
    if found is None and (text := reader.mapping("text_config", "llm_config")) is not None:
        found = text.mapping(*_CONFIGS)
    return found


def _method(reader: ConfigReader) -> str:
    """``quant_method`` in lower case, or what stands for it in older files."""
    if reader.fields.get("quant_method"):
        return reader.string("quant_method").lower().replace("_", "-").removeprefix("intel/")
    if reader.fields.get("quant_algo"):
        return "modelopt"
    if reader.fields.get("config_groups"):
        return "compressed-tensors"
    if reader.fields.get("load_in_4bit") or reader.fields.get("load_in_8bit"):
        return "bitsandbytes"
    raise reader.refuse("quant_method", None, "the name of a way to quantise")


def _matches(pattern: str, module: str) -> bool:
    """As modelopt (shell patterns), transformers (parts of names) and
    compressed-tensors (``re:`` and regular expressions) write them."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."


# --- FP8, MXFP4
# -----------------------------------------------------------------------------


def _fp8(reader: ConfigReader) -> Quantisation:
    kind = reader.string("fmt", default="e4m3")
    if "e4m3" not in kind or "fnuz" in kind:
        raise refuse_format(reader, f"fp8 {kind}", "only e4m3 codes without fnuz are decoded")
    block = _block(reader, "weight_block_size")
    skipped = reader.strings("modules_to_not_convert") or reader.strings("ignored_layers")
    fp8 = Quantisation("FP8", 8, block, skipped=skipped)
    if block is not None:
        fp8 = replace(fp8, name=f"FP8 in blocks of {block[0]}x{block[1]}")
    own, others = _quantised_layers(reader), reader.strings("ignore")
    return replace(fp8, layers=own, skipped=skipped + others) if own else fp8


def _mxfp4(reader: ConfigReader) -> Quantisation:
    skipped = reader.strings("modules_to_not_convert")
    return Quantisation("MXFP4", 4, (1, 32), 8 / 32, skipped=skipped)


def _block(reader: ConfigReader, name: str) -> tuple[int, int] | None:
    _, value = reader.find(name)
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        rows, columns = value
        if all(type(dim) is int and 1 <= dim <= MAX_BLOCK for dim in value):
            return rows, columns
    raise reader.refuse(name, value, f"two whole numbers from 1 to {MAX_BLOCK}")


# --- modelopt
# -----------------------------------------------------------------------------

_ALGORITHMS = {
    "FP8": Quantisation("FP8", 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantisation("FP8 per channel", 8),
    "FP8_PB_WO": Quantisation("FP8 in blocks of 128x128", 8, (128, 128)),
    "NVFP4": Quantisation("NVFP4", 4, (1, 16), 8 / 16),
    "W4A16_NVFP4": Quantisation("NVFP4", 4, (1, 16), 8 / 16),
    "MXFP4": Quantisation("MXFP4", 4, (1, 32), 8 / 32),
    "W4A8_MXFP4_FP8": Quantisation("MXFP4", 4, (1, 32), 8 / 32),
    "MXFP8": Quantisation("MXFP8", 8, (1, 32), 8 / 32),
}


def _modelopt(reader: ConfigReader) -> Quantisation:
    skipped = reader.strings("exclude_modules") + reader.strings("ignore")
    algorithm = reader.string("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = _quantised_layers(reader)
        names = " and ".join(sorted({own.name for own in layers.values()})) or "nothing"
        return Quantisation(f"{names} by layer", 0, skipped=skipped, layers=layers)
    return replace(_algorithm(reader, algorithm), skipped=skipped)


def _quantised_layers(reader: ConfigReader) -> dict[str, Quantisation]:
    listed = reader.mapping("quantized_layers")
    found: dict[str, Quantisation] = {}
    for module in listed.fields if listed else ():
        assert listed is not None
        own = listed.mapping(module)
        if own is not None:
            found[module] = _algorithm(own, own.string("quant_algo"))
            _refuse_unknown_keys(own)
    return found


def _algorithm(reader: ConfigReader, algorithm: str) -> Quantisation:
    known = _ALGORITHMS.get(algorithm.upper())
    if known is None:
        why = (
            "its activations are scaled before they are multiplied"
            if "AWQ" in algorithm or "SQ" in algorithm
            else "nothing is known of it"
        )
        raise refuse_format(reader, f"modelopt {algorithm}", why)
    return known


# --- compressed-tensors
# -----------------------------------------------------------------------------

_STORED = {
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
}  # fmt: skip
_PACKED_BITS = (2, 4, 8)


def _compressed_tensors(reader: ConfigReader) -> Quantisation:
    default = reader.string("format", default="dense")
    sparsity = reader.mapping("sparsity_config")
    if sparsity is not None and sparsity.string("format", default="dense") != "dense":
        kind = sparsity.string("format")
        why = "zeros are left out of the stored weights"
        raise refuse_format(reader, f"compressed-tensors with sparsity {kind}", why)
    _refuse_running_transforms(reader)
    groups = reader.mapping("config_groups")
    found: list[Quantisation] = []
    for key in groups.fields if groups else ():
        assert groups is not None
        group = groups.mapping(key)
        if group is not None and (args := group.mapping("weights")) is not None:
            stored = group.string("format", default=default)
            targets = group.strings("targets")
            only = tuple(t for t in targets if t != "Linear" and not t.isidentifier())
            found.append(replace(_arguments(args, stored), only=only))
    skipped = reader.strings("ignore")
    if not found:
        raise refuse_format(reader, f"compressed-tensors {default}", "it names no weights")
    if len(found) == 1:
        return replace(found[0], skipped=skipped)
    layers = {pattern: own for own in found for pattern in own.only}
    names = " and ".join(sorted({own.name for own in found}))
    rest = next((own for own in found if not own.only), Quantisation("", 0))
    return replace(rest, name=names, skipped=skipped, layers=layers)


def _refuse_running_transforms(reader: ConfigReader) -> None:
    """Take transforms that are part of the stored weights, and refuse those of activations."""
    outer = reader.mapping("transform_config")
    schemes = None if outer is None else outer.mapping("config_groups")
    for name in schemes.fields if schemes else ():
        assert schemes is not None
        scheme = schemes.mapping(name)
        _, applied = (None, None) if scheme is None else scheme.find("apply")
        for each in applied if isinstance(applied, Sequence) else ():
            place = each.get("location") if isinstance(each, Mapping) else each
            if place not in ("weight_input", "weight_output"):
                what = f"compressed-tensors with the transform {name!r} at {place!r}"
                raise refuse_format(reader, what, "activations are transformed while it runs")
    if outer is not None and (unknown := outer.unknown()):
        what = f"compressed-tensors with transform_config {unknown[0]!r}"
        raise refuse_format(reader, what, "nothing is known of it")


def _arguments(args: ConfigReader, stored: str) -> Quantisation:
    bits = args.integer("num_bits", high=16, default=8)
    kind = args.string("type", default="int")
    group = args.optional_integer("group_size", low=-1, high=MAX_BLOCK)
    block = _block(args, "block_structure")
    args.find("dynamic")  # of weights, such ones would have no scales
    _refuse_unknown_keys(args)
    if stored not in _STORED:
        raise refuse_format(args, f"compressed-tensors {stored}", "its codes are packed otherwise")
    if block is None and group is not None and group > 0:
        block = (1, group)
    if kind == "float" and (bits, group) in ((4, 16), (4, 32), (8, 32)):
        name = {(4, 16): "NVFP4", (4, 32): "MXFP4", (8, 32): "MXFP8"}[bits, group or 0]
        return Quantisation(name, bits, block, 8 / (group or 1))
    if kind == "float" and bits == 8:
        name = "FP8" if block is None else f"FP8 in blocks of {block[0]}x{block[1]}"
        return Quantisation(name, 8, block)
    if kind == "int" and bits in _PACKED_BITS:
        return Quantisation(f"INT{bits}", bits, block, 16 / block[1] if block else 0.0)
    raise refuse_format(
        args, f"compressed-tensors {kind}{bits}", f"{bits} bits of type {kind} aren't decoded"
    )


# --- AWQ, GPTQ
# -----------------------------------------------------------------------------


def _awq(reader: ConfigReader) -> Quantisation:
    version = reader.string("version", "format", "checkpoint_format", default="gemm").lower()
    if version != "gemm":
        raise refuse_format(reader, f"awq {version}", "only what is packed for gemm is decoded")
    return _packed_as_awq(reader)


def _packed_as_awq(reader: ConfigReader) -> Quantisation:
    bits = reader.integer("bits", "w_bit", high=16, default=4)
    if bits != 4:
        raise refuse_format(reader, f"awq {bits} bits", "only 4 bits are decoded")
    _check_codes(reader, "awq", bits)
    group = _group(reader, "group_size", "q_group_size")
    skipped = reader.strings("modules_to_not_convert")
    return Quantisation("AWQ", 4, (1, group), 20 / group, packing="AWQ", skipped=skipped)


def _gptq(reader: ConfigReader) -> Quantisation:
    if reader.find("packing_format")[1] is not None:
        return _auto_round(reader)
    kind = reader.string("checkpoint_format", "format", default="gptq").lower()
    if reader.flag("is_marlin_format", False):
        kind = "marlin"
    if kind not in ("gptq", "gptq_v2"):
        why = "only the layouts gptq and gptq_v2 are decoded"
        raise refuse_format(reader, f"gptq {kind}", why)
    return _packed_as_gptq(reader, offset=int(kind == "gptq"))


def _packed_as_gptq(reader: ConfigReader, *, offset: int) -> Quantisation:
    """Return AutoGPTQ's layout.

    Args:
        offset: Added to stored zero points, unless the codes are symmetric.
    """
    bits = reader.integer("bits", high=16, default=4)
    if bits not in _PACKED_BITS:
        raise refuse_format(reader, f"gptq {bits} bits", "only 2, 4 and 8 bits are decoded")
    _check_codes(reader, "gptq", bits)
    group = _group(reader, "group_size")
    zero_offset = None if reader.flag("sym", False) else offset
    return Quantisation("GPTQ", bits, (1, group), (16 + bits) / group, "GPTQ", zero_offset)


def _auto_round(reader: ConfigReader) -> Quantisation:
    packing = reader.string("packing_format", "backend", default="auto_round:auto_gptq").lower()
    if "awq" in packing:
        return _packed_as_awq(reader)
    if "gptq" in packing and "gptqmodel" not in packing:
        return _packed_as_gptq(reader, offset=1)
    if packing.removeprefix("auto_round:") in _TRUE_ZEROS:
        return _packed_as_gptq(reader, offset=0)
    why = "only its packings of whole numbers are decoded"
    raise refuse_format(reader, f"auto-round {packing}", why)


def _check_codes(reader: ConfigReader, method: str, bits: int) -> None:
    """Refuse codes other than whole numbers in words of 32 bits, and modules of other bits.
    Modules may be left out, or have groups of another size."""
    kind = reader.string("data_type", default="int")
    words = reader.string("pack_dtype", default="int32").removeprefix("torch.")
    if kind != "int" or words != "int32":
        why = "only whole numbers in int32 are decoded"
        raise refuse_format(reader, f"{method} of {kind} in {words}", why)
    symmetric = reader.flag("sym", False)
    for name in ("dynamic", "extra_config"):
        modules = reader.mapping(name)
        for pattern in modules.fields if modules else ():
            assert modules is not None
            own = None if pattern.startswith("-:") else modules.mapping(pattern)
            num = bits if own is None else own.integer("bits", low=0, high=64, default=bits)
            if own is None or num >= 16:
                continue
            if num != bits or own.flag("sym", symmetric) != symmetric:
                what = f"{method} {bits} bits with other codes in {name!r} for {pattern!r}"
                raise refuse_format(reader, what, "all modules must have codes of one kind")


_TRUE_ZEROS = ("auto_round", "gptqmodel", "exllamav2", "triton", "tritonv2", "triton_zp")
"""AutoRound's packings in GPTQ's layout whose stored zero points need nothing added."""


def _group(reader: ConfigReader, *names: str) -> int:
    """Inputs that share a scale; −1, all of them, is the largest block."""
    group = reader.integer(*names, low=-1, high=MAX_BLOCK, default=128)
    return group if group > 0 else MAX_BLOCK


_METHODS = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "modelopt-mixed": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
}
