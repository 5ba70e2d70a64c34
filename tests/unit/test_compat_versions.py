"""The window of vLLM versions."""

import pytest

from vllm_commext import UnsupportedError
from vllm_commext.compat.versions import (
    WINDOW,
    cache_meaning,
    is_at_least,
    is_in_window,
    is_release_of,
    refuse_older,
)

MINORS = [release.minor for release in WINDOW]


@pytest.mark.parametrize("tail", [".0", ".0+cpu", ".0+cpu.over.0.32.0", ""])
def test_a_first_release_is_what_tests_were_run_on_whatever_its_label(tail: str) -> None:
    assert all(is_release_of(minor + tail, MINORS) for minor in MINORS)
    assert not is_release_of(f"{MINORS[0]}{tail}", MINORS[1:])


@pytest.mark.parametrize("tail", [".1", ".1.dev12+gabc1234", ".0rc1", ".0.post1", ".0-my build"])
def test_no_test_was_run_on_other_builds(tail: str) -> None:
    assert not any(is_release_of(minor + tail, MINORS) for minor in MINORS)


@pytest.mark.parametrize("version", ["0.27.9", "0.9.2", "0.2.8", "0"])
def test_an_older_version_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{version} is older than the window 0\.28 to"):
        refuse_older(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.34.0", "1.0.0", "2", "dev", "", "0.32.0-x y"])
def test_no_other_version_is_refused_by_its_number(version: str) -> None:
    refuse_older(version)


def test_the_window_has_its_minors_later_releases() -> None:
    assert is_in_window("0.33.7+cpu")
    assert not is_in_window("0.99.0")
    assert not is_in_window("dev")


def test_at_least_compares_numbers_not_text() -> None:
    assert is_at_least("0.30.0+cpu", "0.30")
    assert is_at_least("0.100.0", "0.30")
    assert not is_at_least("0.29.9", "0.30")
    assert not is_at_least("0.3.0", "0.30")
    assert is_at_least("dev", "0.30")


def test_the_window_is_in_order_and_without_gaps() -> None:
    numbers = [int(release.minor.split(".")[1]) for release in WINDOW]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_all_of_the_window_mean_the_same_by_a_caches_bytes_and_others_only_themselves() -> None:
    window = {cache_meaning(f"{row.minor}.1+cpu") for row in WINDOW}
    assert window == {"1"}
    assert cache_meaning("0.99.3") == cache_meaning("0.99.0rc1") == "0.99"
    assert cache_meaning("0.27.0") == "0.27"
    assert cache_meaning("dev") == "dev"
