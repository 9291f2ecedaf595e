"""What a batch job's answers depend on, kept beside its output, so that another job can't
continue it by mistake.

Not in it: what changes no text (the number of R-workers, threads, memory, the schedule), so that
a run may be resumed on another machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, MsgspecError, convert

from fastdecode.core.errors import CheckpointError, ConfigError
from fastdecode.core.json_file import read_object, write_whole
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file
from fastdecode.core.os_errors import explained
from fastdecode.jobs.lines import LineId, Shard

FORMAT = "fastdecode.batch/1"
MAX_MANIFEST_BYTES = 16 << 20
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 4096
# Files of a model directory that a text depends on, beside the weights.
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
_FREE: Final = ("run_id", "created", "num_lines", "last_line")
"""Fields that may differ when a run is resumed."""
_Whole: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity of a run. Everything but ``_FREE`` must be equal for a run to be resumed."""

    run_id: str  # stands in the ids of OpenAI answers
    created: str
    """Start of the run, ISO 8601. Chat templates get it as the date."""
    version: str
    lines: str  # format of the input's lines
    input_sha256: str
    dtype: str
    kv_dtype: str
    max_model_len: _Whole
    run_seed: _Whole  # A line's seed comes from it and the line's id
    sampling: dict[str, Any]  # defaults that the command gave for lines that don't give them
    model: dict[str, Any]  # hash of each file, and chosen formats
    shard: str
    num_lines: _Whole
    last_line: _Whole  # number of the input's last line, blank ones left out

    @classmethod
    def path_for(cls, output: Path) -> Path:
        return output.with_name(output.name + ".manifest.json")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises: ConfigError: If it is missing, or this version can't read it."""

        def refuse(why: object) -> ConfigError:
            return ConfigError(
                f"the run manifest {path}: {why}. Without it the output cannot be resumed. Restore "
                "it, or run its job again with --overwrite"
            )

        content = read_object(path, most_bytes=MAX_MANIFEST_BYTES, refuse=refuse)
        try:
            if content.get("format") != FORMAT:
                raise ValueError(f"its format isn't {FORMAT}")
            if unknown := content.keys() - {"format", *(f.name for f in fields(cls))}:
                raise ValueError(f"it has unknown fields: {', '.join(sorted(unknown))}")
            manifest = convert(content, cls)
            datetime.fromisoformat(manifest.created)
            Shard.of(manifest.shard)
        except (ValueError, MsgspecError, ConfigError) as error:
            raise refuse(error) from None
        return manifest

    def write(self, path: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        what = f"the run manifest {path}"
        write_whole(path, text, refuse=lambda why: ConfigError(f"{what}: {why}"), durable=True)

    def differences(self, other: Manifest) -> list[str]:
        """Return what keeps ``other`` from resuming this run, a line each."""
        found = []
        for name in (f.name for f in fields(self) if f.name not in _FREE):
            before, now = getattr(self, name), getattr(other, name)
            if before == now:
                continue
            if name == "input_sha256":
                found.append("the input file has changed")
            elif name == "model":
                changed = (each for each in {**before, **now} if before.get(each) != now.get(each))
                for file in sorted(changed):
                    how = "has changed" if file in before else "is new"
                    found.append(f"the model's {file} {how if file in now else 'is missing'}")
            elif isinstance(before, dict):
                pairs = ((key, before.get(key), now.get(key)) for key in {**before, **now})
                found += [_change(f"{name} {key}", a, b) for key, a, b in pairs if a != b]
            else:
                found.append(_change(name, before, now))
        return found

    @property
    def date(self) -> datetime:
        """Start of the run, as a clock on the wall showed it."""
        return datetime.fromisoformat(self.created).replace(tzinfo=None)


def seed_of(run_seed: int, line_id: LineId, prompt: int) -> int:
    """Return the seed of a prompt of a line, which comes from the run's seed and the line's id."""
    digest = hashlib.blake2b(
        f"{prompt}:{line_id}".encode(), digest_size=8, key=run_seed.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little") >> 1


def identify_model(
    directory: Path, chat_template: Path | None = None, load_format: str = "safetensors"
) -> dict[str, str]:
    """Return hashes of a model's files: small ones whole, of weights the size and 256 samples.
    Raises CheckpointError: If a file can't be read."""
    files = {name: directory / name for name in MODEL_FILES}
    if chat_template is not None:
        files["--chat-template"] = chat_template
    try:
        found = {
            name: hashlib.sha256(read_model_file(file, MAX_TOKENIZER_BYTES)).hexdigest()
            for name, file in files.items()
            if file.exists()
        }
        if load_format == "random":
            return {**found, "weights": "random"}
        for weights in sorted(directory.glob("*.safetensors")):
            size = weights.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            with weights.open("rb") as file:
                for i in range(SAMPLES_PER_FILE):
                    file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES_PER_FILE - 1))
                    digest.update(file.read(SAMPLE_BYTES))
            found[weights.name] = digest.hexdigest()
    except OSError as error:
        raise CheckpointError(f"can't read {error.filename}: {explained(error)}") from None
    return found


def _change(name: str, *values: object) -> str:
    texts = ("nothing" if value is None else repr(value) for value in values)
    then, now = (text if len(text) <= 100 else text[:97] + "..." for text in texts)
    return f"{name}: {then} then, {now} now"
