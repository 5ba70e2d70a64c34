"""Do two engines give the same meaning to the same bytes?  Compared fact by fact, so that a
difference has a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vllm_commext.errors import UnsupportedError

GEOMETRY = (
    "dtype",
    "layer_specs",
    "cache_dtype",
    "num_kv_heads",
    "head_size",
    "num_layers",
)
"""Facts that fix what the bytes mean: a difference here is refused whatever the settings say.
Sizes and order of the bytes themselves are compared by the planner."""

INFORMATIVE = ("vllm_version",)
"""Facts that are told and never refused: what they may change is compared by itself."""


def digest(facts: Mapping[str, str]) -> str:
    """SHA-256 of the facts, hexadecimal; equal if and only if all are that could be refused."""
    compared = {name: value for name, value in facts.items() if name not in INFORMATIVE}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def differences(local: Mapping[str, str], remote: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that differ: name to (local value, remote value); a missing value reads "(unknown)"."""
    names = sorted(set(local) | set(remote))
    pairs = {name: (local.get(name, "(unknown)"), remote.get(name, "(unknown)")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_facts(
    local: Mapping[str, str], remote: Mapping[str, str], *, enforce: bool
) -> dict[str, tuple[str, str]]:
    """Compare two engines' facts.

    Args:
        local: the decode engine's facts.
        remote: the prefill engine's facts.
        enforce: refuse any difference but one that only informs, not only one of geometry.

    Returns:
        The tolerated differences, to be logged.

    Raises:
        UnsupportedError: a difference that is not tolerated; the message lists every one of them.
    """
    found = differences(local, remote)
    names = set(found) - set(INFORMATIVE) if enforce else set(found) & set(GEOMETRY)
    refused = {name: pair for name, pair in found.items() if name in names}
    if not refused:
        return found
    listed = "; ".join(
        f"{name}: decode {ours!r}, prefill {theirs!r}" for name, (ours, theirs) in refused.items()
    )
    remedy = "start both engines with the same value"
    if not any(name in GEOMETRY for name in refused):
        remedy += ', or set "enforce_handshake_compat": false if they mean the same'
    raise UnsupportedError(f"the engines' configurations differ: {listed}. Remedy: {remedy}")
