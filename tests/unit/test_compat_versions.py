"""The window of vLLM versions."""

import pytest

from vllm_commext.compat.versions import WINDOW, Verdict, cache_meaning, is_at_least, judge

TESTED = [release.minor for release in WINDOW if release.contract]
UNTESTED = [release.minor for release in WINDOW if not release.contract]


@pytest.mark.parametrize("minor", TESTED)
@pytest.mark.parametrize("tail", [".0", ".1", ".0+cpu", ".1.dev12+gabc1234", ".0rc1", ".0.post1"])
def test_builds_of_a_tested_release_are_inside(minor: str, tail: str) -> None:
    assert judge(minor + tail).verdict is Verdict.INSIDE


@pytest.mark.parametrize("minor", UNTESTED)
def test_an_untested_release_of_the_window_is_unverified(minor: str) -> None:
    judgement = judge(f"{minor}.0")
    assert judgement.verdict is Verdict.UNVERIFIED
    assert "not tested" in judgement.reason


@pytest.mark.parametrize("version", ["0.34.0", "0.34.0.dev1+g1", "1.0.0", "2"])
def test_a_newer_version_is_unverified(version: str) -> None:
    judgement = judge(version)
    assert judgement.verdict is Verdict.UNVERIFIED
    assert "newer than the window 0.28 to 0.33" in judgement.reason


@pytest.mark.parametrize("version", ["0.27.9", "0.9.2", "0.2.8", "0"])
def test_an_older_version_is_outside(version: str) -> None:
    judgement = judge(version)
    assert judgement.verdict is Verdict.OUTSIDE
    assert version in judgement.reason


@pytest.mark.parametrize("version", ["dev", "", "0.32.0-cpu-custom build"])
def test_what_is_no_version_is_unverified(version: str) -> None:
    assert judge(version).verdict is Verdict.UNVERIFIED


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
