"""The text of single tokens, as logprobs show it."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.text.detokenizer import Detokenizer, Vocabulary, detokenizer_for


class TokenText:
    """Names tokens in answers: ``token_id:N`` where the model has no tokenizer."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; a special token's name."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return f"token_id:{token_id}".encode()
        token = vocabulary.token(token_id)
        if token is None:
            return (vocabulary.tokenizer.id_to_token(token_id) or f"token_id:{token_id}").encode()
        if vocabulary.decoder_types == {"ByteLevel"}:
            return vocabulary.byte_level_bytes(token_id)
        fallback = vocabulary.fallback_byte(token_id)
        if fallback is not None:
            return fallback
        # Decoding one token alone would drop the space before a word.
        return token.replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Return the token's text; ``bytes:\\xNN…`` if its bytes alone are no characters."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def offsets(
        self, token_ids: Sequence[int], prompt_token_ids: Sequence[int], length: int
    ) -> list[int]:
        """Return where in a completion of ``length`` characters each token's text begins."""
        offsets = TokenOffsets(self._vocabulary, prompt_token_ids)
        return [min(offsets.next(token_id), length) for token_id in token_ids]

    def offsets_after(self, prompt_token_ids: Sequence[int]) -> TokenOffsets:
        """Return the same for tokens as they come."""
        return TokenOffsets(self._vocabulary, prompt_token_ids)


class TokenOffsets:
    """Where the texts of a completion's tokens begin, had nothing been cut off its text."""

    def __init__(self, vocabulary: Vocabulary | None, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = (
            Detokenizer() if vocabulary is None else detokenizer_for(vocabulary, prompt_token_ids)
        )
        self._end = 0

    def next(self, token_id: int) -> int:
        """Return it for one more token."""
        begin = self._end
        self._end += len(self._detokenizer.append(token_id))
        return begin
