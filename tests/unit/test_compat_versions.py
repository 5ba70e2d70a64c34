"""The vLLM versions that are tested, and what others count for."""

import pytest

from vllm_commext.compat.fits import TESTED, cache_meaning, is_tested, refuse_older


@pytest.mark.parametrize("tail", [".0", ".0+cpu", ".0+cpu.over.0.32.0", ""])
def test_a_first_release_is_what_tests_were_run_on_whatever_its_label(tail: str) -> None:
    assert all(is_tested(minor + tail) for minor in TESTED)
    assert not is_tested(f"0.34{tail}")


@pytest.mark.parametrize("tail", [".1", ".1.dev12+gabc1234", ".0rc1", ".0.post1", ".0-my build"])
def test_no_test_was_run_on_other_builds(tail: str) -> None:
    assert not any(is_tested(minor + tail) for minor in TESTED)


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0", "1.0.0", "2", "dev", "", "0.32.0-x y"])
def test_no_other_version_is_refused_by_its_number(version: str) -> None:
    refuse_older(version)


def test_all_tested_ones_mean_the_same_by_a_caches_bytes_and_others_only_themselves() -> None:
    assert {cache_meaning(f"{minor}.1+cpu") for minor in TESTED} == {"1"}
    assert cache_meaning("0.99.3") == cache_meaning("0.99.0rc1") == "0.99"
    assert cache_meaning("0.31.0") == "0.31"
    assert cache_meaning("dev") == "dev"
