"""Real servers of a model with sliding windows, at the lengths where the first token that the
prompt's last one attends to is the last of its block, and around them."""

import random
from collections.abc import Iterator

import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import compare, complete
from tests.kit.servers import VllmServer
from tests.kit.tiny_model import write_tiny_model

WINDOW = 64  # of the kind "swa"
AT_A_BLOCKS_END = [
    WINDOW + num_blocks * cluster.BLOCK_SIZE - 1 for num_blocks in range(1, 5)
]  # 95, 127, 159, 191
LENGTHS = [2, WINDOW - 1, WINDOW, WINDOW + 1, *AT_A_BLOCKS_END, 96, 128]
ATOL = 1e-4
"""Nats, in float32; what is computed in one step here is computed in two after a load."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """A prefill and a decode engine; the second answers by itself, too."""
    folder = tmp_path_factory.mktemp("windows")
    model = write_tiny_model(folder / "model", "swa")
    args = ["--no-enable-prefix-caching"]
    prefill, decode = (
        cluster.engine_server(role, model, folder, cluster.kv_transfer_config(role), args=args)
        for role in ("kv_producer", "kv_both")
    )
    with cluster.all_ready([prefill, decode]):
        yield prefill, decode


def test_every_length_gives_the_single_servers_answer(
    servers: tuple[VllmServer, VllmServer],
) -> None:
    prefill, decode = servers
    numbers = random.Random(7)
    for length in LENGTHS:
        prompt = [numbers.randrange(256) for _ in range(length)]
        own = complete(decode.url, cluster.MODEL_NAME, prompt)
        before = scrape(decode.url)
        got = cluster.disaggregated(prefill.url, decode.url, cluster.MODEL_NAME, prompt)
        difference = compare(own, got, ATOL)
        assert difference.equal, f"{length} tokens: {difference}"
        moved = scrape(decode.url).minus(before)
        assert moved.total("vllm:commext_nixl_bytes_total") > 0, f"{length} tokens"
