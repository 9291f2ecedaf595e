"""What can be known about people and things: how it is told, how it is asked,
how it is answered.

Templates have slots in braces; square brackets mark the words that a reader
must recall from earlier in the text. They are markup: they never reach the
text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lexicon import (
    ANIMALS,
    COLOURS,
    FOODS,
    INSTRUMENTS,
    JOBS,
    MONTHS,
    PLACES,
    Draw,
    Person,
    article_slots,
)


@dataclass(frozen=True)
class Fact:
    """One thing to be known."""

    topic: str
    statement: str
    question: str
    answer: str


@dataclass(frozen=True)
class Family:
    """A kind of fact. ``{n}`` is the subject, ``{v}`` the value, ``{k}`` a
    second key (the animal, the dish)."""

    topic: str
    statements: tuple[str, ...]
    question: str
    answer: str
    value: Callable[[Draw], str]
    key: Callable[[Draw], str] | None = None


PERSONAL = (
    Family("home", ("{n} lives in {v}.", "{n} has a small house in {v}.",
                    "The home of {n} is in {v}.", "{n} moved to {v} some years ago."),
           "Where does {n} live?", "{n} lives in [{v}].", Draw.town),
    Family("birthplace", ("{n} was born in {v}.", "{n} came into the world in {v}.",
                          "{n} grew up in {v}."),
           "Where was {n} born?", "{n} was born in [{v}].", Draw.town),
    Family("job", ("{n} works as {a_v}.", "{n} is {a_v}.", "{n} has been {a_v} for many years."),
           "What is the work of {n}?", "{n} works as {an_v} [{v}].",
           lambda draw: draw.listed(JOBS)),
    Family("pet", ("{n} has {a_k} called {v}.", "{n} keeps {a_k}, and its name is {v}.",
                   "{v} is the name of the {k} that belongs to {n}."),
           "What is the {k} of {n} called?", "The {k} of {n} is called [{v}].", Draw.pet,
           lambda draw: draw.listed(ANIMALS)),
    Family("food", ("{n} likes {v} best of all.", "The favourite food of {n} is {v}.",
                    "There is nothing that {n} likes more than {v}."),
           "What does {n} like to eat?", "{n} likes to eat [{v}].",
           lambda draw: draw.listed(FOODS)),
    Family("treasure", ("{n} owns {a_v}.", "{n} has {a_v} that nobody else may touch.",
                        "The greatest treasure of {n} is {a_v}."),
           "What does {n} own?", "{n} owns {an_v} [{v}].", Draw.thing),
    Family("age", ("{n} is {v} years old.", "{n} turned {v} this year."),
           "How old is {n}?", "{n} is [{v}] years old.", lambda draw: draw.number(2)),
    Family("door", ("The number on the door of {n} is {v}.",
                    "{n} lives in the house with the number {v}."),
           "What is the number on the door of {n}?", "The number on the door of {n} is [{v}].",
           lambda draw: draw.number(3)),
    Family("code", ("The secret code of {n} is {v}.", "{n} has chosen the secret code {v}."),
           "What is the secret code of {n}?", "The secret code of {n} is [{v}].",
           lambda draw: draw.number(4)),
    Family("friend", ("The best friend of {n} is {v}.", "{n} and {v} are the best of friends."),
           "Who is the best friend of {n}?", "The best friend of {n} is [{v}].",
           lambda draw: draw.person().name),
    Family("month", ("{n} was born in the month of {v}.", "The birthday of {n} is in {v}."),
           "When is the birthday of {n}?", "The birthday of {n} is in [{v}].",
           lambda draw: draw.listed(MONTHS)),
    Family("music", ("{n} plays the {v}.", "{n} has played the {v} since childhood."),
           "What does {n} play?", "{n} plays the [{v}].", lambda draw: draw.listed(INSTRUMENTS)),
    Family("colour", ("The favourite colour of {n} is {v}.",
                      "{n} loves the colour {v} more than any other."),
           "What is the favourite colour of {n}?", "The favourite colour of {n} is [{v}].",
           lambda draw: draw.listed(COLOURS)),
)  # fmt: skip

STORED = (
    Family("place of a thing", ("The {n} is in the {v}.", "Somebody put the {n} into the {v}.",
                                "You will find the {n} in the {v}."),
           "Where is the {n}?", "The {n} is in the [{v}].", Draw.holder),
    Family("price", ("The {n} costs {v} pence.", "The price of the {n} is {v} pence.",
                     "They ask {v} pence for the {n}."),
           "How much is the {n}?", "The {n} costs [{v}] pence.", lambda draw: draw.number(3)),
    Family("owner", ("The {n} belongs to {v}.", "{v} is the owner of the {n}."),
           "Who owns the {n}?", "The {n} belongs to [{v}].", lambda draw: draw.person().name),
    Family("finder", ("{v} found the {n} at the {k}.", "It was {v} who found the {n} at the {k}."),
           "Who found the {n}?", "[{v}] found the {n}.", lambda draw: draw.person().name,
           lambda draw: draw.one(PLACES)),
)  # fmt: skip
"""Facts whose subject is a thing."""


def make_fact(draw: Draw, family: Family, subject: str) -> Fact:
    """A fact of the family with a fresh value."""
    value = family.value(draw)
    key = family.key(draw) if family.key else ""
    slots = (
        {"n": subject, "v": value, "k": key} | article_slots("v", value) | article_slots("k", key)
    )
    return Fact(
        family.topic,
        draw.one(family.statements).format_map(slots),
        family.question.format_map(slots),
        family.answer.format_map(slots),
    )


def facts_about(draw: Draw, person: Person, count: int) -> list[Fact]:
    """``count`` facts of different families about one person."""
    return [make_fact(draw, family, person.name) for family in draw.some(PERSONAL, count)]
