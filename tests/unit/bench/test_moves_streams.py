"""Figures of streams whose engine went, of `benchmarks/moves.py`."""

import pytest
from moving.streams import Span, Stream, figures


def test_a_gap_counts_where_it_overlaps_the_span() -> None:
    stream = Stream([1], 6, ids=[5] * 6, times=[0.0, 1.0, 1.1, 1.2, 1.5, 1.6], num_resumed=1)
    found = figures(stream, Span(steady=1.0, went=1.25, empty=1.4))
    assert found["p99 before"] == pytest.approx(300)
    found = figures(stream, Span(steady=1.0, went=1.2, empty=1.4))
    assert found["p99 before"] == pytest.approx(100)
    assert found["longest"] == pytest.approx(300)
    assert found["beyond"] == pytest.approx(200)
    assert found["on"] == pytest.approx(100)
    assert (found["tokens"], found["resumed"]) == (6, 1)


def test_a_stream_that_does_not_go_on_has_no_time_for_it() -> None:
    found = figures(Stream([1], 2, ids=[5], times=[0.0]), Span(0.0, 0.5, 1.0))
    assert found["on"] != found["on"]
