"""Was the rule right? The throughput of all lanes is compared with that of the
device alone."""

from __future__ import annotations

_WINDOW = 64
"""Steps of the home lane that are looked at together."""
_LEAST = 0.97
"""Of what the device alone would give."""
_CLOSED = 256
"""Steps of the home lane for which nobody goes to R-workers after that."""


class HybridGuard:
    """Closes the way to R-workers for a while where they don't pay.

    What the device would give alone is predicted; and the prediction trusted as
    far as it was right while the device was alone.
    """

    def __init__(self) -> None:
        self.num_closed = 0
        """How often the way was closed."""
        self._is_right: float | None = None  # measured over predicted rate of the device alone
        self._closed_for = 0
        self._before_s: float | None = None
        self._begin()

    @property
    def is_closed(self) -> bool:
        return self._closed_for > 0

    def away_step(self, num_decoding: int) -> None:
        """So many sequences that are away have got a token each."""
        self._num_away_tokens += num_decoding
        self._is_alone = False

    def home_step(
        self, num_decoding: int, expected_s: float, now_s: float, *, is_alone: bool, is_full: bool
    ) -> None:
        """A step of the home lane is over.

        Args:
            num_decoding: sequences at home that have got a token each.
            expected_s: what it would have taken with nobody away.
            now_s: the time.
            is_alone: nobody is away.
            is_full: somebody waits for room. Else nothing is judged: who has
                nothing to do is slow.
        """
        self._closed_for = max(0, self._closed_for - 1)
        before_s, self._before_s = self._before_s, now_s
        if before_s is None or not is_full:
            self._begin()
            return
        self._num_home_tokens += num_decoding
        self._elapsed_s += now_s - before_s
        self._expected_s += expected_s
        self._is_alone = self._is_alone and is_alone
        self._num_steps += 1
        if self._num_steps >= _WINDOW:
            self._judge()
            self._begin()

    def _judge(self) -> None:
        if self._elapsed_s <= 0 or self._expected_s <= 0:
            return
        alone = self._num_home_tokens / self._expected_s
        measured = (self._num_home_tokens + self._num_away_tokens) / self._elapsed_s
        if self._is_alone:
            self._is_right = measured / alone
        elif self._is_right is not None and measured < _LEAST * self._is_right * alone:
            self._closed_for = _CLOSED
            self.num_closed += 1

    def _begin(self) -> None:
        self._num_steps = self._num_home_tokens = self._num_away_tokens = 0
        self._elapsed_s = self._expected_s = 0.0
        self._is_alone = True
