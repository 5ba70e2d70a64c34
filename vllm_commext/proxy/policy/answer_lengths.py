"""Lengths of answers to come, as recent ones had them. Pure."""

import math
from collections.abc import Iterable
from itertools import accumulate

_FORGETTING = 0.995
_MOST_WEIGHT = 1e100
_GROWTH = math.log(1.12)
MOST_BINNED = 1 << 15
_NUM_BINS = int(math.log(MOST_BINNED) / _GROWTH) + 1
places = [_NUM_BINS - int(math.log(count or 1) / _GROWTH) for count in range(MOST_BINNED)]
"""Of each length of an answer, how many sums there are of answers that are longer."""
_SPREAD = {offset: (4 - abs(offset)) / 16.0 for offset in range(-3, 4)}
"""Weights of the neighbouring bins: a length may be a third more or less."""
UNKNOWN_LENGTHS = 32, 64, 128, 256, 512
"""Tokens of answers that are taken to have ended before: the first that end are short ones."""


class Lengths:
    """Distribution of answers' tokens, by recent ones. ended: those to begin with."""

    def __init__(self, ended: Iterable[int] = UNKNOWN_LENGTHS) -> None:
        self._counts = [0.0] * (_NUM_BINS + 1)
        """Longest first, half of each in the next: of those as long as one half are longer."""
        self._weight = 1.0
        """Of the latest answer. It grows instead of decaying older samples."""
        self._num_samples, self._sums = 0.0, [0.0]
        """Of the first counts, as far as they are worked out."""
        self.mean = 0.0
        for tokens in ended:
            self.add(tokens)

    def add(self, tokens: int) -> None:
        self._weight /= _FORGETTING
        middle = places[min(tokens, MOST_BINNED - 1)] - 1
        del self._sums[max(middle + min(_SPREAD), 0) + 1 :]
        for offset, share in _SPREAD.items():
            place = min(max(middle + offset, 0), _NUM_BINS - 1)
            self._counts[place] += share * self._weight / 2.0
            self._counts[place + 1] += share * self._weight / 2.0
        self._num_samples += self._weight
        self.mean += (tokens - self.mean) * self._weight / self._num_samples
        if self._weight > _MOST_WEIGHT:
            self._counts, self._sums = [count / self._weight for count in self._counts], [0.0]
            self._num_samples /= self._weight
            self._weight = 1.0

    @property
    def longer(self) -> list[float]:
        """By a length's place, how many of the recent answers are longer."""
        sums = self._sums
        if (num := len(sums)) <= _NUM_BINS:
            sums += accumulate(self._counts[num - 1 : _NUM_BINS], initial=sums.pop())
        return sums

    def ended(self, needed: float, had: int) -> float:
        """Share of answers of *had* tokens so far that end before *needed*."""
        if needed <= had:
            return 0.0
        if needed >= MOST_BINNED:
            return 1.0
        longer = self.longer
        among = longer[places[had]]
        return 1.0 - longer[places[int(needed)]] / among if among > 0.0 else 0.0
