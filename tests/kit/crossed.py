"""Pairs of what a test is to be tried with."""

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(ones: Sequence[Any], others: Sequence[Any], most: int = 0) -> list[Any]:
    """Every pair as parameters of a test; all but the first *most* are marked long, and where this
    is 0, all but the pairs that are needed to meet each value once."""
    most = most or max(len(ones), len(others))
    always = {(number % len(ones), number % len(others)) for number in range(most)}
    return [
        pytest.param(one, other, marks=[] if (i, j) in always else [pytest.mark.long])
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]
