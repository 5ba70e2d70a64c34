"""What is compared: a plain server, vLLM's connector, and ours without and
with its proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import engines
from engines import NONE, VLLM, Engine, Setup, Variant
from engines import OURS as CONNECTOR

from tests.kit.metrics import Metrics
from tests.kit.servers import LOOPBACK, ProxyServer, Server, VllmServer, free_port

PLAIN, IN_TREE, OURS = "plain", "vLLM's", "ours"
OURS_SAMPLING = "ours, D samples all"
"""Ours with every first token sampled by the decode server."""
OURS_PROXY, OURS_STREAMED = "ours, proxy", "ours, proxy, streamed"
"""Ours behind the proxy, which asks one server after the other, or both at once."""
OURS_MAPPED = "ours, mapped"
"""Ours with the prefill server's memory mapped, where NIXL reads it else; behind the proxy too."""
OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED = f"{OURS_PROXY}, mapped", f"{OURS_STREAMED}, mapped"
PLAIN_PROXY = "plain, proxy"
"""The plain server behind the proxy, which takes it for a decode server and asks no other: what the
proxy itself costs."""
PROXIED: Mapping[str, Sequence[str]] = {
    PLAIN_PROXY: ["--min-prompt-tokens", str(1 << 30)],
    OURS_PROXY: ["--stream-chunks", "never"],
    OURS_STREAMED: [],
    OURS_PROXY_MAPPED: ["--stream-chunks", "never"],
    OURS_STREAMED_MAPPED: [],
}
ON_GPUS_ONLY = (OURS_MAPPED, OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED)
"""Host memory is not mapped."""
PLAINS = (PLAIN, PLAIN_PROXY)
_OURS_PROXIED = (one for one in PROXIED if one != PLAIN_PROXY)
_ALL_OURS = (OURS_SAMPLING, OURS, OURS_MAPPED, *_OURS_PROXIED)
NAMES = (PLAIN, PLAIN_PROXY, IN_TREE, *_ALL_OURS)
# A proxy that was stopped in others' turns must not take that for an outage of the engines.
_PATIENT = ("--health-timeout", "600", "--engine-lost", "3600")
_OURS = "vllm:commext_nixl_"
_THEIRS = "vllm:nixl_"


def _servers_of(name: str) -> str:
    """Whose servers are behind the proxy of this name; its own without a proxy."""
    if name not in PROXIED or name == PLAIN_PROXY:
        return name.removesuffix(", proxy")
    return OURS_MAPPED if name in (OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED) else OURS


def _server(
    setup: Setup, name: str, role: str, gpus: Sequence[str], gpu_memory: float
) -> VllmServer:
    ours = name in _ALL_OURS
    extra = {
        "first_token_from_prefill": name != OURS_SAMPLING,
        "mapped_reads": "auto" if name == OURS_MAPPED else "never",
    }
    one = Engine(
        f"{name.replace(', ', '-')}-{role}",
        CONNECTOR if ours else NONE if name == PLAIN else VLLM,
        role,
        gpu=gpus[1 if role == "decode" else 0],
        share=gpu_memory,
        extra=extra,
        args=["--no-enable-prefix-caching"],
    )
    return engines.server(setup, one)


@contextmanager
def started(
    setup: Setup, names: Sequence[str], gpus: Sequence[str], gpu_memory: float
) -> Iterator[dict[str, Variant]]:
    """All servers, ready. Those with a proxy share the servers of ours without.

    ``gpus``: of the prefill (or plain) and of the decode server; ``gpu_memory``: share of a GPU's
    memory for each of the servers on it.
    """
    made = {
        name: {
            role: _server(setup, name, role, gpus, gpu_memory)
            for role in (["plain"] if name == PLAIN else ["prefill", "decode"])
        }
        for name in dict.fromkeys(map(_servers_of, names))
    }
    every = [one for servers in made.values() for one in servers.values()]
    is_shared = setup.device == "cuda" and gpus[0] == gpus[1]
    with engines.ready(every, one_by_one=is_shared), ExitStack() as stack:
        variants: dict[str, Variant] = {}
        for name in names:
            front: dict[str, Server] = {**made[_servers_of(name)]}
            url = front["plain" if name in PLAINS else "decode"].url
            if name in PROXIED:
                front["proxy"] = proxy = stack.enter_context(_proxy(setup, name, front))
                url = proxy.url
            variants[name] = Variant(url, front)
        yield variants


def _proxy(setup: Setup, name: str, servers: Mapping[str, Server]) -> Server:
    return ProxyServer(
        name.replace(", ", "-"),
        [servers["prefill"].url if name != PLAIN_PROXY else f"http://{LOOPBACK}:{free_port()}"],
        [servers["decode" if name != PLAIN_PROXY else "plain"].url],
        setup.folder,
        args=[*_PATIENT, *PROXIED[name]],
    )


def read_figures(name: str, added: Metrics) -> dict[str, float]:
    """What a decode server's metrics say of the reads between two readings, a request at a time:
    milliseconds to post and to end, bytes, descriptors (of ours before NIXL merges neighbours); of
    ours, how many first tokens came from the prefill server, and which part of the bytes was read
    through mappings."""
    from_prefill: dict[str, float] = {}
    if name in _ALL_OURS:
        requests = added.total(f"{_OURS}first_tokens_total")
        of_prefill = added.total(f"{_OURS}first_tokens_total", way="prefill")
        from_prefill["first from P %"] = 100 * of_prefill / requests if requests else 0.0
        count = added.total(f"{_OURS}transfer_seconds_count")
        seconds, post = (added.total(f"{_OURS}{what}_seconds_sum") for what in ("transfer", "post"))
        num_bytes = added.total(f"{_OURS}bytes_total")
        mapped = added.total(f"{_OURS}mapped_bytes_total")
        from_prefill["mapped %"] = 100 * mapped / num_bytes if num_bytes else 0.0
        descriptors = added.total(f"{_OURS}descriptors_total")
    else:
        count = added.total(f"{_THEIRS}xfer_time_seconds_count")
        seconds, post = (
            added.total(f"{_THEIRS}{what}_time_seconds_sum") for what in ("xfer", "post")
        )
        num_bytes = added.total(f"{_THEIRS}bytes_transferred_sum")
        descriptors = added.total(f"{_THEIRS}num_descriptors_sum")
    share = 1 / count if count else 0.0
    return {
        "read": seconds * share * 1e3,
        "post": post * share * 1e3,
        "MB": num_bytes * share / 1e6,
        "descriptors": descriptors * share,
        "GB/s": num_bytes / seconds / 1e9 if seconds else 0.0,
        **from_prefill,
    }
