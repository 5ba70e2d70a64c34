"""The recorder: sums, takes, and threads."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from vllm_commext.nixl.first_token import FirstToken
from vllm_commext.nixl.recorder import (
    FAILURE_REASONS,
    TransferRecorder,
    empty_data,
    is_empty,
    merge,
)
from vllm_commext.nixl.stream.producer import Handover


def records(kind: object) -> st.SearchStrategy[Any]:
    if isinstance(kind, list):
        return st.lists(st.floats(0, 9), max_size=3)
    return st.integers(0, 99)


REASONS = {"failures": FAILURE_REASONS, "first_tokens": FirstToken, "handovers": Handover}
RECORDS = st.fixed_dictionaries(
    {key: records(value) for key, value in empty_data().items()}
    | {
        key: st.dictionaries(st.sampled_from([*reasons]), st.integers(1, 9))
        for key, reasons in REASONS.items()
    }
    | {
        "gauges": st.dictionaries(
            st.sampled_from(["worker 0", "scheduler"]),
            st.dictionaries(st.sampled_from(["peers/ready", "held_requests"]), st.floats(0, 9)),
        )
    }
)


def transfer(recorder: TransferRecorder) -> None:
    recorder.observe(transfer_seconds=2.0, post_seconds=0.5)
    recorder.count(bytes=100, descriptors=6)


def test_everything_recorded_is_taken_once() -> None:
    recorder = TransferRecorder()
    assert recorder.take() is None
    transfer(recorder)
    transfer(recorder)
    for way in ("prefill", "parameters", "prefill"):
        recorder.count_reason("first_tokens", way)
    for is_expired in (True, False):
        recorder.count(expired_requests=is_expired)
    recorder.gauges("worker 0", {"held_requests": 1})
    assert recorder.take() == {
        **empty_data(),
        "transfer_seconds": [2.0, 2.0],
        "post_seconds": [0.5, 0.5],
        "bytes": 200,
        "descriptors": 12,
        "expired_requests": 1,
        "first_tokens": {"prefill": 2, "parameters": 1},
    }
    assert recorder.take() is None


def test_all_gauges_are_taken_where_one_has_changed() -> None:
    recorder = TransferRecorder()
    recorder.gauges("worker 0", {"held_requests": 1})
    recorder.gauges("worker 0", {"held_requests": 2})
    recorder.gauges("worker 1", {"held_requests": 3})
    both = {"worker 0": {"held_requests": 2}, "worker 1": {"held_requests": 3}}
    assert recorder.take_gauges() == both
    recorder.gauges("worker 0", {"held_requests": 2})
    assert recorder.take_gauges() == {}
    recorder.gauges("worker 0", {"held_requests": 0})
    assert recorder.take_gauges() == {**both, "worker 0": {"held_requests": 0}}
    assert recorder.take_gauges() == {}


@given(RECORDS, RECORDS)
@examples(20)
def test_merge_adds_key_by_key_and_leaves_the_second_alone(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    untouched = copy.deepcopy(second)
    total = merge(merge(empty_data(), first), second)
    assert second == untouched
    for key in empty_data():
        if key == "gauges":
            assert total[key] == {**first[key], **second[key]}
        elif key in REASONS:
            for reason in REASONS[key]:
                expected = first[key].get(reason, 0) + second[key].get(reason, 0)
                assert total[key].get(reason, 0) == expected
        else:
            assert total[key] == first[key] + second[key]
    assert is_empty(total) == (is_empty(first) and is_empty(second))
