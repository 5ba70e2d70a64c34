"""One request at a time through a prefill and a decode server on this machine, with ours and with
vLLM's connector.

The pairs of servers are started in turn.  Both use our message queue: with vLLM's, four processes
that spin share two cores here, and requests wait for tens of seconds.  Each prompt is new.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kv_connector.samples import OURS, VLLM, Sample
from tests.kit import cluster
from tests.kit.parity import complete, prefill
from tests.kit.servers import VllmServer, free_port

PROMPT_TOKENS = 200
ANSWER_TOKENS = 16
NUM_WARM = 5
REQUEST_SECONDS = 120.0
IN_TREE = "NixlConnector"
FIRST, DECODE, WHOLE = "decode request, first token", "decode request", "prefill and decode"


def _server(variant: str, role: str, model: Path, folder: Path) -> VllmServer:
    """vLLM's takes its side channel from the environment; all but the connector is alike."""
    name = f"{variant}-{role}"
    if variant == OURS:
        config = cluster.kv_transfer_config(role)
        return cluster.engine_server(name, model, folder, config)
    config = cluster.kv_transfer_config(role, connector=IN_TREE)
    config["kv_connector_extra_config"] = {}
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_COMMEXT_NIXL": "0"}
    return cluster.engine_server(name, model, folder, config, environ=environ)


def measure_latency(model: Path, folder: Path, num_requests: int, rounds: int) -> list[Sample]:
    """Medians and 90th percentiles of each start of the servers, which take turns."""
    samples: list[Sample] = []
    dice = random.Random(0)
    for number in range(rounds):
        for variant in (OURS, VLLM) if number % 2 == 0 else (VLLM, OURS):
            samples += _one_start(variant, model, folder, num_requests, dice)
    return samples


def _one_start(
    variant: str, model: Path, folder: Path, num_requests: int, dice: random.Random
) -> Iterator[Sample]:
    servers = [_server(variant, role, model, folder) for role in ("kv_producer", "kv_consumer")]
    with cluster.all_ready(servers):
        urls = servers[0].url, servers[1].url
        _check(*urls)
        found = [_request(*urls, dice) for _ in range(NUM_WARM + num_requests)][NUM_WARM:]
    for case, values in zip((FIRST, DECODE, WHOLE), zip(*found, strict=True), strict=True):
        tenths = statistics.quantiles(values, n=10)
        yield Sample(f"{case}, median", "ms", variant, statistics.median(values))
        yield Sample(f"{case}, p90", "ms", variant, tenths[-1])


def _check(prefill_url: str, decode_url: str) -> None:
    """Both ways to an answer give the same tokens, so that something is transferred.

    Raises:
        RuntimeError: they differ.
    """
    prompt = [32 + 7 * number % 90 for number in range(PROMPT_TOKENS)]
    through = cluster.disaggregated(prefill_url, decode_url, cluster.MODEL_NAME, prompt)
    alone = complete(prefill_url, cluster.MODEL_NAME, prompt)
    if through.token_ids != alone.token_ids:
        raise RuntimeError(f"expected {alone.token_ids}, got {through.token_ids}")


def _request(prefill_url: str, decode_url: str, dice: random.Random) -> tuple[float, float, float]:
    """Milliseconds: decode's first token, decode, prefill and decode."""
    prompt = [dice.randrange(32, 127) for _ in range(PROMPT_TOKENS)]
    started = time.perf_counter()
    params = prefill(prefill_url, cluster.MODEL_NAME, prompt)
    prefilled = time.perf_counter()
    first = _stream(decode_url, prompt, params)
    ended = time.perf_counter()
    return 1e3 * (first - prefilled), 1e3 * (ended - prefilled), 1e3 * (ended - started)


def _stream(url: str, prompt: list[int], params: dict[str, Any]) -> float:
    """When the first token came; returns at the end of the answer."""
    body = {
        "model": cluster.MODEL_NAME,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "kv_transfer_params": params,
    }
    first = 0.0
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=REQUEST_SECONDS, trust_env=False
    ) as response:
        for line in response.raise_for_status().iter_lines():
            if not first and line.startswith("data:") and json.loads(line[5:]).get("choices"):
                first = time.perf_counter()
    if not first:
        raise RuntimeError(f"{url} streamed no token")
    return first
