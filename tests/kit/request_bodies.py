"""Requests' bodies as the proxy has them once it has read them."""

import json
from collections.abc import Generator, Mapping
from typing import Any

from hypothesis import strategies as st

from vllm_commext.proxy.http.json_members import members_of

awkward = st.text(alphabet='a"\\\n\0{[,:]}é\u2028\U0001f600', max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | awkward,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(awkward, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def run(taking_apart: Generator[None, None, Any]) -> tuple[Any, int]:
    num_yields = 0
    while True:
        try:
            next(taking_apart)
        except StopIteration as end:
            return end.value, num_yields
        num_yields += 1


def arrived(content: Mapping[str, Any]) -> dict[str, Any]:
    """*content* after its way to the proxy."""
    return run(members_of(json.dumps(content).encode()))[0]
