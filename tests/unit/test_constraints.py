"""`deploy/constraints.txt` pins all that the package brings in, and nothing that vLLM does."""

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PINNED = dict(
    line.split("==")
    for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
EXTRAS = ("nixl", "proxy")
VLLMS = re.compile(r"(torch|nvidia|cuda|triton)")
"""vLLM pins torch and what that needs."""


def required(name: str, extras: tuple[str, ...]) -> list[Requirement]:
    listed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return [
        one
        for one in listed
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def test_all_that_is_brought_in_is_pinned_within_what_is_asked_for() -> None:
    todo, found = required("vllm-commext", EXTRAS), set[str]()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if VLLMS.match(name):
            continue
        assert one.specifier.contains(PINNED[name]), f"{one}: {PINNED[name]} is pinned"
        if name not in found:
            found.add(name)
            todo += required(name, tuple(one.extras))
    assert found >= {"aiohttp", "msgspec", "nixl", "nixl-cu13"}
