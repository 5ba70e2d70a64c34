"""The arithmetic of benchmarks/serve.py: ratios."""

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from serving import figures
from serving.figures import OFF, ON, TOKENS_PER_SECOND, Sample


@pytest.mark.parametrize(("unit", "expected"), [("ms", 2.0), (TOKENS_PER_SECOND, 0.5)])
def test_more_than_one_says_that_on_is_better(unit: str, expected: float) -> None:
    values = {OFF: [10.0, 20.0, 40.0], ON: [5.0, 10.0, 20.0]}
    samples = [
        Sample("cell", name, number, "figure", unit, value)
        for name, found in values.items()
        for number, value in enumerate(found)
    ]
    [row] = figures.rows_of(samples)
    assert (row.off, row.on) == (20.0, 10.0)
    assert row.ratios == (expected,) * 3
