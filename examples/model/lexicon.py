"""The words that the corpus recombines, and the rule that keeps some of them
out of training.

Every name, town, thing and number belongs to exactly one split, decided by a
checksum of its spelling. So a text of the ``held_out`` split asks for words
that no training text contained: the only way to answer is to look them up
earlier in the same text.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Split = Literal["train", "held_out"]
T = TypeVar("T")

HELD_OUT_SHARE = 8
"""One word in this many is held out."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """Phrases parted by bars or line ends."""
    return tuple(phrase.strip() for line in text.strip().split("\n") for phrase in line.split("|"))


NAME_STARTS = _words(
    """
    al am an ar bel ber bran cal car cor dal del dor el em fal fen fin gal gren hal hel il in
    jor kal kel lan len lor mal mar mel mir nal nel nor ol or pal per quin ral ren ros sal sel
    shan syl tal tam til tor val ver vin wen wil yor zan
    """
)
NAME_MIDDLES = [
    "",
    "",
    "",
    *["am", "an", "ar", "is", "or", "en", "ad", "el", "iv", "ol", "ett", "ind"],
]
SHE_ENDINGS = _words("a ia ina elle ene ara ith")
HE_ENDINGS = _words("o an ric us in or ard eth")
SHE_NAMES = _words(
    """
    anna alice beth clara dora edith emma flora grace hannah helen ida irene jane julia kate
    laura lily lucy mabel martha mary nora olive paula rosa ruth sarah sophie tilda vera violet
    """
)
HE_NAMES = _words(
    """
    adam albert arthur ben carl david edgar eric felix frank george harry henry hugo jack james
    john karl leo louis mark martin max noah oscar otto paul peter simon thomas tom victor
    walter
    """
)

TOWN_STARTS = _words(
    """
    ash birch black bram brook carn clay cold crow dun east elm fair fal fern glen gold gray
    green hart haw high holm kings lamb lang long mill moss nether north oak old pen raven red
    rose rush salt sand silver south stone swan tarn thorn under upper wal west white wind
    winter wolf wood wren yar
    """
)
TOWN_ENDINGS = _words(
    """
    bourne bridge brook bury cliff combe cross dale den field ford gate ham haven hill hurst ley
    mere mouth port ridge stead stoke ton well wick wood worth
    """
)

LOOKS = _words(
    """
    red blue green yellow white black silver golden copper brass wooden glass iron clay velvet
    striped painted broken tiny heavy round old
    """
)
THINGS = _words(
    """
    key lamp bell clock cup map coin kite drum flute hat scarf mirror spoon book candle kettle
    whistle ribbon compass comb ring button feather fan doll ball brush bottle horn medal shell
    stamp thimble vase lantern pipe saw hammer bowl
    """
)
WOODS = _words("oak pine tin iron stone willow wicker leather cedar copper")
HOLDERS = _words("chest drawer jar basket cupboard barrel box trunk bucket crate")
SPOTS = _phrases(
    """
    under the stairs|behind the stove|beside the well|in the attic|by the garden gate
    under the bed|behind the barn|in the cellar|near the window|on the top shelf
    under the old bridge|in the kitchen|behind the church|in the boat house|by the front door
    next to the piano
    """
)

JOBS = _words(
    """
    baker miller sailor teacher doctor farmer fisherman tailor painter carpenter gardener cook
    clockmaker shepherd blacksmith musician weaver writer nurse potter beekeeper postman singer
    baker's helper judge hunter shoemaker ferryman
    """
)
FOODS = _phrases(
    """
    plum cake|onion soup|apple pie|honey bread|fish stew|rice pudding|roast chicken|pea soup
    lemon tart|mushroom pie|egg pie|cheese toast|bean stew|carrot cake|pumpkin soup|cherry jam
    potato salad|ginger bread|barley broth|nut bread
    """
)
ANIMALS = _words("dog cat goat pony parrot goose donkey rabbit hen owl fox sheep")
PET_STARTS = _words(
    """
    bim bo bram dap dot fid fiz gus hob jam lol mop nib pad pip pud rol rus sni tik tum wob zig mil
    """
)
PET_ENDINGS = _words("by dle kin let ly ple po ster tle ty ble bin")
COLOURS = _words("red blue green yellow white black brown purple orange pink grey silver")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SHIPS = _words("Sea Lady Swan Star Queen Rose Hope Gull Dolphin Eagle Lion Lark Pearl Storm")
INSTRUMENTS = _words("flute violin piano drum harp guitar trumpet cello accordion banjo")
PLACES = _phrases(
    """
    old mill|market|harbour|chapel|town hall|school|bakery|orchard|river bank|lighthouse|library|inn
    railway station|windmill|forge|meadow
    """
)


def is_held_out(word: str) -> bool:
    """Whether a word belongs to the held-out split, whatever seed draws it."""
    return zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0


def article_slots(slot: str, noun: str) -> dict[str, str]:
    """``("v", "iron bell")`` → ``{"an_v": "an", "a_v": "an iron bell"}``."""
    article = "an" if noun[:1] in "aeiou" else "a"
    return {f"an_{slot}": article, f"a_{slot}": f"{article} {noun}"}


@dataclass(frozen=True)
class Person:
    name: str
    she: bool

    def slots(self, letter: str) -> dict[str, str]:
        """The slots that templates use for the person: ``{x}``, ``{x_he}``,
        ``{x_his}``, ``{x_him}``, ``{x_He}``."""
        he, his, him, kind = (
            ("she", "her", "her", "woman") if self.she else ("he", "his", "him", "man")
        )
        forms = {
            "he": he,
            "his": his,
            "him": him,
            "He": he.capitalize(),
            "His": his.capitalize(),
            "kind": kind,
        }
        return {letter: self.name} | {f"{letter}_{name}": form for name, form in forms.items()}


@dataclass
class Draw:
    """Draws words for one document. No word comes twice, so a question has one
    answer.

    Only ``Random.random`` is used, the one method whose sequence Python
    promises to keep across versions.
    """

    rng: random.Random
    split: Split
    used: set[str] = field(default_factory=set)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def integer(self, low: int, high: int) -> int:
        """Uniform over low..high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def one(self, pool: Sequence[T]) -> T:
        return pool[int(self.rng.random() * len(pool))]

    def some(self, pool: Sequence[T], count: int) -> list[T]:
        """``count`` different places of the pool, in random order."""
        rest = list(pool)
        return [rest.pop(int(self.rng.random() * len(rest))) for _ in range(min(count, len(rest)))]

    def shuffled(self, pool: Sequence[T]) -> list[T]:
        return self.some(pool, len(pool))

    def fresh(self, make: Callable[[], str], *, keep_split: bool = True) -> str:
        """A word of this document's split that it hasn't used; closed lists
        (jobs, foods) belong to both splits."""
        for _ in range(1000):
            word = make()
            if word in self.used or (
                keep_split and is_held_out(word) != (self.split == "held_out")
            ):
                continue
            self.used.add(word)
            return word
        raise AssertionError("the pool is too small for one document")

    def person(self) -> Person:
        she = self.chance(0.5)

        def make() -> str:
            if self.chance(0.25):
                return self.one(SHE_NAMES if she else HE_NAMES).capitalize()
            ending = self.one(SHE_ENDINGS if she else HE_ENDINGS)
            return (self.one(NAME_STARTS) + self.one(NAME_MIDDLES) + ending).capitalize()

        return Person(self.fresh(make), she)

    def town(self) -> str:
        return self.fresh(lambda: (self.one(TOWN_STARTS) + self.one(TOWN_ENDINGS)).capitalize())

    def thing(self) -> str:
        return self.fresh(lambda: f"{self.one(LOOKS)} {self.one(THINGS)}")

    def holder(self) -> str:
        return self.fresh(lambda: f"{self.one(WOODS)} {self.one(HOLDERS)} {self.one(SPOTS)}")

    def pet(self) -> str:
        return self.fresh(lambda: (self.one(PET_STARTS) + self.one(PET_ENDINGS)).capitalize())

    def ship(self) -> str:
        return self.fresh(lambda: f"{self.one(LOOKS).capitalize()} {self.one(SHIPS)}")

    def number(self, digits: int) -> str:
        """Two-digit numbers are too few to hold some out."""
        low, high = 10 ** (digits - 1), 10**digits - 1
        return self.fresh(lambda: str(self.integer(low + 2, high)), keep_split=digits > 2)

    def listed(self, pool: Sequence[str]) -> str:
        """An unused word of a closed list."""
        return self.fresh(lambda: self.one(pool), keep_split=False)
