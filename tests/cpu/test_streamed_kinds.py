"""Prompts that are read while they are computed, between real servers of tensor-parallel sizes 1
and 2 and of kinds of caches: attention, windows, states.  Latent attention is not among them: vLLM
computes its prompts in one step on CPUs without AMX.

The oracle is what the decode engine answers by itself, with chunks of the same size; between
different sizes answers may differ as much as the sizes' own answers do.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import Completion, compare, complete, near_enough
from tests.kit.servers import ProxyServer, VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import write_tiny_model

CHUNK_TOKENS = 129
LENGTHS = (2 * CHUNK_TOKENS, 4 * CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS + 64)
PREFIX = "vllm:commext_nixl_"
HANDOVERS = f"{PREFIX}handovers_total"
PAIRS = (("1", "2"), ("2", "1"))
SERVED = ("llama", "swa", "granite1", "qwen3next", "gptoss", "mixtral")

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@dataclass(frozen=True)
class Engines:
    """Servers by tensor-parallel size, what each answers by itself, and proxies by pair."""

    servers: Mapping[str, VllmServer]
    own: Mapping[str, Sequence[Completion]]
    proxies: Mapping[tuple[str, str], ProxyServer]

    @property
    def noise(self) -> float:
        """How far the own answers of the two sizes are apart, in nats."""
        pairs = zip(self.own["1"], self.own["2"], strict=True)
        return max(compare(one, two).max_logprob for one, two in pairs)


def ask(server: VllmServer | ProxyServer, prompt: Sequence[int]) -> Completion:
    return complete(server.url, cluster.MODEL_NAME, prompt)


@pytest.fixture(scope="module", params=SERVED)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = write_tiny_model(folder / "model", kind)
    args = [*KINDS[kind].cpu_options, "--no-enable-prefix-caching"]
    servers = {
        size: cluster.engine_server(
            f"engine-{size}",
            model,
            folder,
            cluster.kv_transfer_config("kv_both"),
            tensor_parallel_size=int(size),
            args=[*args, "--max-num-batched-tokens", str(CHUNK_TOKENS)],
        )
        for size in ("1", "2")
    }
    dice = random.Random(17)
    prompts = [[dice.randrange(32, 127) for _ in range(length)] for length in LENGTHS]
    with cluster.all_ready(servers.values()), ExitStack() as stack:
        own = {size: [ask(server, one) for one in prompts] for size, server in servers.items()}
        proxies = {
            (source, target): stack.enter_context(
                ProxyServer(
                    f"proxy-{source}-{target}",
                    prefill_urls=[servers[source].url],
                    decode_urls=[servers[target].url],
                    folder=folder,
                    args=[*cluster.PATIENT_PROXY_ARGS],
                )
            )
            for source, target in PAIRS
        }
        yield Engines(servers, own, proxies)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: ":".join(pair))
def test_streamed_answers_are_the_decode_engines_own(
    engines: Engines, pair: tuple[str, str]
) -> None:
    proxy, target = engines.proxies[pair], engines.servers[pair[1]]
    own = engines.own[pair[1]]
    before = scrape(target.url)
    for right in own:
        found = ask(proxy, right.prompt)
        assert compare(right, found).max_logprob <= 2 * engines.noise
        assert near_enough(right, found, engines.noise)
    altered = ask(proxy, [33, *own[1].prompt[1:-1], 33])
    assert not near_enough(own[1], replace(altered, prompt=own[1].prompt), engines.noise)
    added = wait_for_added(target.url, before, HANDOVERS, at_least=len(own) + 1)
    assert added.total(HANDOVERS, way="streamed") == len(own) + 1
    assert added.total(f"{PREFIX}failures_total") == 0
    # Chunks are reads of their own: more of them than requests.
    assert added.total(f"{PREFIX}transfer_seconds_count") > len(own) + 1
