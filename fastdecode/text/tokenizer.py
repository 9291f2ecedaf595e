"""A model's tokenizer as scripts expect one: the methods of transformers' that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Rendering
from fastdecode.text.codec import TextCodec
from fastdecode.text.tokenizer_files import TokenizerFiles


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask`` of a text, or of several: by key, or as attributes."""

    input_ids = property(lambda self: self["input_ids"])
    attention_mask = property(lambda self: self["attention_mask"])


class ModelTokenizer:
    """The result of ``LLM.get_tokenizer``. Usable while the LLM is open. ``chat_template`` is a
    file or a text in place of the model's own. Raises ConfigError: (code ``no_tokenizer``) If the
    model has none."""

    def __init__(
        self,
        codec: TextCodec,
        model: Path,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | Path | None = None,
    ) -> None:
        if codec.vocabulary is None or codec.whole is None:
            why = f"{model} has no tokenizer.json: add the model's, or give token ids"
            raise ConfigError(why, code="no_tokenizer")
        self._codec, self._model, self._chosen_template = codec, model, chat_template
        self._tokens, self._whole = codec.vocabulary, codec.whole
        self._tokenizer = codec.vocabulary.tokenizer
        eos = codec.eos_token_id
        self.eos_token_id: int | None = next(iter(eos_token_ids), None) if eos is None else eos
        """The first of several."""
        self.special_tokens_map: dict[str, str] = dict(TokenizerFiles.read(model).names)
        """``bos_token``, ``eos_token`` and so on, as far as the model's files name them."""
        self.bos_token, self.bos_token_id = self._named("bos_token")
        self.pad_token, self.pad_token_id = self._named("pad_token")
        self.unk_token, self.unk_token_id = self._named("unk_token")
        eos = self.eos_token_id
        self.eos_token: str | None = None if eos is None else self._tokenizer.id_to_token(eos)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self.all_special_tokens = list(self._tokens.special_tokens)
        self.all_special_ids = list(self._tokens.special_tokens.values())

    def _named(self, name: str) -> tuple[str | None, int | None]:
        token = self.special_tokens_map.get(name)
        return token, None if token is None else self._tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Encoding:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        several = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=several, attention_mask=[[1] * len(ids) for ids in several])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return (self._tokens if skip_special_tokens else self._whole).text(ids)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens as they stand in the vocabulary, no special ones added."""
        return list(self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False)))

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return None for an unknown id alone, ``""`` for one among others."""
        named = self._tokenizer.id_to_token
        return named(ids) if isinstance(ids, int) else [named(each) or "" for each in ids]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        id_of = self._tokenizer.token_to_id
        return id_of(tokens) if isinstance(tokens, str) else [id_of(each) for each in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """Return a conversation as the model's prompt, token ids or text, as transformers does.
        Raises ConfigError, RequestError: If there is no template, or it refuses the conversation.
        """
        is_own = chat_template is None
        template = self._template if is_own else ChatTemplate.load(self._model, chat_template)
        if template is None:
            why = f"{self._model} has no chat template: give one as chat_template"
            raise ConfigError(why, code="no_chat_template")
        how = Rendering.of(add_generation_prompt, continue_final_message, variables, tools or ())
        text = template.render(conversation, datetime.now(), how)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.load(self._model, self._chosen_template)
