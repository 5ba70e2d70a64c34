"""A prefill server that is killed in the middle of a prompt which the decode server reads chunk by
chunk: what has been read is not computed again, and the answer is one server's."""

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit import STANDS, cluster, timed_connectors
from tests.kit.composed import Cluster
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import compare, complete
from tests.kit.servers import ProxyServer, VllmServer

CHUNK_TOKENS, NUM_TOKENS, MAX_LEN = 64, 1900, 2048
ATOL = 0.02
BOUND_SECONDS = 120.0
FAILURES = "vllm:commext_nixl_failures_total"
READ = "vllm:commext_nixl_bytes_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
STREAMS = "commext_proxy_streams_total"

pytestmark = pytest.mark.timeout(900)


def file_of(folder: Path, name: str) -> Path:
    """While it is there the prefill server of this name stops in the middle of a prompt."""
    return folder / f"{name}.stands"


def engine(
    name: str, role: str, model: Path, folder: Path, *more: str, policy: str = "recompute"
) -> VllmServer:
    args = ["--max-model-len", str(MAX_LEN), "--max-num-batched-tokens", str(CHUNK_TOKENS), *more]
    stands: dict[str, Any] = {}
    if role == "kv_producer":
        module = timed_connectors.__name__
        stands = {"connector": "StandingNixlConnector", "module_path": module}
    config = cluster.kv_transfer_config(role, policy=policy, **stands)
    environ = {STANDS: str(file_of(folder, name))}
    return cluster.engine_server(name, model, folder, config, args=args, environ=environ)


class Killer(threading.Thread):
    """Kills the prefill server that has stopped in the middle of a prompt, once the decode server
    has read some of that; at once where that reads only at the end."""

    def __init__(
        self, folder: Path, prefill: list[VllmServer], decode: VllmServer, reads: bool
    ) -> None:
        super().__init__(daemon=True)
        self._prefill, self._decode, self._reads = prefill, decode, reads
        self._files = {one.name: file_of(folder, one.name) for one in prefill}
        self._before = scrape(decode.url)
        self.killed: VllmServer | None = None
        for file in self._files.values():
            file.touch()
        self.start()

    def run(self) -> None:
        self._wait_until(lambda: any(map(self._has_stopped, self._prefill)))
        (server,) = filter(self._has_stopped, self._prefill)
        if self._reads:
            wait_for_added(self._decode.url, self._before, READ, at_least=1, seconds=BOUND_SECONDS)
        server.signal_all(signal.SIGKILL)
        for file in self._files.values():
            file.unlink()
        self.killed = server

    def _has_stopped(self, server: VllmServer) -> bool:
        return timed_connectors.has_stopped(self._files[server.name]).exists()

    @staticmethod
    def _wait_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + BOUND_SECONDS
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)


def tokens_of(added: Metrics, source: str) -> float:
    return added.total(BY_SOURCE, source=source)


def check(
    folder: Path, prefill: list[VllmServer], decode: VllmServer, *, reads: bool = True
) -> tuple[Metrics, Metrics]:
    """A prefill server is killed, and the answer is the decode server's own; what that and the
    proxy have counted since."""
    dice = random.Random(5)
    prompt, first = ([dice.randrange(32, 127) for _ in range(NUM_TOKENS)] for _ in range(2))
    args = [*cluster.PATIENT_PROXY_ARGS, "--health-interval", "0.5"]
    with cluster.all_ready([*prefill, decode]):
        right = complete(decode.url, cluster.MODEL_NAME, prompt)
        urls = [one.url for one in prefill]
        with ProxyServer("proxy", urls, [decode.url], folder, args=args) as proxy:
            for number, _ in enumerate(prefill):  # engines meet
                complete(proxy.url, cluster.MODEL_NAME, first[number:], max_tokens=4)
            before, counted = scrape(decode.url), scrape(proxy.url)
            killer = Killer(folder, prefill, decode, reads)
            another = {"cache_salt": "another"}  # what has been cached is not looked at
            found = complete(proxy.url, cluster.MODEL_NAME, prompt, extra=another)
            killer.join(BOUND_SECONDS)
            assert killer.killed is not None
            assert compare(right, found, ATOL).position is None
            added = wait_for_added(decode.url, before, FAILURES, at_least=1)
            assert added.total(FAILURES) == 1
            return added, scrape(proxy.url).minus(counted)


def test_the_decode_server_computes_the_rest_alone(deep_model: Path, tmp_path: Path) -> None:
    prefill = engine("p", "kv_producer", deep_model, tmp_path)
    decode = engine("d", "kv_consumer", deep_model, tmp_path)
    added, counted = check(tmp_path, [prefill], decode)
    read = tokens_of(added, "local_cache_hit")
    assert read > 0
    assert tokens_of(added, "local_compute") == NUM_TOKENS - read
    assert tokens_of(added, "external_kv_transfer") == 0
    assert counted.total(STREAMS, way="alone") == 1


@pytest.mark.long
def test_a_prompt_that_another_prefill_server_computes_is_read_from_there_on(
    deep_model: Path, tmp_path: Path
) -> None:
    """Under the policy that fails requests, the proxy begins anew."""
    prefill = [engine(f"p{n}", "kv_producer", deep_model, tmp_path) for n in range(2)]
    decode = engine("d", "kv_consumer", deep_model, tmp_path, policy="fail")
    added, _ = check(tmp_path, prefill, decode)
    read = tokens_of(added, "local_cache_hit")
    assert read > 0
    assert tokens_of(added, "external_kv_transfer") == NUM_TOKENS - read


@pytest.mark.long
def test_without_a_prefix_cache_all_is_computed(deep_model: Path, tmp_path: Path) -> None:
    prefill = engine("p", "kv_producer", deep_model, tmp_path)
    decode = engine("d", "kv_consumer", deep_model, tmp_path, "--no-enable-prefix-caching")
    added, _ = check(tmp_path, [prefill], decode)
    assert tokens_of(added, "local_compute") == NUM_TOKENS


@pytest.mark.long
def test_without_the_windows_of_where_it_was_lost_all_is_computed(composed: Cluster) -> None:
    """They are read at the end alone."""
    model, folder = composed.model("swa"), composed.folder
    prefill = engine("p", "kv_producer", model, folder)
    added, _ = check(folder, [prefill], engine("d", "kv_consumer", model, folder), reads=False)
    assert tokens_of(added, "local_compute") == NUM_TOKENS
