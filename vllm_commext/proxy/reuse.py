"""Decode engines that may hold the KV cache of a conversation, as prefill engines are told of them:
what they were asked before says what they may hold. Pure.
"""

from collections.abc import Iterable, Mapping

from vllm_commext.proxy.affinity import Prefix
from vllm_commext.proxy.engines import Engine

MAX_PLACES = 16
"""Named for one request."""
SideChannelFields = Mapping[str, str | int]


def places_of(engines: Iterable[Engine], prefix: Prefix) -> list[SideChannelFields]:
    """Side channels of the engines that may hold the prompt's beginning, who holds most first."""
    held = [(one.memory.held_tokens(prefix), one) for one in engines if one.healthy]
    held.sort(key=lambda pair: -pair[0])
    places = [place for tokens, one in held if tokens > 0 for place in one.capabilities.offers]
    return places[:MAX_PLACES]
