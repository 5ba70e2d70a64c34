"""A prefill server that is killed in the middle of a prompt which the decode server reads chunk by
chunk: what has been read is not computed again, and the answer is one server's."""

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.kit import STANDS, cluster, timed_connectors
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import compare, complete
from tests.kit.servers import ProxyServer, VllmServer
from tests.kit.tiny_model import write_tiny_model

CHUNK_TOKENS, NUM_TOKENS, MAX_LEN = 64, 1900, 2048
ATOL = 0.02
BOUND_SECONDS = 120.0
FAILURES = "vllm:commext_nixl_failures_total"
READ = "vllm:commext_nixl_bytes_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
STREAMS = "commext_proxy_streams_total"


def engine(role: str, model: Path, folder: Path, file: Path) -> VllmServer:
    args = ["--max-model-len", str(MAX_LEN), "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    stands = {"connector": "StandingNixlConnector", "module_path": timed_connectors.__name__}
    more = stands if role == "kv_producer" else {}
    config = cluster.kv_transfer_config(role, policy="recompute", **more)
    return cluster.engine_server(
        role, model, folder, config, args=args, environ={STANDS: str(file)}
    )


def kill(prefill: VllmServer, decode: VllmServer, file: Path, reads: bool) -> threading.Thread:
    """Kill the prefill server once it stands in the middle of a prompt, of which the decode server
    has read some by then, unless it reads at the end alone."""
    before = scrape(decode.url)

    def act() -> None:
        end = time.monotonic() + BOUND_SECONDS
        while not timed_connectors.has_stopped(file).exists():
            assert time.monotonic() < end, "it computes no prompt"
            time.sleep(0.02)
        if reads:
            wait_for_added(decode.url, before, READ, at_least=1, seconds=BOUND_SECONDS)
        prefill.signal_all(signal.SIGKILL)
        file.unlink()

    file.touch()
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def check(model: Path, folder: Path, *, reads: bool) -> tuple[Metrics, Metrics]:
    """The prefill server is killed, and the answer is the decode server's own; what that and the
    proxy have counted since."""
    file = folder / "stands"
    prefill, decode = (engine(role, model, folder, file) for role in ("kv_producer", "kv_consumer"))
    dice = random.Random(5)
    prompt, first = ([dice.randrange(32, 127) for _ in range(NUM_TOKENS)] for _ in range(2))
    args = [*cluster.PATIENT_PROXY_ARGS, "--health-interval", "0.5"]
    with cluster.all_ready([prefill, decode]):
        right = complete(decode.url, cluster.MODEL_NAME, prompt)
        with ProxyServer("proxy", [prefill.url], [decode.url], folder, args=args) as proxy:
            complete(proxy.url, cluster.MODEL_NAME, first, max_tokens=4)  # engines meet
            before, counted = scrape(decode.url), scrape(proxy.url)
            killing = kill(prefill, decode, file, reads)
            another = {"cache_salt": "another"}  # what has been cached is not looked at
            found = complete(proxy.url, cluster.MODEL_NAME, prompt, extra=another)
            killing.join(BOUND_SECONDS)
            assert not file.exists(), "the prefill server was not killed"
            assert compare(right, found, ATOL).position is None
            added = wait_for_added(decode.url, before, FAILURES, at_least=1)
            assert added.total(FAILURES) == 1
            return added, scrape(proxy.url).minus(counted)


def test_the_decode_server_computes_the_rest_alone(deep_model: Path, tmp_path: Path) -> None:
    added, counted = check(deep_model, tmp_path, reads=True)
    read = added.total(BY_SOURCE, source="local_cache_hit")
    assert read > 0
    assert added.total(BY_SOURCE, source="local_compute") == NUM_TOKENS - read
    assert added.total(BY_SOURCE, source="external_kv_transfer") == 0
    assert counted.total(STREAMS, way="alone") == 1


@pytest.mark.long
def test_without_the_windows_of_where_it_was_lost_all_is_computed(tmp_path: Path) -> None:
    """They are read at the end alone."""
    added, _ = check(write_tiny_model(tmp_path / "swa", "swa"), tmp_path, reads=False)
    assert added.total(BY_SOURCE, source="local_compute") == NUM_TOKENS
