"""Limits on an answer's time: the proxy places requests by them, and bench counts within them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The longest time per output token, as a mean over an answer, and to its first one, in
    seconds; 0 for none."""

    tpot: float = 0.0
    first: float = 0.0

    def __str__(self) -> str:
        first = f"{self.first:g} s" if self.first >= 1 else f"{self.first * 1e3:g} ms"
        return f"{self.tpot * 1e3:g} ms a token and {first} to the first"

    def allow(self, tpot: float, first: float) -> bool:
        return tpot <= (self.tpot or math.inf) and first <= (self.first or math.inf)
