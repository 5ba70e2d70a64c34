"""The log that cannot be flooded."""

import pytest

from vllm_commext.nixl.log import RateLimitedLog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("vllm_commext.limited_log.time.monotonic", lambda: now[0])
    return now


def test_a_burst_passes_and_the_rest_is_counted(
    clock: list[float], log_lines: pytest.LogCaptureFixture
) -> None:
    log = RateLimitedLog(burst=3, period_seconds=10.0)
    for number in range(8):
        log.warning("key", f"line {number}")
    assert log_lines.messages == [f"commext nixl: line {number}" for number in range(3)]
    clock[0] += 10.0
    log.warning("key", "later")
    log.warning("key", "again")
    assert log_lines.messages[3:] == [
        "commext nixl: later (5 more like this were left out)",
        "commext nixl: again",
    ]


def test_keys_do_not_share_a_bound(clock: list[float], log_lines: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(burst=1, period_seconds=10.0)
    for key in ("a", "a", "b", "b"):
        log.warning(key, key)
    assert log_lines.messages == ["commext nixl: a", "commext nixl: b"]


def test_the_line_names_its_caller_and_percent_signs_survive(
    clock: list[float], log_lines: pytest.LogCaptureFixture
) -> None:
    RateLimitedLog().warning("key", "100 %s of it")
    (record,) = log_lines.records
    assert record.getMessage() == "commext nixl: 100 %s of it"
    assert record.filename == "test_log.py"


def test_a_peers_text_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    names = "host\nERROR all is lost\x1b[2J", "half\ud800", "Zürich 東京"
    with caplog.at_level("WARNING", "vllm.commext.nixl"):
        for name in names:
            RateLimitedLog().warning("key", f"at {name}")
    expected = [r"at host\nERROR all is lost\x1b[2J", r"at half\ud800", "at Zürich 東京"]
    assert [record.getMessage() for record in caplog.records] == [
        f"commext nixl: {line}" for line in expected
    ]
