"""The slack of threads' timed waits, as the kernel tells it."""

import threading

import pytest

from vllm_commext.compat.timer_slack import slack_of_new_threads, timer_slack


def slack_of_a_new_thread() -> float:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(timer_slack()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_are_started_inside_are_patient_and_nobody_else() -> None:
    before = timer_slack()
    assert 0 < before < 0.001
    with slack_of_new_threads(0.25):
        assert slack_of_a_new_thread() == pytest.approx(0.25)
    assert timer_slack() == slack_of_a_new_thread() == pytest.approx(before)


def test_an_error_inside_leaves_no_slack_behind() -> None:
    before = timer_slack()
    with pytest.raises(KeyError), slack_of_new_threads(0.25):
        raise KeyError
    assert timer_slack() == pytest.approx(before)


def test_where_the_kernel_does_not_tell_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = timer_slack()
    monkeypatch.setattr("vllm_commext.compat.timer_slack.timer_slack", lambda: -1e-9)
    with slack_of_new_threads(0.25):
        assert timer_slack() == slack_of_a_new_thread() == pytest.approx(before)
