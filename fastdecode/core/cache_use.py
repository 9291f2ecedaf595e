"""What a request has to do with KV blocks that others leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from msgspec import Meta

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.model.block_keys import MAX_SALT_CHARS
from fastdecode.core.words import is_unicode


@dataclass(frozen=True)
class CacheUse:
    """What a request has to do with the KV cache of others.

    Raises:
        RequestError: (code ``invalid_cache``).
    """

    is_off: bool = False  # it leaves nothing behind, and takes nothing that others left
    salt: str = ""  # it shares with requests of the same salt only
    turn: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    """It is a turn of a conversation, whose earlier turns had so many leading
    tokens of its prompt cached: its own last block is kept though it isn't
    full. None: it isn't."""

    def __post_init__(self) -> None:
        salt: object = self.salt
        if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS or not is_unicode(salt):
            why = f": must be a string of at most {MAX_SALT_CHARS} characters, no lone surrogates"
            raise RequestError(Given("cache_salt"), why, code="invalid_cache")

    @classmethod
    def of(cls, cache: object, salt: object) -> CacheUse:
        """From what a request says; None: it doesn't."""
        if cache not in (None, "on", "off"):
            raise RequestError(
                Given("cache", cache), ': must be "on" or "off"', code="invalid_cache"
            )
        return cls(cache == "off", "" if salt is None else cast(str, salt))


SHARED = CacheUse()  # with all others of no salt
