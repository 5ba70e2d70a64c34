"""Garbage in bulk; ``make fuzz`` sends a million frames and 100,000 notifications."""

import pytest

from tests.chaos.fuzzing import Growth, fuzz_notifications, fuzz_side_channel, is_steady


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
def test_the_side_channel_answers_every_frame_and_keeps_nothing(secret: bytes | None) -> None:
    growth = fuzz_side_channel(10_000, seed=1, secret=secret)
    assert growth.num_sent == 10_000
    assert growth.num_refused > 5_000
    assert is_steady(growth), growth


@pytest.mark.usefixtures("forked_servers")
def test_a_holder_takes_every_notification_and_keeps_a_bounded_number() -> None:
    growth = fuzz_notifications(3_000, seed=1)
    assert growth.num_sent == 3_000
    assert growth.num_refused > 1_000
    assert is_steady(growth), growth


def test_what_is_kept_of_every_message_is_no_steady_state() -> None:
    pools = Growth(3_000, 2_500, 1 << 20, -100, 0, 0)
    assert is_steady(pools)
    for change in (
        {"heap_bytes": 3_000 * 4096},
        {"num_blocks": 3_000},
        {"num_threads": 1},
        {"num_descriptors": 1},
    ):
        assert not is_steady(pools._replace(**change))
