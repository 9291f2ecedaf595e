"""From a model directory to a model on a device.

Modules are built without storage. Then tensors stream from disk in their order there, one at a
time and decoded where they are quantised, straight to their place on the device. So the peak is
the model's own size and the largest tensor's, and every name and shape is checked before."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError, CheckpointError, ConfigError, Given
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.model.checkpoint import Checkpoint, is_zero, open_checkpoint
from fastdecode.core.model.config_reader import ConfigReader, text_part
from fastdecode.core.model.families import names_of
from fastdecode.core.model.names import CheckpointNames, Either, Layout, Names, PerExpert, Source
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import stage_spec
from fastdecode.core.model.tensor_entry import TensorEntry
from sworker.device import Gpu, gpu_of
from sworker.dtypes import torch_dtype
from sworker.load.key_scales import even_out_keys
from sworker.load.reader import PLAIN_DTYPES, TensorReader
from sworker.model.linear import Linear
from sworker.model.moe import Correction, ExpertLinear
from sworker.model.rope import QueryGrowth, RotaryTable
from sworker.model.skeleton import Model
from sworker.ranks.sharding import Shard, shard_spec

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes to read."""

_PREDICTS_AHEAD = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")
"""Fields that count layers which predict more than one token."""
_TARGET_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Loaded:
    """The part of a model that is loaded, with the places of the whole model's modules in it."""

    modules: frozenset[str]
    layers: range

    @classmethod
    def of(cls, model: Model, layers: range) -> _Loaded:
        return cls(frozenset(path for path, _ in model.named_modules()), layers)

    def find(self, path: str) -> str | None:
        """Return its path, or None if another stage has it."""
        if path.startswith("layers."):
            _, index, own = path.split(".", 2)
            if int(index) not in self.layers:
                return None
            path = f"layers.{self.layers.index(int(index))}.{own}"
        return path if path in self.modules else None


def load_model(
    model: Checkpoint | str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    kv_dtype: DType | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
    layers: range | None = None,
    with_embedding: bool = True,
    with_head: bool = True,
    gpu: Gpu | None = None,
) -> tuple[ModelSpec, Model]:
    """Read the weights of a Hugging Face model directory.

    Args:
        model: the directory, opened or not. Opened as ``random``: its weights are
            made on the device.
        dtype: of weights and activations: float32, float16 or bfloat16; None is
            the checkpoint's own.
        kv_dtype: of the KV cache. If it is quantised, keys beside large biases are evened out.
        max_model_len: see ``read_model_spec``.
        progress: called after every tensor with bytes read and bytes to read.
        shard: load this rank's part only; None: all.
        layers: load this stage's only, and read or miss no others; None: all.
        with_embedding: load what turns token ids to the first layer's input.
        with_head: load what turns the last layer's output to logits.
        gpu: driver of the device in place of its own.

    Returns:
        The whole model's spec, and the model (or its part) in inference mode:
        no parameter needs a gradient.

    Raises:
        UnsupportedModelError: the architecture, or a feature, isn't implemented.
        CheckpointError: files are missing, broken, or don't fit ``config.json``.
        ConfigError: ``max_model_len`` is out of range, the device or the dtype
            can't be used, or the model doesn't divide into so many shards.
        CapacityError: the device hasn't the memory.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    spec = checkpoint.spec(max_model_len=max_model_len)
    target = _check_device(device)
    kind = dtype or torch_dtype(spec.choose_dtype("auto"))
    if kind not in _TARGET_DTYPES:
        rule = f" is not one of {', '.join(map(str, _TARGET_DTYPES))}"
        raise ConfigError(Given("dtype", str(kind)), rule)
    own = spec if layers is None else stage_spec(spec, layers)
    part = own if shard is None else shard_spec(own, shard)
    with torch.device("meta"):
        loaded = Model(part, with_embedding=with_embedding, with_head=with_head)
        paths = _Loaded.of(loaded, range(spec.num_layers) if layers is None else layers)
        whole = Model(spec)
    held = range(0) if part.moe is None else part.moe.here
    placements = [] if checkpoint.is_random else _plan(checkpoint, spec, whole, paths, held)
    _allocate(loaded, target, kind)
    if checkpoint.is_random:
        _fill_randomly(loaded, whole, paths, shard)
    else:
        _stream(placements, spec, loaded, shard, progress, gpu or gpu_of(target))
    if kv_dtype is not None and not kv_dtype.is_float:
        even_out_keys(loaded, kv_dtype)
    return spec, loaded.eval()


def random_model(
    spec: ModelSpec, *, device: str | torch.device, dtype: torch.dtype, seed: int = 0
) -> Model:
    """A model with random weights, made where it will be: for measurements that
    need shapes and no sense. With the default seed it is the model that
    ``load_model`` makes of a checkpoint that ``is_random``.

    Raises:
        ConfigError, CapacityError: as ``load_model``.
    """
    target = _check_device(device)
    with torch.device("meta"):
        model, whole = Model(spec), Model(spec)
    _allocate(model, target, dtype)
    _fill_randomly(model, whole, _Loaded.of(model, range(spec.num_layers)), None, seed)
    return model.eval()


def _fill_randomly(
    model: Model, whole: Model, paths: _Loaded, shard: Shard | None, seed: int = 0
) -> None:
    """Draw every weight where it is. A matrix depends on the seed, its path in
    the whole model, dtype and kind of device alone: stages and shards hold parts
    of one model. Norms are neutral, biases zero.

    Args:
        paths: where a module of ``whole`` is in ``model``.
        shard: this rank's part of every weight; None: all.
    """
    for path, module in whole.named_modules():
        parameters = list(module.named_parameters(recurse=False))
        here = paths.find(path) if parameters else None
        if here is None:
            continue
        own = model.get_submodule(here)
        for name, unfilled in parameters:
            target = getattr(own, name)
            if name == "bias" or isinstance(own, Correction):
                target.zero_()
            elif unfilled.dim() == 1:
                target.fill_(1.0 - model.spec.norm_offset)
            elif isinstance(own, ExpertLinear):
                for number, expert in enumerate(target, own.first):
                    key, part = f"{seed} {path}.{name}.{number}", _shard_of(own, shard)
                    _draw(key, expert, own.splits, unfilled.shape[1:], model.spec, part)
            else:
                splits = own.splits if isinstance(own, Linear) else tuple(target.shape[:1])
                key = f"{seed} {path}.{name}"
                _draw(key, target, splits, unfilled.shape, model.spec, shard)


def _draw(
    key: str, target: Tensor, splits: Sequence[int], shape: torch.Size, spec: ModelSpec,
    shard: Shard | None,
) -> None:  # fmt: skip
    """Fill a matrix, or a shard's part of one of this shape, with what the key says."""
    drawn = target if shard is None else target.new_empty(shape)
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    generator = torch.Generator(target.device)
    generator.manual_seed(int.from_bytes(digest, "big"))
    drawn.normal_(0.0, drawn.shape[1] ** -0.5, generator=generator)
    if shard is not None:
        _place(target, splits, drawn, "rows", spec, shard)


@dataclass(frozen=True)
class _Part:
    """One of the checkpoint's modules that one of ours is made of."""

    source: Source
    index: int = 0  # which of the fused projections, counted from 0
    expert: int | None = None  # its expert, or None if all tokens use it


@dataclass(frozen=True)
class _Placement:
    """One tensor on disk and the rows of our parameter that it fills."""

    entry: TensorEntry
    module: str  # its path in the model
    parameter: str
    part: _Part
    num_sources: int  # fused projections that the parameter is made of
    layout: Layout
    order: tuple[int, ...] | None
    """Of a head's dims as we have them, where the checkpoint has another."""
    heads: _Heads | None  # if the checkpoint has fewer than our model


@dataclass(frozen=True)
class _Heads:
    """Query heads of one layer, if others have more."""

    axis: int  # axis of a matrix along which they lie
    num: int


def _plan(
    checkpoint: Checkpoint, spec: ModelSpec, model: Model, paths: _Loaded, held: range
) -> list[_Placement]:
    """Match every parameter of the whole model with tensors on disk, and every tensor on disk
    with a parameter; those that are loaded here, in the order on disk.

    Args:
        held: the experts that are loaded.
    """
    names = names_of(spec)
    if "text_config" in checkpoint.config:
        names = names.of_text_part()
    prefix = _find_prefix(checkpoint, names)
    dims = _order_of_dims(spec) if spec.rope_interleaved else None
    placements: list[_Placement] = []
    missing: list[str] = []
    others: set[str] = set()
    for path, module, parts in _matched_modules(checkpoint, model, names, prefix):
        here = paths.find(path)
        num_sources = len({part.index for part in parts})
        for parameter, tensor in module.named_parameters(recurse=False):
            for part in parts:
                name = part.source.tensor(parameter)
                if here is None or not (part.expert is None or part.expert in held):
                    others.add(name)
                    continue
                entry = checkpoint.tensors.get(name)
                if entry is None:
                    missing.append(name)
                    continue
                layout = _layout(part.source, parameter)
                heads = _heads(spec, path, part.index) if spec.layer_q_heads else None
                shape = list(_shape(module, tensor, part, num_sources))
                if heads is not None and heads.axis < len(shape):
                    shape[heads.axis] = shape[heads.axis] * heads.num // spec.num_q_heads
                _check(checkpoint, entry, tuple(shape), layout)
                own = path.rpartition(".")[2]
                turns = own in ("q_norm", "k_norm") or (own == "qkv" and part.index < 2)
                order = dims if turns else None
                placements.append(
                    _Placement(entry, here, parameter, part, num_sources, layout, order, heads)
                )
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {_some(missing)}, which its config.json calls for. The "
            "weights are incomplete or of another model: fetch them again."
        )
    used = {placement.entry.name for placement in placements}
    _refuse_unexpected(checkpoint, spec, names, used | others)
    return sorted(placements, key=lambda p: (p.entry.file.name, p.entry.offset))


def _find_prefix(checkpoint: Checkpoint, names: CheckpointNames) -> str:
    embedding = names.model["embed_tokens"]
    for prefix in names.prefixes:
        if f"{prefix}{embedding}.weight" in checkpoint.tensors:
            return prefix
    raise CheckpointError(
        f"{checkpoint.directory} lacks the token embedding {names.prefixes[0]}{embedding}.weight. "
        "The weights are incomplete or of another architecture than config.json says: fetch them "
        "again."
    )


def _matched_modules(
    checkpoint: Checkpoint, model: Model, names: CheckpointNames, prefix: str
) -> Iterator[tuple[str, nn.Module, tuple[_Part, ...]]]:
    """Every module that has parameters of its own, its path, and the
    checkpoint's modules that it is made of."""
    for path, module in model.named_modules():
        if not list(module.named_parameters(recurse=False)):
            continue
        if path == "lm_head":
            yield path, module, _parts(checkpoint, module, names.head, "")
        elif path.startswith("layers."):
            _, layer, own = path.split(".", 2)
            if isinstance(module, ExpertLinear):
                own = own.replace("mlp.", "mlp.experts.")
            start = prefix + names.layer.format(layer)
            yield path, module, _parts(checkpoint, module, names.layers[own], start)
        else:
            yield path, module, _parts(checkpoint, module, names.model[path], prefix)


def _parts(
    checkpoint: Checkpoint, module: nn.Module, names: Names, prefix: str
) -> tuple[_Part, ...]:
    match names:
        case str():
            return (_Part(Source(prefix + names)),)
        case Source():
            return (_Part(replace(names, name=prefix + names.name)),)
        case PerExpert():
            assert isinstance(module, ExpertLinear)
            return tuple(
                _Part(Source(prefix + name.format(expert)), index, expert)
                for expert in range(len(module.weight))
                for index, name in enumerate(names.names)
            )
        case Either():
            found = [_parts(checkpoint, module, each, prefix) for each in names.names]
            return max(found, key=lambda parts: _fit(checkpoint, module, parts))
        case _:
            return tuple(_Part(Source(prefix + name), i) for i, name in enumerate(names))


def _heads(spec: ModelSpec, path: str, source: int) -> _Heads | None:
    """The query heads of a module's tensor in the checkpoint, if it has fewer
    than ours. ``source``: which of the fused projections."""
    if not path.startswith("layers."):
        return None
    _, layer, own = path.split(".", 2)
    axes = {"qkv": 0 if source == 0 else None, "gate.proj": 0, "sinks": 0, "o": 1}
    axis, num = axes.get(own), spec.layer_q_heads[int(layer)]
    return None if axis is None or num == spec.num_q_heads else _Heads(axis, num)


def _order_of_dims(spec: ModelSpec) -> tuple[int, ...]:
    """The dims of a head whose pairs that turn lie side by side, in the order
    in which the first of all pairs come first. The same order of q's and of k's
    dims leaves their products as they are."""
    turning = next((2 * rope.num_frequencies for rope in spec.ropes if rope), 0)
    return (
        *range(0, turning, 2), *range(1, turning, 2), *range(turning, spec.head_dim)
    )  # fmt: skip


def _fit(checkpoint: Checkpoint, module: nn.Module, parts: tuple[_Part, ...]) -> int:
    """0: the checkpoint has none of such names; 2: it has, and in this layout."""
    part, weight = parts[0], getattr(module, "weight", None)
    entry = checkpoint.tensors.get(part.source.tensor("weight"))
    if entry is None or not isinstance(weight, Tensor):
        return 0
    shape = _shape(module, weight, part, len({part.index for part in parts}))
    return 2 if entry.shape == _laid_out(shape, _layout(part.source, "weight")) else 1


def _layout(source: Source, parameter: str) -> Layout:
    """How a tensor of the source lies: a bias has no dims to exchange."""
    of_bias: dict[Layout, Layout] = {"transposed": "rows", "transposed_alternating": "alternating"}
    return of_bias.get(source.layout, source.layout) if parameter == "bias" else source.layout


def _shape(module: nn.Module, tensor: Tensor, part: _Part, num_sources: int) -> tuple[int, ...]:
    """What a tensor on disk must have, were its layout ours."""
    is_stack = isinstance(module, ExpertLinear)
    shape = tuple(tensor.shape[1:] if is_stack else tensor.shape)
    if num_sources > 1:
        assert isinstance(module, (Linear, ExpertLinear))
        shape = (module.splits[part.index], *shape[1:])
    return (len(tensor), *shape) if is_stack and part.expert is None else shape


def _laid_out(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """What one of our shapes is in this layout."""
    is_transposed = layout in ("transposed", "transposed_alternating")
    return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape


def _check(
    checkpoint: Checkpoint, entry: TensorEntry, shape: tuple[int, ...], layout: Layout
) -> None:
    expected = _laid_out(shape, layout)
    found = entry.shape[1:] if len(shape) == 1 and entry.shape[:1] == (1,) else entry.shape
    if found != expected and entry.shape != expected:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} has the shape {list(entry.shape)}, but config.json "
            f"calls for {list(expected)}. Config and weights are of different models: fetch both "
            "again."
        )
    if entry.encoding is None and entry.dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} has the dtype {entry.dtype}, not one of "
            f"{', '.join(PLAIN_DTYPES)}, and no scales that it could be decoded with. Use the "
            "checkpoint in float32, float16 or bfloat16 that it was made from."
        )


def _refuse_unexpected(
    checkpoint: Checkpoint, spec: ModelSpec, names: CheckpointNames, used: set[str]
) -> None:
    harmless = [re.compile(pattern) for pattern in names.harmless]
    if spec.tied_embeddings:
        heads = names.head.names if isinstance(names.head, Either) else (names.head,)
        harmless += [re.compile(re.escape(f"{head}.weight")) for head in heads]
    config = text_part(ConfigReader(checkpoint.config, "config.json")).fields
    predicts_ahead = any(config.get(name) for name in _PREDICTS_AHEAD)
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in used
        and not any(p.fullmatch(name) for p in harmless)
        and not (predicts_ahead and _is_of_later_layer(name, spec, names))
        and not _is_zero_bias(name, checkpoint)
    ]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.directory} holds {_some(unexpected)}, for which the architecture "
            f"{spec.architecture} in its config.json has no place. Leaving them out would give "
            "wrong text: fetch the config that belongs to them."
        )


def _is_zero_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Whether it is a bias of zeros beside a quantised weight: some tools write one
    for every module."""
    weight = checkpoint.tensors.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or weight is None or weight.encoding is None:
        return False
    return is_zero(checkpoint.tensors[name])


def _is_of_later_layer(name: str, spec: ModelSpec, names: CheckpointNames) -> bool:
    """Return True for tensors of layers beyond the model's own, which predict ahead."""
    start, end = names.layer.split("{}")
    found = re.match(f"(?:.*\\.)?{re.escape(start)}(\\d+){re.escape(end)}", name)
    return found is not None and int(found[1]) >= spec.num_layers


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:4])) + ", ..." * (len(names) > 4)
    return f"the tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown})"


def _check_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.empty(0, device=device).device
        if found.type == "cuda":
            torch.cuda.set_device(found)  # events and streams belong to the current device
        return found
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            Given("device", str(device)), f" can't be used: {reason}. Name another, e.g. 'cpu'."
        ) from None


def _allocate(model: Model, device: torch.device, dtype: torch.dtype) -> None:
    """Give every module storage on the device; weights uninitialised, rotary tables filled."""
    model.dtype = dtype
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            try:
                kept = getattr(module, "kept_dtype", None) or dtype
                storage = torch.empty(parameter.shape, dtype=kept, device=device)
            except RuntimeError:
                # torch.OutOfMemoryError is one, but a CPU's allocator raises it bare.
                size_gib = model.spec.num_parameters * dtype.itemsize / (1 << 30)
                raise CapacityError(
                    f"{model.spec.name} takes {size_gib:.1f} GiB in {dtype}, which {device} hasn't "
                    "free. Choose a smaller dtype, another device or a smaller model."
                ) from None
            setattr(module, name, nn.Parameter(storage, requires_grad=False))
        if isinstance(module, (QueryGrowth, RotaryTable)):
            module.fill(device)


def _stream(
    placements: list[_Placement], spec: ModelSpec, model: Model, shard: Shard | None,
    progress: Progress | None, gpu: Gpu | None,
) -> None:  # fmt: skip
    total = sum(placement.entry.num_bytes for placement in placements)
    done = 0
    entries = (placement.entry for placement in placements)
    with _decoding_threads(gpu), TensorReader(entries, model.dtype, gpu) as reader:
        for placement in placements:
            module = model.get_submodule(placement.module)
            source = reader.read(placement.entry)
            if placement.order is not None:
                is_norm = placement.module.endswith("_norm")
                source = _ordered(source, placement.order, spec.head_dim, is_norm=is_norm)
            if placement.heads is not None and placement.heads.axis < source.dim():
                source = _with_idle_heads(source, placement.heads, spec)
            own = _shard_of(module, shard)
            for target, splits, piece in _pieces(module, placement, source):
                _place(target, splits, piece, placement.layout, spec, own)
            done += placement.entry.num_bytes
            if progress is not None:
                progress(done, total)


@contextlib.contextmanager
def _decoding_threads(gpu: Gpu | None) -> Iterator[None]:
    """All cores decode weights for a device, whose process has one thread
    otherwise (``feed_gpu``)."""
    before = torch.get_num_threads()
    if gpu is not None:
        torch.set_num_threads(max(before, available_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shard_of(module: nn.Module, shard: Shard | None) -> Shard | None:
    """This rank's part of each of a module's matrices."""
    return shard.of_experts if shard is not None and isinstance(module, ExpertLinear) else shard


def _pieces(
    module: nn.Module, placement: _Placement, source: Tensor
) -> Iterator[tuple[Tensor, Sequence[int], Tensor]]:
    """What of our parameter a tensor fills, rows of it that belong to each
    projection, and the tensor: of a stack of experts, one after the other."""
    parameter = getattr(module, placement.parameter)
    assert isinstance(parameter, Tensor)
    source = source.flatten() if parameter.dim() == 1 else source
    part = placement.part
    if not isinstance(module, ExpertLinear):
        splits = module.splits if isinstance(module, Linear) else tuple(parameter.shape[:1])
        yield (*_projection(parameter, splits, placement), source)
        return
    first = module.first
    wanted = range(first, first + len(parameter)) if part.expert is None else (part.expert,)
    for expert in wanted:
        target = _projection(parameter[expert - first], module.splits, placement)
        yield (*target, source[expert] if part.expert is None else source)


def _projection(
    target: Tensor, splits: Sequence[int], placement: _Placement
) -> tuple[Tensor, Sequence[int]]:
    if placement.num_sources == 1:
        return target, splits
    index = placement.part.index
    return torch.split(target, list(splits))[index], splits[index : index + 1]


def _ordered(source: Tensor, order: Sequence[int], head_dim: int, *, is_norm: bool) -> Tensor:
    """The dims of each head in another order. source: of a projection [H · D, …],
    of a norm [D] or [H, D]."""
    heads = source.view(-1, head_dim, *(() if is_norm else source.shape[1:]))
    return heads[:, list(order)].view(source.shape)


def _with_idle_heads(source: Tensor, heads: _Heads, spec: ModelSpec) -> Tensor:
    """A tensor with zeros for the query heads that the layer hasn't: the last
    ones of each KV head's group, as those are attended together."""
    groups = source.unflatten(heads.axis, (spec.num_kv_heads, -1))
    size = groups.shape[heads.axis + 1]
    shape = list(groups.shape)
    shape[heads.axis + 1] = size * spec.num_q_heads // heads.num
    filled = groups.new_zeros(shape)
    filled.narrow(heads.axis + 1, 0, size).copy_(groups)
    whole: Tensor = filled.flatten(heads.axis, heads.axis + 1)
    return whole


def _place(
    target: Tensor, splits: Sequence[int], source: Tensor, layout: Layout, spec: ModelSpec,
    shard: Shard | None,
) -> None:  # fmt: skip
    """Copy a tensor of the checkpoint, or the shard's part of each projection fused in it, to
    where it belongs. ``splits``: rows of the target that belong to each."""
    if layout in ("transposed", "transposed_alternating"):
        source = source.T
    if layout in ("alternating", "transposed_alternating"):
        source = torch.cat((source[::2], source[1::2]))
    elif layout == "heads":  # [Hkv, G + 2, D, …] → q, k, v: [Hq · D, …], [Hkv · D, …] twice
        groups = source.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
        group = groups.shape[1] - 2
        source = torch.cat([part.flatten(0, 2) for part in groups.split((group, 1, 1), dim=1)])
    with torch.no_grad():
        if shard is None:
            target.copy_(source, non_blocking=True)
            return
        scale = source.shape[0] / target.shape[0]
        wholes = torch.split(
            source, [round(rows * scale) for rows in splits] if len(splits) > 1 else source.shape[0]
        )
        for part, whole in zip(torch.split(target, list(splits)), wholes, strict=True):
            own = shard.cut(whole, part.shape)
            part[: own.shape[0]].copy_(own, non_blocking=True)
            part[own.shape[0] :].zero_()  # past the vocabulary's end: never looked up
