"""Peers read from and write to copies of the caches in host memory: real servers, told to keep
such copies although NIXL reaches their caches, with vLLM's own queue between engine and worker."""

import random
from contextlib import ExitStack
from pathlib import Path

from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import scrape
from vllm_commext.testing.parity import compare, complete

PROMPT_TOKENS = (20, 33, 130, 300)
STEP_TOKENS = 128


def test_answers_are_one_servers(model: Path, tmp_path: Path) -> None:
    """Long prompts are prefilled in several steps, which all have to be copied."""
    numbers = random.Random(11)
    prompts = [[numbers.randrange(256) for _ in range(count)] for count in PROMPT_TOKENS]
    with ExitStack() as stack:
        servers = [
            cluster.engine_server(
                role,
                model,
                tmp_path,
                cluster.kv_transfer_config(role, extra={"host_copy": True}),
                environ={"VLLM_COMMEXT_SHM_QUEUE": "0"},
                args=["--no-enable-prefix-caching", "--max-num-batched-tokens", str(STEP_TOKENS)],
            )
            for role in ("kv_producer", "kv_consumer")
        ]
        for server in servers:
            server.start()
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready()
        prefill, decode = servers
        own = [complete(prefill.url, cluster.MODEL_NAME, prompt) for prompt in prompts]
        got = [
            cluster.disaggregated(prefill.url, decode.url, cluster.MODEL_NAME, prompt)
            for prompt in prompts
        ]
        metrics = scrape(decode.url)
    assert metrics.total("vllm:commext_nixl_transfer_seconds_count") == len(prompts)
    assert metrics.total("vllm:commext_nixl_failures_total") == 0
    for one, two in zip(own, got, strict=True):
        difference = compare(one, two, atol=1e-4)
        assert difference.equal, difference
