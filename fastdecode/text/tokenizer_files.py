"""Which file of a model directory is its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file


def find_tokenizer(model_dir: Path) -> Path | None:
    """The directory's ``tokenizer.json``; None: the model serves token ids only.

    Raises:
        CheckpointError: there are only files that have to be converted first;
            says how.
    """
    if (model_dir / "tokenizer.json").exists():
        return model_dir / "tokenizer.json"
    _refuse_others(model_dir)
    return None


def special_tokens(model_dir: Path) -> dict[str, int]:
    """The names of a model's special tokens → their ids, where no tokenizer is open;
    none without one, or if its file is not as it should be.

    Raises:
        CheckpointError: as ``find_tokenizer``, or the file can't be read.
    """
    path = find_tokenizer(model_dir)
    if path is None:
        return {}
    try:
        added = json.loads(read_model_file(path, MAX_TOKENIZER_BYTES))["added_tokens"]
        return {each["content"]: int(each["id"]) for each in added if each["special"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


def _refuse_others(model_dir: Path) -> None:
    if (model_dir / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{model_dir} has a tokenizer.model, but no tokenizer.json, which is what is read. "
            "Convert it once, where transformers and sentencepiece are installed: "
            f'python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{model_dir}').save_pretrained('{model_dir}')\""
        )
    if (model_dir / "tekken.json").is_file():
        raise CheckpointError(
            f"{model_dir} has a tekken.json, but no tokenizer.json, which is what is read. Convert "
            "it once, where a current transformers is installed: "
            'python -c "from transformers.integrations.mistral.tokenizer import '
            f"convert_tekken_tokenizer as c; t = c('{model_dir}/tekken.json'); "
            f"t.add_bos_token = True; t.save_pretrained('{model_dir}')\""
        )
    ranks = sorted(path.name for path in model_dir.glob("*.tiktoken"))
    if not ranks and (model_dir / "tiktoken.model").is_file():
        ranks = ["tiktoken.model"]
    if ranks:
        raise CheckpointError(
            f"{model_dir} has {ranks[0]}, but no tokenizer.json, which is what is read; the "
            "pattern that splits a text is in the model's own code, which is never run. Convert it "
            "once, where transformers and tiktoken are installed, with the pattern that the "
            "model's tokenization_*.py names: python -c \"from transformers.convert_slow_tokenizer "
            f"import TikTokenConverter as T; T('{model_dir / ranks[0]}', pattern='PATTERN')"
            f".converted().save('{model_dir / 'tokenizer.json'}')\""
        )
