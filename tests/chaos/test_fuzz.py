"""Garbage in bulk; ``make fuzz`` sends a million frames and 100,000 notifications."""

import pytest

from tests.chaos.fuzzing import Growth, fuzz_notifications, fuzz_side_channel

MAX_BYTES = 24 << 20


def assert_steady(growth: Growth, num_sent: int) -> None:
    assert growth.num_sent == num_sent
    assert growth.num_refused > num_sent // 2
    assert growth.rss_bytes < MAX_BYTES
    assert growth.num_threads <= 0
    assert growth.num_descriptors <= 0


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
def test_the_side_channel_answers_every_frame_and_keeps_nothing(secret: bytes | None) -> None:
    assert_steady(fuzz_side_channel(10_000, seed=1, secret=secret), 10_000)


@pytest.mark.usefixtures("real_servers")
def test_a_holder_takes_every_notification_and_keeps_a_bounded_number() -> None:
    growth = fuzz_notifications(3_000, seed=1)
    assert growth.num_sent == 3_000
    assert growth.num_refused > 1_000
    assert growth.rss_bytes < MAX_BYTES
    assert growth.num_threads <= 0
    assert growth.num_descriptors <= 0
