"""The files of a model directory that say what its tokens are."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastdecode.core.errors import CheckpointError, imports_for
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file, read_model_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)
SPECIAL_TOKENS: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")
_OF_RANKS: Final = (
    "transformers and tiktoken are installed, with the pattern that the model's tokenization_*.py "
    "names (its code is never run)",
    "from transformers.convert_slow_tokenizer import TikTokenConverter as T; "
    "T('{file}', pattern='PATTERN').converted().save('{folder}/tokenizer.json')",
)
_CONVERTED: Final = {
    "tokenizer.model": (
        "transformers and sentencepiece are installed",
        "from transformers import AutoTokenizer as T; "
        "T.from_pretrained('{folder}').save_pretrained('{folder}')",
    ),
    "tekken.json": (
        "a current transformers is installed",
        "from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer as c; "
        "t = c('{file}'); t.add_bos_token = True; t.save_pretrained('{folder}')",
    ),
    "*.tiktoken": _OF_RANKS,
    "tiktoken.model": _OF_RANKS,
}
"""Files that aren't read → where they can be converted, and by which program."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What a model's files say of its tokens, as transformers reads them. ``tokenizer.json`` alone
    says what begins a text: ``add_bos_token`` is for its makers."""

    path: Path | None = None
    """The ``tokenizer.json``. None if the model serves token ids only."""
    names: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token`` and so on → the token."""
    added: tuple[Mapping[str, Any], ...] = ()
    """Tokens that other files add to ``path`` or flag otherwise, in order of their ids."""

    @classmethod
    def read(cls, model_dir: Path) -> TokenizerFiles:
        """Read a model directory. Raises CheckpointError: If a file is unusable."""
        where, older = model_dir / "tokenizer_config.json", {}
        config = read_model_json(where)
        newer = config.get("added_tokens_decoder", {})
        if "added_tokens_decoder" not in config:  # else transformers reads no older file
            config = {**config, **read_model_json(model_dir / "special_tokens_map.json")}
            where = model_dir / "added_tokens.json"
            older = read_model_json(where)
        names = {}
        for name in SPECIAL_TOKENS:
            token = config.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str) and content:
                names[name] = content
        try:
            rows = [_row(int(each), row["content"], row) for each, row in newer.items()]
            rows += [_row(int(each), content, {}) for content, each in older.items()]
        except (ValueError, TypeError, AttributeError, LookupError):
            raise CheckpointError(
                f"{where} has added tokens that aren't pairs of an id and a token: fetch it again"
            ) from None
        known = {row["content"] for row in rows}
        rows.sort(key=lambda row: int(row["id"]))
        unlisted = [each for each in dict.fromkeys(names.values()) if each not in known]
        rows += [_row(None, each, {}) for each in unlisted]
        for row in rows:
            row["special"] |= row["content"] in names.values()
        return cls(find_tokenizer(model_dir), names, tuple(rows))

    def load(self) -> Tokenizer:
        """Return the tokenizer, and warn of names and ids that the files disagree on."""
        assert self.path is not None
        with imports_for(f"reading {self.path}"):
            tokenizer = load_tokenizer(self.path, self.added)
        for name, token in self.names.items():
            if tokenizer.token_to_id(token) is None:
                why = "which isn't one of the tokens: texts can't have it"
                named = "%s: tokenizer_config.json names %r as %s, %s"
                logger.warning(named, self.path, token, name, why)
        for row in self.added:
            token, found = row["content"], tokenizer.token_to_id(row["content"])
            if row["id"] not in (None, found):
                differs = "%s: the added token %r has the id %s there, and %s in the other files"
                logger.warning(differs, self.path, token, found, row["id"])
        return tokenizer

    def special_ids(self) -> dict[str, int]:
        """Return the special tokens' names and ids without loading the tokenizer."""
        if self.path is None:
            return {}
        special = {row["content"] for row in self.added if row["special"]}
        ids = {row["content"]: row["id"] for row in self.added if row["id"] is not None}
        try:
            tree = json.loads(read_model_file(self.path, MAX_TOKENIZER_BYTES))
            words = tree["model"]["vocab"]
            ids |= words if isinstance(words, dict) else {w[0]: at for at, w in enumerate(words)}
            ids |= {each["content"]: int(each["id"]) for each in tree["added_tokens"]}
            special |= {each["content"] for each in tree["added_tokens"] if each["special"]}
        except (ValueError, LookupError, TypeError, RecursionError):
            return {}
        return {name: ids[name] for name in special if name in ids}


def find_tokenizer(model_dir: Path) -> Path | None:
    """Return ``tokenizer.json``, if any. Raises CheckpointError: If only other formats exist."""
    if (model_dir / "tokenizer.json").exists():
        return model_dir / "tokenizer.json"
    for pattern, (where, program) in _CONVERTED.items():
        for path in sorted(model_dir.glob(pattern)):
            line = program.format(file=path, folder=model_dir)
            raise CheckpointError(
                f"{model_dir} has a {path.name}, but no tokenizer.json, which is what is read. "
                f'Convert it once, where {where}: python -c "{line}"'
            )
    return None


def load_tokenizer(path: Path, added: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """Return a tokenizer with added tokens. The encoder's process and this one load it so."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_buffer(read_model_file(path, MAX_TOKENIZER_BYTES))
    # Some tokenizer.json carry the settings that their training ran with.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    own = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    new = []
    for row in added:
        content, special, flags = row["content"], row["special"], row["flags"]
        if (before := own.get(content)) is not None:
            known = {name: getattr(before, name) for name in _FLAGS}
            special |= before.special  # transformers takes none back
            flags = {**known, **flags}
            if flags == known and special == before.special:
                continue
        elif row["id"] is None and tokenizer.token_to_id(content) is None:
            continue
        new.append(AddedToken(content, special=special, **flags))
    tokenizer.add_tokens(new)
    return tokenizer


def _row(token_id: int | None, content: object, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an element of ``added``. Raises TypeError and others: If the file has none there."""
    if not isinstance(content, str) or not content:
        raise TypeError("a token is a text")
    flags = {name: bool(row[name]) for name in _FLAGS if name in row}
    return {"id": token_id, "content": content, "special": bool(row.get("special")), "flags": flags}
