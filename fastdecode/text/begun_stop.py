"""How much of a growing text's end may be the beginning of a stop string or another mark."""

from __future__ import annotations

from collections.abc import Sequence


class BegunStop:
    """Knuth, Morris and Pratt's automaton for each of the strings, of which none is empty."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [(string, _fallbacks(string)) for string in stop]
        self._matched = [0] * len(self._stop)

    def feed(self, text: str) -> int:
        """Take more text. Return the length of its longest end that begins a stop string.

        An end is shorter than that string: one that is complete has been judged already.
        """
        for i, (string, fallbacks) in enumerate(self._stop):
            matched = self._matched[i]
            for char in text:
                while matched and string[matched] != char:
                    matched = fallbacks[matched - 1]
                matched += string[matched] == char
                if matched == len(string):
                    matched = fallbacks[matched - 1]
            self._matched[i] = matched
        return max(self._matched, default=0)


def num_begun(text: str, mark: str) -> int:
    """Return the same of a short text and one mark, which isn't complete in it."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)


def _fallbacks(string: str) -> list[int]:
    """Return, for each beginning of the string, the longest shorter one that it ends with."""
    fallbacks = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = fallbacks[length - 1]
        length += string[i] == string[length]
        fallbacks[i] = length
    return fallbacks
