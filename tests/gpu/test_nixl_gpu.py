"""Prefill on some GPUs, decode on others: real servers, dense and hybrid, several tensor-parallel
sizes.

The oracle is what a decode engine answers by itself, of engines that compute with the same kernels
(``gpu_engines``): with equal tensor-parallel sizes the answers are equal to the bit; between
different ones they may differ as much as those sizes' own answers do.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.kit.cluster import disaggregated
from tests.kit.gpu_checks import NUM_GPUS, needs_gpus
from tests.kit.gpu_engines import EngineKind, gpu_server, prompts
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, compare, complete, near_enough
from tests.kit.servers import VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import write_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed")

NUM_PROMPTS = 4
MAX_TOKENS = 8
PREFIX = "vllm:commext_nixl_"
CHOSEN = os.environ.get("COMMEXT_GPU_KINDS", "llama,granite,granite1,qwen3next").split(",")
# Engines that are up at the same time: "P" or "D" and the tensor-parallel size, and where it is. On
# two GPUs those of different sizes share some.
CLUSTERS: Mapping[int, Sequence[Mapping[str, str]]] = {
    2: [{"P1": "0", "D1": "1", "P2": "0,1"}, {"P1": "0", "D2": "0,1"}, {"P2": "0,1", "D2": "1,0"}],
    4: [{"P2": "0,1", "D1": "2", "P1": "3"}, {"P2": "0,1", "D2": "2,3"}, {"P1": "0", "D2": "2,3"}],
}
SETS = CLUSTERS[4 if NUM_GPUS >= 4 else 2]
MAPPED_READS = os.environ.get("COMMEXT_GPU_MAPPED_READS", "never")
TRANSPORTS = os.environ.get("UCX_TLS", "")
PROMPT_TOKENS = 577
PROMPTS = prompts(NUM_PROMPTS, PROMPT_TOKENS)

pytestmark = [
    needs_gpus(2),
    pytest.mark.timeout(900),
]


@dataclass(frozen=True)
class Cluster:
    """Engines of one model by name, and what each answers by itself."""

    model: str
    servers: Mapping[str, VllmServer]
    own: Mapping[str, Sequence[Completion]]


@pytest.fixture(
    scope="module",
    params=[(kind, number) for kind in CHOSEN for number in range(len(SETS))],
    ids=lambda param: f"{param[0]}-{'+'.join(SETS[param[1]])}",
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    kind, number = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = write_tiny_model(folder / "model", kind, dtype="bfloat16")
    chunk_tokens, options = PROMPT_TOKENS - 1, KINDS[kind].gpu_options
    engine = EngineKind(chunk_tokens, options, MAPPED_READS)
    places = SETS[number]
    with ExitStack() as stack:
        servers = {
            name: gpu_server(name, gpus, model, folder, engine) for name, gpus in places.items()
        }
        for server in servers.values():
            stack.callback(server.stop)
            server.start()
        for server in servers.values():
            server.wait_ready()
        own = {
            name: [
                complete(server.url, str(model), prompt, max_tokens=MAX_TOKENS)
                for prompt in PROMPTS
            ]
            for name, server in servers.items()
        }
        yield Cluster(str(model), servers, own)


def test_answers_are_the_decode_engines_own(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    decode = next(name for name in cluster.servers if name.startswith("D"))
    for prefill in cluster.servers:
        if prefill.startswith("P"):
            check(cluster, prefill, decode, lambda name, value: record_property(name, value))


def check(
    cluster: Cluster, prefill: str, decode: str, record: Callable[[str, object], None]
) -> None:
    """One prefill engine's prompts, decoded by the other."""
    source, target = cluster.servers[prefill], cluster.servers[decode]
    before = scrape(target.url)
    got = [
        disaggregated(source.url, target.url, cluster.model, prompt, max_tokens=MAX_TOKENS)
        for prompt in PROMPTS
    ]
    moved = scrape(target.url).minus(before)
    assert moved.total(f"{PREFIX}bytes_total") > 0
    assert moved.total(f"{PREFIX}failures_total") == 0
    share = moved.total(f"{PREFIX}mapped_bytes_total") / moved.total(f"{PREFIX}bytes_total")
    assert share == (1.0 if MAPPED_READS == "auto" else 0.0)
    for name in ("bytes_total", "transfer_seconds_sum", "post_seconds_sum", "descriptors_total"):
        record(f"{prefill}{decode}_{name}", moved.total(f"{PREFIX}{name}"))
    own = cluster.own[decode]
    differences = [compare(one, two) for one, two in zip(own, got, strict=True)]
    worst = max(difference.max_logprob for difference in differences)
    record(f"{prefill}{decode}_max_logprob_difference", worst)
    if prefill[1] == decode[1]:
        assert [difference for difference in differences if not difference.equal] == []
    else:
        pairs = zip(cluster.own[prefill], own, strict=True)
        noise = max(compare(one, two).max_logprob for one, two in pairs)
        record(f"{prefill}{decode}_noise_of_tensor_parallelism", noise)
        assert worst <= 2 * noise
        assert all(near_enough(one, two, noise) for one, two in zip(own, got, strict=True))
    line = target.wait_for_log("self-probe", 5)
    record(f"{prefill}{decode}_self_probe", line[line.index("self-probe") :])
    assert TRANSPORTS or "cuda_ipc" in line
