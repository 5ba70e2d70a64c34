"""Decode engines that may hold the KV cache of a conversation, as prefill engines are told of them.

A decode engine's metrics page says where its blocks are asked for; what it was asked before says
what it may hold. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_commext.proxy.affinity import Prefix

if TYPE_CHECKING:
    from vllm_commext.proxy.engines import Engine

METRIC = "vllm:commext_nixl_reuse_place"
MAX_PLACES = 16
"""Named for one request."""
SideChannelFields = Mapping[str, Any]


class Offers:
    """Where one decode engine is asked for blocks. places: a side channel for each of its
    data-parallel ranks, none where it offers none. is_known: it has said so."""

    def __init__(self) -> None:
        self.clear()

    def learn(self, page: str) -> None:
        """Take the engine's metrics page. Raises `ValueError` where it is none."""
        lines = [line for line in page.splitlines() if line.startswith(METRIC + "{")]
        found: list[SideChannelFields] = []
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
            for sample in family.samples:
                if missing := {"host", "port", "seal"} - sample.labels.keys():
                    raise ValueError(f"expected {METRIC} with labels {sorted(missing)}, too")
                host, port, seal = (sample.labels[name] for name in ("host", "port", "seal"))
                found.append({"host": host, "port": int(port), "seal": seal})
        self.places, self.is_known = tuple(found), True

    def clear(self) -> None:
        """The engine may be another one from now on."""
        self.places: tuple[SideChannelFields, ...] = ()
        self.is_known = False


def places_of(engines: Iterable["Engine"], prefix: Prefix) -> list[SideChannelFields]:
    """Side channels of the engines that may hold the prompt's beginning, who holds most first."""
    held = [(one.memory.held_tokens(prefix), one) for one in engines if one.healthy]
    held.sort(key=lambda pair: -pair[0])
    places = [place for tokens, one in held if tokens > 0 for place in one.offers.places]
    return places[:MAX_PLACES]
