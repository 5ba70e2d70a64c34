"""All four at once: prefill on two GPUs, decode on two others, CUDA graphs, a MiniMax-M2 whose norm
is ours and a dense model, our all-reduce, queue and connector, behind the proxy, chunks read while
they are computed, many requests at a time. On two GPUs all engines share both.

The oracle is the decode server, asked without the prefill server: it has the same kernels. How many
tokens share a step decides over the last bits of bfloat16 and, by the choice of experts, over more.
Steps of a server that does both are full of prompts, those of the two are small: so it is asked
twice, many at a time and few, and what came through the prefill server may differ from it as much
as it differs from itself, and where another token came both were about as likely. One at a time
there is no such excuse: then the answers are equal, to the bit. Beside it stands a server without
anything of ours, whose kernels round otherwise: its first tokens are the same as often as its own
are."""

import os
import random
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit import fixed_cache
from tests.kit.cluster import MODEL_NAME, disaggregated
from tests.kit.gpu_checks import NUM_GPUS, needs_gpus
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, compare, complete, near_enough
from tests.kit.servers import CUDA_ENVIRON, LOOPBACK, ProxyServer, Server, VllmServer, free_port
from tests.kit.tiny_kinds import Kind
from tests.kit.tiny_model import write_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed")

CONCURRENCY, FEW = 32, 2
NUM_REQUESTS = 500
MAX_TOKENS = 16
LENGTHS = range(40, 300)
ALONE_TOKENS = 257  # of each prompt that is asked alone
NUM_ALONE = 8
CHUNK_TOKENS = ALONE_TOKENS - 1
KINDS = ("minimax", "dense")
NUM_TOKEN_IDS = 256  # that both models have
KV_CACHE_BYTES = 1 << 30
DECODE_GPUS = "2,3" if NUM_GPUS >= 4 else "1,0"
PREFIX = "vllm:commext_nixl_"
STREAMS = "commext_proxy_streams_total"
ALL_ON = {
    "VLLM_COMMEXT_STRICT": "1",
    "VLLM_COMMEXT_SHM_QUEUE": "1",
    "VLLM_COMMEXT_NIXL": "1",
    "VLLM_COMMEXT_ALLREDUCE": "1",
    "VLLM_COMMEXT_REDUCE_RMS": "1",
}
CAPABILITIES = {"nixl", "shm_queue", "allreduce", "reduce_rms"}
# What no server writes as long as it serves, and what none of ours writes ever: vLLM itself kills
# its engine at the end, and may call that an error.
BAD = re.compile(r"\bERROR\b|illegal memory|Segmentation")
NEVER = re.compile(r"leaked shared_memory|illegal memory|Segmentation")

# The shapes of its attention are the real model's: vLLM's own op is right for these alone.
MINIMAX = Kind(
    "minimax_m2",
    "grouped-query attention with norms over all heads; 2 of 8 experts a token",
    {
        "num_hidden_layers": 3,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 128,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    },
)

pytestmark = [needs_gpus(2), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Cluster:
    """The servers: ``plain`` without ours, ``prefill``, ``decode``, ``proxy``."""

    kind: str
    servers: Mapping[str, Server]
    side_channels: Sequence[int]

    def ask(
        self, name: str, prompts: Sequence[Sequence[int]], at_once: int = CONCURRENCY
    ) -> list[Completion]:
        url = self.servers[name].url

        def one(prompt: Sequence[int]) -> Completion:
            return complete(url, MODEL_NAME, prompt, max_tokens=MAX_TOKENS)

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, prompts))


def draw(number: int, seed: int, lengths: Sequence[int]) -> list[list[int]]:
    numbers = random.Random(seed)
    return [
        [numbers.randrange(NUM_TOKEN_IDS) for _ in range(numbers.choice(lengths))]
        for _ in range(number)
    ]


def engine(name: str, gpus: str, model: Path, side_channel: int | None) -> VllmServer:
    config: dict[str, Any] | None = None
    environ = {"VLLM_COMMEXT": "0"}
    if side_channel is not None:
        environ = ALL_ON
        config = {
            "kv_connector": "CommextNixlConnector",
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "side_channel_host": LOOPBACK,
                "side_channel_port": side_channel,
                "handshake_timeout": 60,
            },
        }
    return VllmServer(
        name,
        model,
        model.parent,
        tensor_parallel_size=2,
        kv_transfer_config=config,
        args=[
            *("--dtype", "bfloat16", "--max-model-len", "1024", "--no-enable-prefix-caching"),
            *fixed_cache(KV_CACHE_BYTES),
            *("--max-num-seqs", str(CONCURRENCY), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--served-model-name", MODEL_NAME),
        ],
        environ={**environ, "CUDA_VISIBLE_DEVICES": gpus},
        base_environ=CUDA_ENVIRON,
        ready_seconds=400,
    )


def draw_norms(model: Path) -> Path:
    """Let a norm's weights differ, so that another rank's would not go unnoticed."""
    import torch
    from safetensors.torch import load_file, save_file

    path, generator = model / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            drawn = 1.0 + 0.3 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return model


def start(kind: str, folder: Path, stack: ExitStack) -> Cluster:
    what = MINIMAX if kind == "minimax" else "llama"
    model = draw_norms(write_tiny_model(folder / "model", what, dtype="bfloat16"))
    ports = [free_port(), free_port()]
    servers: dict[str, Server] = {
        "plain": engine("plain", "0,1", model, None),
        "decode": engine("decode", DECODE_GPUS, model, ports[1]),
        "prefill": engine("prefill", "0,1", model, ports[0]),
    }
    for server in servers.values():
        stack.callback(server.stop)
        server.start()
    for server in servers.values():
        server.wait_ready()
    prefill, decode = ([servers[name].url] for name in ("prefill", "decode"))
    front = ProxyServer("proxy", prefill, decode, model.parent)
    servers["proxy"] = stack.enter_context(front)
    return Cluster(kind, servers, ports)


@pytest.fixture(scope="module")
def before() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module", params=KINDS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, before: set[str]
) -> Iterator[Cluster]:
    assert before is not None
    with ExitStack() as stack:
        yield start(request.param, tmp_path_factory.mktemp("all_together"), stack)


def test_all_four_are_active(cluster: Cluster) -> None:
    """And the norm has run, where the model has one that is ours."""
    for name in ("prefill", "decode"):
        assert cluster.servers[name].active() == CAPABILITIES
    ran = "reduce_rms ran for MiniMax-M2" in cluster.servers["decode"].log_text()
    assert ran == (cluster.kind == "minimax")
    assert not cluster.servers["plain"].active()


def test_one_at_a_time_the_answers_are_the_decode_servers_own(cluster: Cluster) -> None:
    prefill, decode = (cluster.servers[name].url for name in ("prefill", "decode"))
    before = scrape(decode)
    answers: list[Completion] = []
    for prompt in draw(NUM_ALONE, 1, [ALONE_TOKENS]):
        own = complete(decode, MODEL_NAME, prompt, max_tokens=MAX_TOKENS)
        got = disaggregated(prefill, decode, MODEL_NAME, prompt, max_tokens=MAX_TOKENS)
        assert compare(own, got).equal
        answers.append(got)
    assert len({answer.token_ids for answer in answers}) == NUM_ALONE
    assert scrape(decode).minus(before).total(f"{PREFIX}bytes_total") > 0


def test_many_at_a_time(cluster: Cluster, record_property: Callable[[str, object], None]) -> None:
    prompts = draw(NUM_REQUESTS, 2, LENGTHS)
    plain, own = cluster.ask("plain", prompts), cluster.ask("decode", prompts)
    plain_again, own_again = (cluster.ask(name, prompts, FEW) for name in ("plain", "decode"))
    decode = cluster.servers["decode"].url
    before = scrape(decode)
    got = cluster.ask("proxy", prompts)
    moved = scrape(decode).minus(before)
    streamed = scrape(cluster.servers["proxy"].url).total(STREAMS, way="streamed")
    noise, ours = agreement(own, own_again), agreement(own, got)
    plain_noise, with_plain = agreement(plain, plain_again), agreement(plain, got)
    nats = max(compare(*pair).max_logprob for pair in zip(own, own_again, strict=True))
    others = [*own[1:], own[0]]  # the negative control
    shifted = agreement(own, others)
    figures = {
        "plain_with_itself": plain_noise,
        "ours_with_plain": with_plain,
        "decode_with_plain": agreement(plain, own),
        "decode_with_itself": noise,
        "ours_with_decode": ours,
        "decode_with_itself_nats": nats,
        "unlikely": unlikely(own, got, nats),
        "unlikely_with_itself": unlikely(own, own_again, nats),
        "with_another_prompts_answer": shifted,
        "bytes": moved.total(f"{PREFIX}bytes_total"),
        "transfers": moved.total(f"{PREFIX}transfer_seconds_count"),
        "streamed": streamed,
    }
    for name, value in figures.items():
        record_property(name, value)
    assert streamed > 0
    assert moved.total(f"{PREFIX}failures_total") == 0
    assert moved.total(f"{PREFIX}transfer_seconds_count") >= NUM_REQUESTS
    assert shifted["first tokens"] < 0.2 < noise["first tokens"]
    assert with_plain["first tokens"] > plain_noise["first tokens"] - 0.05
    assert unlikely(own, others, nats) > NUM_REQUESTS // 2
    assert unlikely(own, got, nats) <= unlikely(own, own_again, nats) + NUM_REQUESTS // 50
    for name, share in noise.items():
        assert ours[name] > share - 0.05, name


def unlikely(expected: Sequence[Completion], got: Sequence[Completion], nats: float) -> int:
    return sum(not near_enough(*pair, nats) for pair in zip(expected, got, strict=True))


def agreement(expected: Sequence[Completion], got: Sequence[Completion]) -> dict[str, float]:
    """Shares of requests whose first token, and all of whose tokens, are the same."""
    pairs = list(zip(expected, got, strict=True))
    return {
        "first tokens": sum(a.token_ids[0] == b.token_ids[0] for a, b in pairs) / len(pairs),
        "all tokens": sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    }


def test_nothing_is_left_behind(cluster: Cluster, before: set[str]) -> None:
    servers = cluster.servers
    ours = ("proxy", "prefill", "decode")
    assert {name: lines_with(BAD, servers[name]) for name in ours} == {name: [] for name in ours}
    pids = [pid for server in servers.values() for pid in server.pids()]
    assert len(pids) > 2 * len(servers)
    for name in (*ours, "plain"):
        assert servers[name].stop() == 0, name  # raises if a process outlives it
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    left = set(os.listdir("/dev/shm")) - before
    assert {name for name in left if not is_of_another(name, pids)} == set()
    for port in [server.port for server in servers.values()] + [*cluster.side_channels]:
        with socket.create_server((LOOPBACK, port)):
            pass
    assert {name: lines_with(NEVER, servers[name]) for name in ours} == {name: [] for name in ours}


def is_of_another(name: str, pids: Sequence[int]) -> bool:
    """Whether this is a semaphore of joblib's, which have their process's number in their name,
    and of a process that lives and is none of these: other programs may run beside the test."""
    found = re.match(r"sem\.loky-(\d+)-", name)
    return found is not None and int(found[1]) not in pids and Path(f"/proc/{found[1]}").exists()


def lines_with(pattern: re.Pattern[str], server: Server) -> list[str]:
    return [line for line in server.log_text().splitlines() if pattern.search(line)]
