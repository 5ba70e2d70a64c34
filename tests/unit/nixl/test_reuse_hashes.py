"""What blocks are called: equal names for equal beginnings of one tenant, and for nothing else."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_commext.nixl.reuse import chain, root_of
from vllm_commext.nixl.wire.messages import HASH_BYTES

FACTS = "0" * 64
NAMES = st.sampled_from(["", "a", "b", "ab", "\0", "a\0b"])
ROOTS = st.tuples(st.sampled_from([FACTS, "1" * 64]), st.sampled_from([1, 2, 3, 16]), NAMES, NAMES)
Root = tuple[str, int, str, str]
TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(ROOTS, st.none() | ROOTS, TOKENS, TOKENS)
def test_names_are_equal_where_root_and_beginning_are(
    root: Root, other_root: Root | None, tokens: list[int], other_tokens: list[int]
) -> None:
    """Brute force: what a name stands for is the root and all tokens to the block's end."""
    stands_for: dict[bytes, object] = {}
    contents: list[list[object]] = []
    found: list[list[bytes]] = []
    for (facts, size, lora, salt), ids in ((root, tokens), (other_root or root, other_tokens)):
        names = chain(root_of(facts, size, {"lora": lora, "cache_salt": salt}), ids, size)
        ends = range(size, len(ids) + 1, size)
        contents.append([(facts, size, lora, salt, ids[:end]) for end in ends])
        for name, content in zip(names, contents[-1], strict=True):
            assert len(name) == HASH_BYTES
            assert stands_for.setdefault(name, content) == content
        found.append(names)
    shared = [content for content in contents[0] if content in contents[1]]
    assert len(set(found[0]) & set(found[1])) == len(shared)


def test_lora_and_salt_are_no_substitutes_for_each_other() -> None:
    roots = {
        root_of(FACTS, 4, {"lora": "x"}),
        root_of(FACTS, 4, {"cache_salt": "x"}),
        root_of(FACTS, 4, {}),
        root_of(FACTS, 8, {}),
    }
    assert len(roots) == 4


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_what_is_no_token_id_has_no_name(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(b"root", [1, token, 3, 4], 2)
