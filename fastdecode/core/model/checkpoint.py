"""A Hugging Face model directory: its config files, and where each tensor lies on disk.

The safetensors layout is: the header's length (8 bytes, little endian), the header (a JSON object
of name → dtype, shape, begin and end), the raw tensors. We read it ourselves rather than map the
file into memory, so that the peak memory of a load is what the loader allocates and nothing else.
Everything in a header is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fastdecode.core.dtype import DType
from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.config_reader import ConfigReader, text_part
from fastdecode.core.model.encoded_tensors import find_weights
from fastdecode.core.model.families import check_implemented, read_model_spec
from fastdecode.core.model.files import parse_json, read_model_file
from fastdecode.core.model.local_models import find_model
from fastdecode.core.model.quantisation import read_quantisation
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.tensor_entry import ITEM_BITS, TensorEntry

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
MAX_DIMS = 8
MAX_DIM = 1 << 40
_COMPARED_BYTES = 4 << 20

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16, "F64": None}
_HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")
_EMBEDDINGS = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight", ".word_embeddings.weight")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose files are all there and consistent with each other;
    or, if ``is_random``, one of which only the config files are used."""

    directory: Path
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    hf_quant_config: Mapping[str, object]
    """What some exports say of quantised weights nowhere else; mostly empty."""
    tensors: Mapping[str, TensorEntry]
    """Weights by name; quantised ones as what they are decoded to."""
    model_hash: str
    """An identity for the model: SHA-256 over its config.json and safetensors headers, in hex.
    The weights aren't read: two fine-tunes of one model that were saved alike have the same."""
    is_random: bool = False
    """Weights are made by a fixed seed. ``tensors`` is empty."""

    def spec(self, *, max_model_len: int | None = None) -> ModelSpec:
        """What the model is.

        Args:
            max_model_len: a length limit other than the model's own (see ``read_model_spec``).

        Raises:
            UnsupportedModelError: If the architecture or one of its features isn't implemented.
            CheckpointError: If ``config.json`` makes no sense.
            ConfigError: If ``max_model_len`` is out of range.
        """
        spec = read_model_spec(
            self.config,
            name=str(self.directory),
            generation_config=self.generation_config,
            hf_quant_config=self.hf_quant_config,
            max_model_len=max_model_len,
        )
        spec = replace(spec, tied_embeddings=spec.tied_embeddings and not self._has_own_head)
        said = text_part(ConfigReader(self.config, "config.json")).find("dtype", "torch_dtype")[1]
        if said is not None or spec.quantisation is not None or not self._dtype_bytes:
            return spec
        return replace(spec, dtype=_FLOATS[self._dtype_bytes.most_common(1)[0][0]])

    def about_decoding(self, spec: ModelSpec, dtype: DType) -> str | None:
        """Return a text about the bytes of quantised weights, or None without any."""
        encoded = [entry for entry in self.tensors.values() if entry.encoding is not None]
        if not encoded:
            return None
        names = spec.quantisation.name if spec.quantisation else encoded[0].dtype
        on_disk = sum(entry.num_bytes for entry in self.tensors.values())
        in_memory = spec.num_parameters * dtype.size_bytes
        return (
            f"weights are {names}, {on_disk / 1e9:.2f} GB on disk; they are decoded to {dtype} "
            f"while they are loaded, and take {in_memory / 1e9:.2f} GB in memory"
        )

    @cached_property
    def _dtype_bytes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for entry in self.tensors.values():
            if entry.dtype in _FLOATS:
                found[entry.dtype] += entry.num_bytes
        return found

    @cached_property
    def _has_own_head(self) -> bool:
        """Whether there is an output projection that differs from the token
        embedding: then it counts, whatever config.json says. A copy of the
        embedding doesn't; some exports write one."""
        head = next((self.tensors[name] for name in _HEADS if name in self.tensors), None)
        embedding = next(
            (entry for name, entry in self.tensors.items() if f".{name}".endswith(_EMBEDDINGS)),
            None,
        )
        return head is not None and embedding is not None and not is_same(head, embedding)


def open_checkpoint(path: str | Path, load_format: str = "safetensors") -> Checkpoint:
    """Read the config files and every safetensors header of a model directory; no tensor is read.

    Args:
        load_format: ``random``: read the config files only.

    Raises:
        UnsupportedModelError: If the architecture, or a feature that config.json asks for, is not
            implemented.
        CheckpointError: If a file is missing or broken, or the index doesn't fit the files.
    """
    directory = find_model(path)
    config_bytes, config, quantised = _read_config(directory)
    generation = _read_object(directory / "generation_config.json")
    if config.get("auto_map"):
        logger.warning(
            "%s/config.json names code that comes with the checkpoint ('auto_map'). It is never "
            "run: FastDecode's own implementation of the architecture is used.",
            directory,
        )

    digest = hashlib.sha256(config_bytes)
    if quantised:
        digest.update(b"\0" + json.dumps(quantised, sort_keys=True).encode())
    if load_format == "random":
        digest.update(b"\0random weights")
        identity = digest.hexdigest()
        return Checkpoint(directory, config, generation, quantised, {}, identity, is_random=True)
    tensors: dict[str, TensorEntry] = {}
    index = _read_index(directory)
    for file in sorted({directory / WEIGHTS_FILE} if index is None else set(index.values())):
        header_bytes = _read_header(file)
        digest.update(file.name.encode() + b"\0" + header_bytes)
        for entry in _parse_header(file, header_bytes):
            if index is not None and index.get(entry.name) != file:
                continue  # the index decides; a shard may hold more than it
            tensors[entry.name] = entry
    for name in index or {}:
        if name not in tensors:
            raise CheckpointError(
                f"{directory / INDEX_FILE} says that {name!r} is in {(index or {})[name].name}, "
                "which doesn't hold it: "
                f"index and shards are of different versions. Fetch the model again."
            )
    weights = find_weights(tensors, read_quantisation(config, str(directory), quantised))
    return Checkpoint(directory, config, generation, quantised, weights, digest.hexdigest())


def check_model(path: str | Path) -> None:
    """Find out from ``config.json`` alone whether a model can run: before its
    tokenizer and its weights are asked for.

    Raises:
        UnsupportedModelError, CheckpointError: as ``open_checkpoint``.
    """
    _read_config(find_model(path))


def _read_config(directory: Path) -> tuple[bytes, Mapping[str, object], Mapping[str, object]]:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory. A model is a local directory in the Hugging Face "
            "layout (config.json, *.safetensors), or org/name in the local Hugging Face cache; "
            "models are never downloaded: fetch it first, e.g. with `hf download`."
        )
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json: it is not a model directory, or its download is "
            "incomplete."
        )
    config_bytes = read_model_file(directory / "config.json", MAX_CONFIG_BYTES)
    config = _parse_object(directory / "config.json", config_bytes)
    quantised = _read_object(directory / "hf_quant_config.json")
    check_implemented(config, name=str(directory), hf_quant_config=quantised)
    return config_bytes, config, quantised


def _read_object(file: Path) -> Mapping[str, object]:
    """A JSON object that a model may come with; empty if it doesn't."""
    if not file.is_file():
        return {}
    return _parse_object(file, read_model_file(file, MAX_CONFIG_BYTES))


def is_same(a: TensorEntry, b: TensorEntry) -> bool:
    """Return True if two tensors have equal dtypes, shapes and bytes. Encoded ones count as
    different.

    Raises:
        CheckpointError: If a file can't be read.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.encoding or b.encoding:
        return False
    return all(map(operator.eq, _chunks(a), _chunks(b)))


def is_zero(entry: TensorEntry) -> bool:
    """Return True if every byte of a tensor that isn't encoded is zero.

    Raises:
        CheckpointError: If the file can't be read.
    """
    return not any(map(any, _chunks(entry)))


def _chunks(entry: TensorEntry) -> Iterator[bytes]:
    try:
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            for start in range(0, entry.num_bytes, _COMPARED_BYTES):
                yield file.read(min(_COMPARED_BYTES, entry.num_bytes - start))
    except OSError as error:
        raise CheckpointError(f"{entry.file} can't be read: {error.strerror or error}.") from error


def _parse_object(file: Path, data: bytes) -> dict[str, object]:
    parsed = parse_json(file, data)
    if not isinstance(parsed, dict):
        raise CheckpointError(
            f"{file} must hold a JSON object, not a {type(parsed).__name__}. Fetch the file again."
        )
    return parsed


def _read_index(directory: Path) -> dict[str, Path] | None:
    """Tensor → shard; None for a checkpoint in a single file."""
    if (directory / WEIGHTS_FILE).is_file():
        return None
    file = directory / INDEX_FILE
    if not file.is_file():
        raise _no_weights(directory)
    weight_map = _parse_object(file, read_model_file(file, MAX_INDEX_BYTES)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file}: 'weight_map' must be an object of tensor to shard. Fetch the file again."
        )
    index: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or Path(shard).name != shard
            or "\\" in shard
        ):
            raise CheckpointError(
                f"{file}: {shard!r}, the shard of {name!r}, is not a *.safetensors file name "
                "within the directory. "
                f"Don't trust this checkpoint; fetch it from its source."
            )
        index[name] = directory / shard
    missing = sorted({shard.name for shard in index.values() if not shard.is_file()})
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(set(index.values()))} shards named by "
            f"{INDEX_FILE} are missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Finish the download."
        )
    return index


def _no_weights(directory: Path) -> CheckpointError:
    names = sorted(file.name for file in directory.iterdir())
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return CheckpointError(
            f"{directory} holds its weights as pickled files only (*.bin, *.pt), which can run "
            "code when loaded, so "
            "they are never read. Convert it once, where transformers is installed and you trust "
            "the files: "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('NEW_DIRECTORY')\""
        )
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"; found {', '.join(others[:5])}, which no index explains" if others else ""
    return CheckpointError(
        f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{found}. Fetch the weights in "
        "safetensors format."
    )


def _read_header(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            prefix = stream.read(8)
            if prefix == b"version ":
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` in "
                    f"{file.parent}."
                )
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _broken(file, "its header is cut off or isn't one")
            return stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}.") from error


def _parse_header(file: Path, header_bytes: bytes) -> list[TensorEntry]:
    start = 8 + len(header_bytes)
    room = file.stat().st_size - start
    try:
        header = json.loads(header_bytes)
    except (ValueError, RecursionError):
        raise _broken(file, "its header isn't valid JSON") from None
    if not isinstance(header, dict):
        raise _broken(file, "its header isn't a JSON object")
    header.pop("__metadata__", None)
    entries = [_parse_entry(file, name, entry, start) for name, entry in header.items()]
    end = 0
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != start + end:
            raise _broken(
                file, f"the bytes of {entry.name!r} overlap another tensor's, or leave a gap"
            )
        end += entry.num_bytes
    if end != room:
        raise _broken(file, f"its tensors take {end} bytes, but {room} are there")
    return entries


def _parse_entry(file: Path, name: str, entry: object, start: int) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            dtype in ITEM_BITS
            and len(shape) <= MAX_DIMS
            and all(type(dim) is int and 0 <= dim <= MAX_DIM for dim in shape)
        ):
            num_bytes = ITEM_BITS[dtype] * math.prod(shape) // 8
            if begin >= 0 and end - begin == num_bytes:
                return TensorEntry(name, file, dtype, tuple(shape), start + begin, num_bytes)
    raise _broken(file, f"the header's entry of {name!r} makes no sense")


def _broken(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a whole safetensors file: {why}. Fetch it again (is the disk full?)."
    )
