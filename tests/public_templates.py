"""Short chat templates of our own with the traits of public models' templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Public:
    """A template, and what is found out about it."""

    source: str
    reasoning: str | None = None
    """The format's name."""
    tools: str | None = None
    """The format's name. None if it takes none."""
    answer: str = "Fine, thanks."
    """As the model writes it, with a call of ``f`` if it can."""
    system: str = "S"
    """What becomes of the instructions S and then D. Empty if they are refused."""
    parts: tuple[str, ...] = ()
    """Roles that take parts."""
    refuses: tuple[str, ...] = ()
    """Roles that are refused by name."""


_TEMPLATES = Path(__file__).parent / "data" / "templates"
PUBLIC = {
    name: Public((_TEMPLATES / f"{name.replace(' ', '_')}.jinja").read_text(), **traits)
    for name, traits in json.loads((_TEMPLATES / "traits.json").read_text()).items()
}
