"""Requests' bodies as the proxy has them once it has read them."""

import json
from collections.abc import Generator, Mapping
from typing import Any

from vllm_commext.proxy.http.body import members_of


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
