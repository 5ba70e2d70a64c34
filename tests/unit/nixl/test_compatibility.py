"""Configuration facts: what differs is named, and what cannot be tolerated is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.wire.description import GEOMETRY, check_facts, differences, digest

FACTS = {"model": "a", "dtype": "bfloat16", **dict.fromkeys(GEOMETRY, "1")}

NAMES = st.sampled_from(["model", "dtype", "weight_files", *GEOMETRY])
SETS = st.dictionaries(NAMES, st.sampled_from(["1", "2", "three"]))


@given(SETS, SETS)
@settings(max_examples=40)
def test_differences_are_exactly_those_and_the_digest_agrees(
    local: dict[str, str], remote: dict[str, str]
) -> None:
    found = differences(local, remote)
    for name in set(local) | set(remote):
        same = name in local and name in remote and local[name] == remote[name]
        assert (name in found) != same
    assert (digest(local) == digest(remote)) == (not found)


def test_a_missing_fact_reads_unknown_on_its_side() -> None:
    assert differences({"model": "a"}, {"dtype": "b"}) == {
        "dtype": ("(unknown)", "b"),
        "model": ("a", "(unknown)"),
    }


@given(SETS, SETS, st.booleans())
@settings(max_examples=60)
def test_refused_exactly_where_it_must_be(
    local: dict[str, str], remote: dict[str, str], enforce: bool
) -> None:
    found = differences(local, remote)
    fatal = set(found) if enforce else set(found) & set(GEOMETRY)
    if not fatal:
        assert check_facts(local, remote, enforce=enforce) == found
        return
    with pytest.raises(UnsupportedError) as raised:
        check_facts(local, remote, enforce=enforce)
    for name in fatal:
        ours, theirs = found[name]
        assert f"{name}: decode {ours!r}, prefill {theirs!r}" in str(raised.value)
    helps = '"enforce_handshake_compat": false' in str(raised.value)
    assert helps == (not fatal & set(GEOMETRY))
    assert ("load the same weight files" in str(raised.value)) == ("weight_files" in fatal)


@pytest.mark.parametrize("enforce", [False, True])
def test_another_version_of_vllm_is_told_and_not_refused(enforce: bool) -> None:
    other = {**FACTS, "vllm_version": "0.30"}
    own = {**FACTS, "vllm_version": "0.32"}
    assert check_facts(own, other, enforce=enforce) == {"vllm_version": ("0.32", "0.30")}
    assert digest(own) == digest(other)
