"""What a batch job's answers depend on, kept beside its output, so that another
job can't go on with it by mistake.

Not in it: what changes no text (the number of R-workers, threads, memory, the
schedule), so that a run may be resumed on another machine.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fastdecode import __version__
from fastdecode.core.errors import CheckpointError, ConfigError
from fastdecode.core.json_file import write_whole
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file
from fastdecode.core.os_errors import explained
from fastdecode.jobs.line_format import LineId
from fastdecode.jobs.shard import WHOLE, Shard

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


@dataclass(frozen=True)
class Manifest:
    """A run's identity. Everything but ``run_id``, ``created``, ``num_lines`` and
    ``last_line`` must be equal for a run to be resumed."""

    run_id: str
    """Drawn; stands in the ids of OpenAI answers."""
    created: str
    """When the run began, ISO 8601; what chat templates get as the date."""
    version: str
    lines: str
    """The format of the input's lines."""
    input_sha256: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    run_seed: int
    """A line's seed comes from it and the line's id."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Defaults that the command gave for lines that don't say it themselves."""
    model: dict[str, str] = field(default_factory=dict)
    """File → hash."""
    shard: str = str(WHOLE)
    """The part of the input's lines that this run answers."""
    num_lines: int = 0
    """How many those are; 0: an older version did not say."""
    last_line: int = 0
    """The number of the input's last line; 0: an older version did not say."""

    @classmethod
    def path_for(cls, output: Path) -> Path:
        return output.with_name(output.name + ".manifest.json")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises ConfigError: it isn't there, or isn't a manifest that this version can read."""
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise ValueError("too large")
            content = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format isn't {FORMAT}")
            manifest = cls(**content)
            manifest._check_types()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = explained(error) if isinstance(error, OSError) else error
            raise ConfigError(
                f"can't read the run manifest {path}: {why}. Without it the output cannot be "
                "resumed. Restore it, or start anew with --overwrite"
            ) from None
        return manifest

    def write(self, path: Path) -> None:
        """Whole, or not at all, and for good. Raises ConfigError."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        write_whole(
            path,
            text,
            refuse=lambda why: ConfigError(f"the run manifest {path}: {why}"),
            durable=True,
        )

    def differences(self, other: Manifest) -> list[str]:
        """What keeps ``other`` from going on with this run; one line each."""
        found = []
        for name in (f.name for f in fields(self) if f.name not in _FREE):
            before, now = getattr(self, name), getattr(other, name)
            if name == "input_sha256" and before != now:
                found.append("the input file has changed")
            elif name == "model":
                found += _changed_files(before, now)
            elif isinstance(before, dict):
                keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
                found += [
                    f"{name} {key}: {_shown(before.get(key))} then, {_shown(now.get(key))} now"
                    for key in keys
                ]
            elif before != now:
                found.append(f"{name}: {_shown(before)} then, {_shown(now)} now")
        return found

    @property
    def date(self) -> datetime:
        """When the run began, as a clock on the wall showed it."""
        return datetime.fromisoformat(self.created).replace(tzinfo=None)

    def seed_of(self, line_id: LineId, prompt: int = 0) -> int:
        """The seed of a prompt of a line; the same in every run that has this ``run_seed``."""
        return seed_of(self.run_seed, line_id, prompt)

    def _check_types(self) -> None:
        for name in (f.name for f in fields(self)):
            kind = (
                int
                if name in ("max_model_len", "run_seed", "num_lines", "last_line")
                else dict
                if name in ("sampling", "model")
                else str
            )
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is no {kind.__name__}")
        datetime.fromisoformat(self.created)
        if not 0 <= self.run_seed < 1 << 63:
            raise ValueError("run_seed is out of range")


def seed_of(run_seed: int, line_id: LineId, prompt: int) -> int:
    """The seed of a prompt of a line, which comes from the run's seed and the line's id alone."""
    digest = hashlib.blake2b(
        f"{prompt}:{line_id}".encode(), digest_size=8, key=run_seed.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little") >> 1


def new_manifest(
    *,
    lines: str,
    input_sha256: str,
    sampling: Mapping[str, Any],
    model: Mapping[str, str],
    dtype: str,
    kv_dtype: str,
    max_model_len: int,
    run_seed: int | None,
    shard: Shard = WHOLE,
    num_lines: int = 0,
    last_line: int = 0,
) -> Manifest:
    """The manifest of a run that begins now, with a fresh seed if none is
    given.

    Raises:
        ConfigError: the seed is out of range.
    """
    if run_seed is not None and not 0 <= run_seed < 1 << 63:
        raise ConfigError(f"--run-seed {run_seed} is not a whole number from 0 to 2^63 - 1")
    return Manifest(
        run_id=secrets.token_hex(6),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        version=__version__,
        lines=lines,
        input_sha256=input_sha256,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        run_seed=secrets.randbits(63) if run_seed is None else run_seed,
        # As JSON gives it back, so that it can be compared.
        sampling=json.loads(json.dumps(dict(sampling))),
        model=dict(model),
        shard=str(shard),
        num_lines=num_lines,
        last_line=last_line,
    )


def identify_model(
    directory: Path, chat_template: Path | None = None, load_format: str = "safetensors"
) -> dict[str, str]:
    """Hashes of a model's files: the small ones whole, of the weights their
    sizes and 256 samples spread over a file; or that the weights are random.

    Raises:
        CheckpointError: a file can't be read.
    """
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
            found[weights.name] = _sampled_hash(weights)
    except OSError as error:
        raise CheckpointError(f"can't read {error.filename}: {explained(error)}") from None
    return found


def _sampled_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(SAMPLES_PER_FILE):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES_PER_FILE - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The model's files that differ, a line each."""
    found = []
    for name in sorted({**before, **now}):
        if name not in now:
            found.append(f"the model's {name} is missing")
        elif name not in before:
            found.append(f"the model has a {name} that it did not have")
        elif before[name] != now[name]:
            found.append(f"the model's {name} has changed")
    return found


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
