"""A decode engine that does not fit the prefill engine: the difference is named, the policy is
followed, and both go on serving."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import CompletionError, compare, complete, prefill
from tests.kit.servers import Server, ServerEndedError, VllmServer

LOG_SECONDS = 30
# What nobody reads is soon freed: an engine that holds blocks goes on stepping.
LEASE_SECONDS = 5
PREFILL = "prefill"
FAILURES = "vllm:commext_nixl_failures_total"
HELD = "vllm:commext_nixl_held_requests"
# What differs, and what the message must give.
FACTS = {
    "model": ("configurations differ", ("model:", "dtype:")),
    "block-size": ("holds 64 tokens in the decode engine, 32 in the prefill", ("--block-size",)),
}
POLICIES = {"model": "recompute", "block-size": "fail"}


@pytest.fixture(scope="module")
def servers(
    model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmServer]]:
    folder = tmp_path_factory.mktemp("mismatch")

    def decode(kind: str, served: Path, *args: str) -> VllmServer:
        config = cluster.kv_transfer_config("kv_consumer", policy=POLICIES[kind])
        return cluster.engine_server(f"decode-{kind}", served, folder, config, args=args)

    made = {
        PREFILL: cluster.engine_server(
            PREFILL,
            model,
            folder,
            cluster.kv_transfer_config("kv_producer", extra={"kv_lease_duration": LEASE_SECONDS}),
        ),
        "model": decode("model", other_model, "--dtype", "bfloat16"),
        "block-size": decode("block-size", model, "--block-size", "64"),
    }
    with cluster.all_ready(made.values()):
        yield made


def assert_own_answers(server: Server) -> None:
    """The server still answers ordinary requests, twice alike."""
    prompt = tuple(range(40, 90))
    one, other = (complete(server.url, cluster.MODEL_NAME, prompt) for _ in range(2))
    assert compare(one, other).tokens_equal


@pytest.mark.parametrize("kind", FACTS)
def test_the_difference_is_named(servers: dict[str, VllmServer], kind: str) -> None:
    rng = random.Random(kind)
    prompt = [rng.randrange(32, 127) for _ in range(100)]
    decode, prefill_server = servers[kind], servers[PREFILL]
    before, start = scrape(decode.url), len(decode.log_text())

    def ask() -> None:
        got = cluster.disaggregated(prefill_server.url, decode.url, cluster.MODEL_NAME, prompt)
        own = complete(decode.url, cluster.MODEL_NAME, prompt)
        assert own.token_ids[0] == got.token_ids[0], "not recomputed by the decode engine itself"

    if POLICIES[kind] == "recompute":
        ask()
    else:
        with pytest.raises(CompletionError):
            ask()
    said, facts = FACTS[kind]
    line = decode.wait_for_log(said, LOG_SECONDS, start)
    for fact in (*facts, "decode", "prefill", "Remedy"):
        assert fact in line
    complete(decode.url, cluster.MODEL_NAME, [32, 33], max_tokens=2)
    added = wait_for_added(decode.url, before, FAILURES, at_least=1)
    assert added.total(FAILURES, reason="configuration") == added.total(FAILURES) == 1
    assert added.total("vllm:commext_nixl_bytes_total") == 0
    for server in (decode, prefill_server):
        assert_own_answers(server)


@pytest.fixture(scope="module")
def refused(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmServer]]:
    """Servers that must end while they start, started at the same time."""
    folder = tmp_path_factory.mktemp("refused")
    # A package called nixl that does not load, as a broken installation's.
    package = folder / "site" / "nixl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libucp.so.0 is not there')\n")
    config = cluster.kv_transfer_config("kv_producer")
    misspelt = cluster.kv_transfer_config("kv_producer", extra={"kv_lease_duraton": 5})
    environ = {"no-nixl": {"PYTHONPATH": str(package.parent)}, "off": {"VLLM_COMMEXT": "0"}}
    made = {
        name: cluster.engine_server(
            name,
            model,
            folder,
            misspelt if name == "misspelt" else config,
            environ=environ.get(name),
        )
        for name in ("misspelt", "off", "no-nixl")
    }
    with ExitStack() as stack:
        for server in made.values():
            stack.callback(server.stop)
            server.start()
        yield made


def test_an_unknown_setting_ends_the_server_with_the_known_ones(
    refused: dict[str, VllmServer],
) -> None:
    with pytest.raises(ServerEndedError):
        refused["misspelt"].wait_ready()
    line = refused["misspelt"].wait_for_log("unknown keys ['kv_lease_duraton']", 0)
    assert "'kv_lease_duration'" in line


def test_switched_off_the_connector_is_unknown(refused: dict[str, VllmServer]) -> None:
    with pytest.raises(ServerEndedError):
        refused["off"].wait_ready()
    assert "CommextNixlConnector" in refused["off"].wait_for_log("Unsupported connector type", 0)


def test_a_missing_nixl_ends_the_server_with_the_remedy(refused: dict[str, VllmServer]) -> None:
    with pytest.raises(ServerEndedError):
        refused["no-nixl"].wait_ready()
    line = refused["no-nixl"].wait_for_log("CommextNixlConnector needs NIXL", 0)
    assert "libucp.so.0 is not there" in line
    assert "pip install" in line


def test_a_prefill_that_is_sent_to_no_decode_engine_ends_with_its_lease(
    servers: dict[str, VllmServer],
) -> None:
    """A router that gives up between its two steps."""
    server = servers[PREFILL]
    before = scrape(server.url)
    name = prefill(server.url, cluster.MODEL_NAME, list(range(100)))["remote_request_id"]
    line = f"request {name}: its blocks were kept for"
    server.wait_for_log(line, LOG_SECONDS)
    wait_for_added(server.url, before, "vllm:commext_nixl_expired_requests_total", 1, LOG_SECONDS)
    deadline = time.monotonic() + LOG_SECONDS
    while True:
        found = scrape(server.url)
        left = found.total(HELD), found.total("vllm:kv_cache_usage_perc")
        if left == (0.0, 0.0):
            break
        assert time.monotonic() < deadline, f"held requests, share of the cache in use: {left}"
        time.sleep(0.1)
