"""The text that the demo model learns from: stories and dialogues that must be
remembered to be continued.

Every document tells facts about people and things that it has just made up, and
asks for them later. A document is a pure function of ``(split, seed, index,
size)``.

    python examples/model/corpus.py --count 5 --split held_out      # print some
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from facts import STORED, Fact, facts_about, make_fact
from lexicon import ANIMALS, DAYS, FOODS, JOBS, MONTHS, PLACES, Draw, Split, article_slots
from plots import PLOTS, SCENERY, Plot
from talk import REPLIES, SMALL_TALK, TOPICS, Topic

MAX_SIZE = 3
"""Documents of size 0 have 40 to 200 tokens, those of size 3 some hundreds."""

_MARK = re.compile(r"[\[\]]")

_SLOT_MAKERS: dict[str, Callable[[Draw], str]] = {
    "town": Draw.town,
    "thing": Draw.thing,
    "holder": Draw.holder,
    "pet": Draw.pet,
    "ship": Draw.ship,
    "tens": lambda draw: draw.number(2),
    "hundreds": lambda draw: draw.number(3),
    "code": lambda draw: draw.number(4),
    "food": lambda draw: draw.listed(FOODS),
    "animal": lambda draw: draw.listed(ANIMALS),
    "job": lambda draw: draw.listed(JOBS),
    "month": lambda draw: draw.listed(MONTHS),
    "day": lambda draw: draw.listed(DAYS),
    "place": lambda draw: draw.listed(PLACES),
}


@dataclass(frozen=True)
class Answer:
    """An answer to a question, by character offsets in the document's text.

    ``text[:start]`` is the prompt; ``text[start:end]``, a space and one
    sentence, is the only right continuation.
    """

    topic: str
    start: int
    end: int
    told: int
    """Where the words to recall were last said before."""


@dataclass(frozen=True)
class Document:
    kind: str
    text: str
    answers: tuple[Answer, ...]
    recalls: tuple[tuple[int, int], ...]
    """Character spans that can only be known from earlier in the text."""


@dataclass
class Page:
    """A document while it is written. Brackets in what is written become recall spans."""

    kind: str
    text: str = ""
    answers: list[Answer] = field(default_factory=list)
    recalls: list[tuple[int, int]] = field(default_factory=list)

    def write(self, marked: str) -> None:
        pieces = _MARK.split(marked)
        for number, piece in enumerate(pieces):
            if number % 2:
                self.recalls.append((len(self.text), len(self.text) + len(piece)))
            self.text += piece

    def answer(self, topic: str, marked: str) -> None:
        """Write an answer, which starts with a space, and note it for the measurement."""
        start, first = len(self.text), len(self.recalls)
        self.write(marked)
        begin, end = self.recalls[first]
        told = self.text.rfind(self.text[begin:end], 0, start)
        assert told >= 0, f"never told: {marked!r} in {self.text!r}"
        self.answers.append(Answer(topic, start, len(self.text), told))

    def ask(self, fact: Fact) -> None:
        self.write(f"\nQ: {fact.question}\nA:")
        self.answer(fact.topic, f" {fact.answer}")

    def done(self) -> Document:
        return Document(self.kind, self.text, tuple(self.answers), tuple(self.recalls))


def _prose(draw: Draw, sentences: list[str], scenery: float) -> str:
    """Sentences as paragraphs, with sentences about nothing between them at the given rate."""
    idle = draw.shuffled(SCENERY)
    told: list[str] = []
    for sentence in sentences:
        while idle and draw.chance(scenery):
            told.append(idle.pop())
        told.append(sentence)
    paragraph_end = 0.08
    return told[0] + "".join(("\n" if draw.chance(paragraph_end) else " ") + s for s in told[1:])


def tell(draw: Draw, plot: Plot) -> tuple[list[str], list[Fact]]:
    """One telling of a plot: its sentences, and what can be asked about it."""
    slots: dict[str, str] = {}
    for letter in plot.cast:
        slots |= draw.person().slots(letter)
    for name, maker in plot.slots.items():
        slots[name] = _SLOT_MAKERS[maker](draw)
        slots |= article_slots(name, slots[name])
    sentences = []
    for beat in plot.beats:
        sentence = draw.one(beat)
        if sentence.startswith("?"):
            if draw.chance(0.5):
                continue
            sentence = sentence[1:]
        sentence = sentence.format_map(slots)
        sentences.append(sentence)
    told = " ".join(sentences)
    facts = []
    for topic, question, answer in plot.questions:
        filled = answer.format_map(slots)
        value = filled.partition("[")[2].partition("]")[0]
        if value in _MARK.sub("", told):
            facts.append(Fact(topic, "", question.format_map(slots), filled))
    return sentences, facts


def story(draw: Draw, size: int) -> Document:
    """One story, or at larger sizes up to three; then, most of the time, questions about them."""
    page = Page("story")
    facts: list[Fact] = []
    num_stories = 1 + (draw.integer(0, size) if size < MAX_SIZE else draw.integer(1, 3)) // 2
    for number, plot in enumerate(draw.some(PLOTS, num_stories)):
        sentences, known = tell(draw, plot)
        page.write(("\n\n" if number else "") + _prose(draw, sentences, 0.08 * size))
        facts += known
    if draw.chance(0.8):
        page.write("\n")
        for fact in draw.some(facts, draw.integer(3, 10)):
            page.ask(fact)
    return page.done()


def portraits(draw: Draw, size: int) -> Document:
    """Facts about several people in random order, then questions."""
    page = Page("portraits")
    facts: list[Fact] = []
    for _ in range(draw.integer(2, 3 + size)):
        facts += facts_about(draw, draw.person(), draw.integer(1, 3))
    if draw.chance(0.5):
        facts = draw.shuffled(facts)
    page.write(_prose(draw, [fact.statement for fact in facts], 0.1 * size) + "\n")
    for fact in draw.some(facts, draw.integer(3, 10)):
        page.ask(fact)
    return page.done()


def stock(draw: Draw, size: int) -> Document:
    """Facts about several things, then questions."""
    page = Page("stock")
    facts = [
        make_fact(draw, draw.one(STORED), draw.thing())
        for _ in range(draw.integer(3, 6 + 2 * size))
    ]
    page.write(_prose(draw, [fact.statement for fact in facts], 0.1 * size) + "\n")
    for fact in draw.some(facts, draw.integer(3, 10)):
        page.ask(fact)
    return page.done()


def _slots_of(draw: Draw, topic: Topic) -> dict[str, str]:
    value, key = topic.value(draw), topic.key(draw) if topic.key else ""
    return {"v": value, "k": key} | article_slots("v", value) | article_slots("k", key)


def conversation(draw: Draw, size: int) -> Document:
    """Two people tell each other things, talk about nothing, and ask each other what was told."""
    page = Page("conversation")
    speakers = [draw.person().name, draw.person().name]
    known: list[tuple[int, Topic, dict[str, str]]] = []
    for speaker in (0, 1):
        known += [
            (speaker, t, _slots_of(draw, t)) for t in draw.some(TOPICS, draw.integer(1, 2 + size))
        ]
    known = draw.shuffled(known)

    def small_talk() -> None:
        first = draw.integer(0, 1)
        for speaker, line in zip((first, 1 - first), draw.one(SMALL_TALK), strict=True):
            page.write(f"{speakers[speaker]}: {line}\n")

    for speaker, topic, slots in known:
        page.write(f"{speakers[speaker]}: {draw.one(topic.tell).format_map(slots)}\n")
        if draw.chance(0.6):
            page.write(f"{speakers[1 - speaker]}: {draw.one(REPLIES)}\n")
        if draw.chance(0.15 + 0.15 * size):
            small_talk()
    for speaker, topic, slots in draw.some(known, draw.integer(3, 10)):
        own = draw.chance(0.5)  # the one who told asks the other, or is asked
        asker, answerer = (speaker, 1 - speaker) if own else (1 - speaker, speaker)
        if own:
            question, reply = f"Do you remember {topic.ask_own}?", f"Yes, {topic.answer_you}."
        else:
            question = f"Tell me again {topic.ask_other}."
            reply = f"{topic.answer_me[0].upper()}{topic.answer_me[1:]}."
        page.write(f"{speakers[asker]}: {question.format_map(slots)}\n{speakers[answerer]}:")
        page.answer(topic.topic, f" {reply.format_map(slots)}")
        page.write("\n")
    page.text = page.text.rstrip("\n")
    return page.done()


KINDS: tuple[tuple[float, Callable[[Draw, int], Document]], ...] = (
    (0.45, story),
    (0.25, portraits),
    (0.12, stock),
    (0.18, conversation),
)


def document(split: Split, seed: int, index: int, size: int) -> Document:
    """The document of that number. The same arguments give the same text on every machine."""
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"size must be 0 to {MAX_SIZE}, got {size}")
    draw = Draw(random.Random(f"{split}/{seed}/{index}/{size}"), split)
    ticket = draw.rng.random()
    for share, kind in KINDS[:-1]:
        if ticket < share:
            return kind(draw, size)
        ticket -= share
    return KINDS[-1][1](draw, size)


def documents(split: Split, seed: int, count: int, max_size: int) -> Iterator[Document]:
    """``count`` documents whose sizes run evenly through 0..max_size."""
    for index in range(count):
        yield document(split, seed, index, index % (max_size + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print documents of the corpus.")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--size", type=int, default=MAX_SIZE, help=f"the largest size, 0 to {MAX_SIZE}"
    )
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    options = parser.parse_args()
    for page in documents(options.split, options.seed, options.count, options.size):
        print(f"--- {page.kind}\n{page.text}\n")


if __name__ == "__main__":
    main()
