"""Digests of prompts: equal exactly where all that the KV cache depends on is."""

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire.prompt import DIGEST_DIGITS, PARTS, Prompt, check_prompt, digests

WHOLE = Prompt(
    num_tokens=6,
    token_ids=[7, 8, 9, 10, 11, 12],
    embeddings=torch.arange(12, dtype=torch.bfloat16).reshape(6, 2),
    is_token=[True, False, True, False, True, True],
    lora="adapter",
    cache_salt="salt",
    items=(("image", 0, 2), ("sound", 4, 1)),
    weights="generation",
    files="checkpoint",
)
CHANGES: dict[str, list[dict[str, Any]]] = {
    "tokens": [{"token_ids": [7, 8, 9, 10, 12, 12]}, {"token_ids": None}],
    "embeddings": [
        {"embeddings": WHOLE.embeddings + 1},
        {"embeddings": WHOLE.embeddings.to(torch.float16)},
        {"embeddings": WHOLE.embeddings.reshape(12, 1)[:6]},
        {"embeddings": None},
        {"is_token": [False, *WHOLE.is_token[1:]]},
        {"is_token": None},
    ],
    "lora": [{"lora": "other"}, {"lora": ""}],
    "cache_salt": [{"cache_salt": "other"}, {"cache_salt": ""}],
    "weights": [{"weights": "other"}, {"weights": ""}],
    "files": [{"files": "other"}, {"files": ""}],
    "multimodal": [
        {"items": (("other", 0, 2), ("sound", 4, 1))},
        {"items": (("image", 1, 2), ("sound", 4, 1))},
        {"items": (("image", 0, 3), ("sound", 4, 1))},
        {"items": (("image", 0, 2),)},
        {"items": ()},
    ],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_change_shows_in_its_part_and_is_named(part: str) -> None:
    own = digests(WHOLE, 6)
    assert set(own) == set(PARTS)
    assert all(len(one) == DIGEST_DIGITS for one in own.values())
    for change in CHANGES[part]:
        other = digests(replace(WHOLE, **change), 6)
        assert {name for name in PARTS if own.get(name) != other.get(name)} == {part}, change
        for one, two in ((own, other), (other, own)):
            with pytest.raises(ProtocolError, match=f"by P .*with other {PARTS[part]}"):
                check_prompt(one, two, "computed by P")
    check_prompt(own, dict(reversed(own.items())), "P")


def test_what_comes_after_the_computed_tokens_does_not_count() -> None:
    computed = digests(WHOLE, 4)
    later: list[dict[str, Any]] = [
        {"token_ids": [7, 8, 9, 10, 1, 2]},
        {"embeddings": torch.cat([WHOLE.embeddings[:4], torch.ones(2, 2, dtype=torch.bfloat16)])},
        {"is_token": [*WHOLE.is_token[:4], False, False]},
        {"items": (("image", 0, 2), ("another", 4, 1))},
        {"items": (("image", 0, 2),)},
    ]
    for change in later:
        assert digests(replace(WHOLE, **change), 4) == computed, change
    # An item that begins before the cut counts whole.
    assert digests(replace(WHOLE, items=(("image", 3, 2),)), 4) != digests(
        replace(WHOLE, items=(("image", 3, 3),)), 4
    )


def test_a_part_of_a_newer_version_is_refused() -> None:
    own = digests(WHOLE, 6)
    with pytest.raises(ProtocolError, match="other parts than are known here"):
        check_prompt(own, {**own, "language": "0" * 64}, "P")


@given(st.lists(st.integers(0, 1 << 31), max_size=40), st.integers(0, 40), st.data())
@settings(max_examples=80)
def test_tokens_are_hashed_as_one_array(tokens: list[int], num_tokens: int, data: Any) -> None:
    found = digests(Prompt(len(tokens), tokens), num_tokens)
    packed = msgspec.msgpack.encode(tokens[:num_tokens])
    assert found == {"tokens": hashlib.sha256(packed).hexdigest()}
    if tokens[:num_tokens]:
        place = data.draw(st.integers(0, len(tokens[:num_tokens]) - 1))
        tokens[place] += 1
        assert digests(Prompt(len(tokens), tokens), num_tokens) != found
