"""What two people tell each other about themselves, and ask each other later.

``me``, ``you`` and ``my``, ``your`` follow from who speaks, so every topic is
written once for each speaker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lexicon import FOODS, INSTRUMENTS, JOBS, Draw


@dataclass(frozen=True)
class Topic:
    """``{v}`` is the value, ``{k}`` a second key. ``ask_own``: "Where do I
    live?"; ``ask_other``: "Where do you …?"."""

    topic: str
    tell: tuple[str, ...]
    ask_own: str
    answer_you: str
    ask_other: str
    answer_me: str
    value: Callable[[Draw], str]
    key: Callable[[Draw], str] | None = None


TOPICS = (
    Topic(
        "home", ("I live in {v}.", "My house is in {v}.", "I have moved to {v}."),
        "where I live", "you live in [{v}]", "where you live", "I live in [{v}]", Draw.town,
    ),
    Topic(
        "pet", ("My {k} is called {v}.", "I have {a_k}, and its name is {v}."),
        "what my {k} is called", "your {k} is called [{v}]", "what your {k} is called",
        "my {k} is called [{v}]", Draw.pet, lambda draw: draw.listed(("dog", "cat", "goat", "pony",
            "parrot", "goose", "donkey", "rabbit")),
    ),
    Topic(
        "food", ("I like {v} best of all.", "There is nothing better than {v}."),
        "what I like to eat", "you like to eat [{v}]", "what you like to eat",
        "I like to eat [{v}]", lambda draw: draw.listed(FOODS),
    ),
    Topic(
        "age", ("I am {v} years old.", "I turned {v} last week."),
        "how old I am", "you are [{v}] years old", "how old you are", "I am [{v}] years old",
        lambda draw: draw.number(2),
    ),
    Topic(
        "treasure", ("I have bought {a_v}.", "Look, I have {a_v} with me."),
        "what I have", "you have {an_v} [{v}]", "what you have", "I have {an_v} [{v}]", Draw.thing,
    ),
    Topic(
        "code", ("My secret code is {v}.", "Please remember my secret code. It is {v}."),
        "my secret code", "your secret code is [{v}]", "your secret code",
        "my secret code is [{v}]", lambda draw: draw.number(4),
    ),
    Topic(
        "friend", ("My best friend is {v}.", "{v} is my best friend."),
        "who my best friend is", "your best friend is [{v}]", "who your best friend is",
        "my best friend is [{v}]", lambda draw: draw.person().name,
    ),
    Topic(
        "place of a thing", ("I hid my {k} in the {v}.", "My {k} is in the {v}."),
        "where my {k} is", "your {k} is in the [{v}]", "where your {k} is",
        "my {k} is in the [{v}]", Draw.holder, Draw.thing,
    ),
    Topic(
        "job", ("I work as {a_v}.", "I am {a_v} now."),
        "what my work is", "you work as {an_v} [{v}]", "what your work is",
        "I work as {an_v} [{v}]", lambda draw: draw.listed(JOBS),
    ),
    Topic(
        "music", ("I am learning to play the {v}.", "I play the {v} every evening."),
        "what I play", "you play the [{v}]", "what you play", "I play the [{v}]",
        lambda draw: draw.listed(INSTRUMENTS),
    ),
    Topic(
        "number", ("My room has the number {v}.", "I am staying in room {v}."),
        "the number of my room", "the number of your room is [{v}]",
        "the number of your room", "the number of my room is [{v}]", lambda draw: draw.number(3),
    ),
)  # fmt: skip

REPLIES = [
    "That is good to know.",
    "How nice.",
    "I did not know that.",
    "Really? I shall remember that.",
    "Oh, that is interesting.",
    "I am glad to hear it.",
    "You never told me before.",
]

SMALL_TALK = (
    ("What a cold morning it is.", "Yes, I had to light the fire."),
    ("Did you sleep well?", "Very well, thank you."),
    ("Have you heard the news?", "No, I have not read the paper today."),
    ("Would you like some tea?", "Yes, please, with a little milk."),
    ("The train was late again.", "It is late every week."),
    ("How is your mother?", "She is much better now, thank you."),
    ("I think it will rain soon.", "Then we should go inside."),
    ("Shall we take a walk by the river?", "That is a good idea."),
    ("I could not find my umbrella.", "Perhaps you left it on the train."),
    ("Are you coming to the market?", "Not today, I have too much to do."),
    ("The soup smells good.", "It will be ready in a minute."),
    ("Have you seen the new bridge?", "Not yet, but they say it is very high."),
)
"""Lines about nothing, and what one says to them: the distance between telling and asking."""
