"""A model's tokenizer as scripts expect one: by the names that transformers has."""

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
        tokenizer, names = codec.vocabulary.tokenizer, TokenizerFiles.read(model).names
        bos, eos = names.get("bos_token"), codec.eos_token_id
        self.bos_token, self.bos_token_id = bos, None if bos is None else tokenizer.token_to_id(bos)
        self.eos_token_id: int | None = next(iter(eos_token_ids), None) if eos is None else eos
        """The first of several."""
        eos = self.eos_token_id
        self.eos_token: str | None = None if eos is None else tokenizer.id_to_token(eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError: If the text can't be encoded."""
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return (self._tokens if skip_special_tokens else self._whole).text(ids)

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
