"""What blocks are called: equal names for equal beginnings of one tenant, and for nothing else."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_commext.nixl.reuse.offers import chain, root_of
from vllm_commext.nixl.wire.messages import HASH_BYTES

FACTS = "0" * 64
NAMES = st.sampled_from(["", "a", "b", "ab", "\0", "a\0b"])
ROOTS = st.tuples(st.sampled_from([FACTS, "1" * 64]), st.sampled_from([1, 2, 3, 16]), NAMES, NAMES)
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def names_of(case: tuple[tuple[str, int, str, str], list[int]]) -> list[bytes]:
    (facts, block_size, lora, salt), tokens = case
    return chain(root_of(facts, block_size, lora=lora, cache_salt=salt), tokens, block_size)


@given(st.tuples(ROOTS, TOKENS), st.tuples(ROOTS, TOKENS))
def test_names_are_equal_where_root_and_beginning_are(
    one: tuple[tuple[str, int, str, str], list[int]],
    other: tuple[tuple[str, int, str, str], list[int]],
) -> None:
    """Brute force: what a name stands for is the root and all tokens to the block's end."""
    stands_for: dict[bytes, object] = {}
    for root, tokens in (one, other):
        size = root[1]
        names = names_of((root, tokens))
        assert len(names) == len(tokens) // size
        for position, name in enumerate(names):
            assert len(name) == HASH_BYTES
            content = root, tokens[: (position + 1) * size]
            assert stands_for.setdefault(name, content) == content
    equal = len(set(names_of(one)) & set(names_of(other)))
    size, shared = one[0][1], 0
    if one[0] == other[0]:
        while (shared + 1) * size <= min(len(one[1]), len(other[1])) and (
            one[1][: (shared + 1) * size] == other[1][: (shared + 1) * size]
        ):
            shared += 1
    assert equal == shared


def test_a_chain_goes_on_where_a_shorter_one_ends() -> None:
    root = root_of(FACTS, 4, lora="", cache_salt="salt")
    tokens = list(range(1000, 1023))
    assert chain(root, tokens, 4)[:3] == chain(root, tokens[:13], 4)


def test_lora_and_salt_are_no_substitutes_for_each_other() -> None:
    roots = {
        root_of(FACTS, 4, lora="x", cache_salt=""),
        root_of(FACTS, 4, lora="", cache_salt="x"),
        root_of(FACTS, 4, lora="", cache_salt=""),
        root_of(FACTS, 8, lora="", cache_salt=""),
    }
    assert len(roots) == 4


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_what_is_no_token_id_has_no_name(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(b"root", [1, token, 3, 4], 2)
