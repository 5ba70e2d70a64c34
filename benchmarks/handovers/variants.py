"""The variants: a plain server, vLLM's connector, and ours without and with its proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import engines
from engines import NONE, VLLM, Engine, Setup, Variant
from engines import OURS as CONNECTOR

from tests.kit.metrics import Metrics
from tests.kit.servers import ProxyServer, Server

PLAIN, IN_TREE, OURS = "plain", "vLLM's", "ours"
PROXIED: Mapping[str, Sequence[str]] = {
    "ours, proxy": ["--stream-chunks", "never"],
    "ours, proxy, streamed": [],
}
"""Ours behind the proxy, which asks one server after the other, or both at once."""
NAMES = (PLAIN, IN_TREE, OURS, *PROXIED)
CONNECTORS = {PLAIN: NONE, IN_TREE: VLLM, OURS: CONNECTOR}
# A proxy that was stopped in others' turns must not take that for an outage of the engines.
_PATIENT = ("--health-timeout", "600", "--engine-lost", "3600")


@contextmanager
def started(
    setup: Setup, names: Sequence[str], gpus: Sequence[str], gpu_memory: float
) -> Iterator[dict[str, Variant]]:
    """All servers, ready. Those with a proxy share the servers of ours without.

    ``gpus``: of the prefill (or plain) and of the decode server; ``gpu_memory``: share of a GPU's
    memory for each of the servers on it.
    """

    def make(name: str, role: str) -> Server:
        one = Engine(
            f"{name}-{role}",
            CONNECTORS[name],
            "both" if role == PLAIN else role,
            gpu=gpus[1 if role == "decode" else 0],
            share=gpu_memory,
            args=["--no-enable-prefix-caching"],
        )
        return engines.server(setup, one)

    made = {
        name: {role: make(name, role) for role in ([PLAIN] if name == PLAIN else roles)}
        for roles in [("prefill", "decode")]
        for name in dict.fromkeys(OURS if name in PROXIED else name for name in names)
    }
    every = [one for servers in made.values() for one in servers.values()]
    is_shared = setup.device == "cuda" and gpus[0] == gpus[1]
    with engines.ready(every, one_by_one=is_shared), ExitStack() as stack:
        variants: dict[str, Variant] = {}
        for name in names:
            front = {**made[OURS if name in PROXIED else name]}
            url = [*front.values()][-1].url
            if name in PROXIED:
                urls = [[one.url] for one in front.values()]
                label, args = name.replace(", ", "-"), [*_PATIENT, *PROXIED[name]]
                front["proxy"] = ProxyServer(label, *urls, setup.folder, args=args)
                url = stack.enter_context(front["proxy"]).url
            variants[name] = Variant(url, front)
        yield variants


def read_figures(name: str, added: Metrics) -> dict[str, float]:
    """What a decode server's metrics say of the reads between two readings, a request at a time:
    milliseconds, bytes, descriptors; of ours, how many first tokens came from the prefill server,
    and which part of the bytes was read through mappings."""
    if name == IN_TREE:
        prefix, of_ours = "vllm:nixl_", dict[str, float]()
        count, seconds = (
            added.total(f"{prefix}xfer_time_seconds_{what}") for what in ("count", "sum")
        )
        num_bytes = added.total(f"{prefix}bytes_transferred_sum")
        descriptors = added.total(f"{prefix}num_descriptors_sum")
    else:
        prefix = "vllm:commext_nixl_"
        count, seconds = (
            added.total(f"{prefix}transfer_seconds_{what}") for what in ("count", "sum")
        )
        num_bytes = added.total(f"{prefix}bytes_total")
        descriptors = added.total(f"{prefix}descriptors_total")
        mapped = added.total(f"{prefix}mapped_bytes_total")
        requests, of_prefill = (
            added.total(f"{prefix}first_tokens_total", **labels)
            for labels in (dict[str, str](), {"way": "prefill"})
        )
        of_ours = {
            "mapped %": 100 * mapped / max(num_bytes, 1),
            "first from P %": 100 * of_prefill / max(requests, 1),
        }
    share = 1 / max(count, 1)
    return {
        "read": seconds * share * 1e3,
        "MB": num_bytes * share / 1e6,
        "descriptors": descriptors * share,
        "GB/s": num_bytes / seconds / 1e9 if seconds else 0.0,
        **of_ours,
    }
