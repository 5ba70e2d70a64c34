"""Programs that others wrote, in front of real servers: clients that ask our proxy as they ask one
server, and vLLM's router in place of our proxy. pip fetches those that the environment lacks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu import official_client
from tests.cpu.behind_proxy import Servers, new_text, serving
from tests.kit import cluster
from tests.kit.fetched import fetched
from tests.kit.metrics import scrape
from tests.kit.parity import TIMEOUT_SECONDS, tls
from tests.kit.servers import LOOPBACK, Server, free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LITELLM = (
    *("litellm==1.110.2", "fastuuid==0.14.0", "importlib-metadata==8.9.0", "zipp==4.1.2"),
    *("h2<5", "hpack<5", "hyperframe<7"),
)
ROUTER = ("vllm-router==0.1.17",)
BLOCKS = "vllm:commext_nixl_blocks_total"
FAILURES = "vllm:commext_nixl_failures_total"
PROGRAM_SECONDS = 300
NUM_PROMPTS = 24
# litellm asks whole and in a stream, and prints what it was told as JSON.
LITELLM_CODE = """
import json, sys, litellm
url, model, text = sys.argv[1:]
ask = dict(model=f"hosted_vllm/{model}", api_base=f"{url}/v1", api_key="none", temperature=0,
           messages=[{"role": "user", "content": text}], max_tokens=16)
whole = litellm.completion(**ask)
pieces = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
print(json.dumps({
    "text": whole.choices[0].message.content,
    "usage": whole.usage.total_tokens,
    "streamed": "".join(one.choices[0].delta.content or "" for one in pieces if one.choices),
    "ends": [one.choices[0].finish_reason for one in pieces if one.choices][-1],
}))
"""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(model, tmp_path_factory.mktemp("clients")) as started:
        yield started


def run(*command: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_litellm_is_answered_as_by_one_server(servers: Servers) -> None:
    environ = {"PYTHONPATH": str(fetched(*LITELLM)), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    text, before = new_text(), scrape(servers.decode.url)
    got, expected = (
        json.loads(run("-c", LITELLM_CODE, url, cluster.MODEL_NAME, text, **environ))
        for url in (servers.proxy.url, servers.plain.url)
    )
    assert got == expected
    assert got["text"] == got["streamed"] != ""
    assert servers.added(before, BLOCKS, at_least=1).total(BLOCKS) > 0


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_own_benchmark_is_answered_as_by_one_server(
    servers: Servers, backend: str, model: Path, tmp_path: Path
) -> None:
    """Prompts at random, eight at a time and all streamed: `vllm bench serve`."""
    before = scrape(servers.decode.url)
    got = bench(servers.proxy.url, backend, model, tmp_path / "proxy")
    expected = bench(servers.plain.url, backend, model, tmp_path / "plain")
    assert got["completed"] == expected["completed"] == NUM_PROMPTS
    assert got["errors"] == expected["errors"] == [""] * NUM_PROMPTS
    assert got["generated_texts"] == expected["generated_texts"]
    assert got["output_lens"] == expected["output_lens"]
    added = servers.added(before, BLOCKS, at_least=NUM_PROMPTS)
    assert added.total(BLOCKS) >= NUM_PROMPTS
    assert added.total(FAILURES) == 0


def bench(url: str, backend: str, model: Path, folder: Path) -> dict[str, Any]:
    """The result file of `vllm bench serve`."""
    chats = backend.endswith("chat")
    run(
        *("-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend),
        *("--base-url", url, "--model", cluster.MODEL_NAME, "--tokenizer", str(model)),
        *("--endpoint", "/v1/chat/completions" if chats else "/v1/completions"),
        *("--dataset-name", "random", "--num-prompts", str(NUM_PROMPTS), "--seed", "3"),
        *("--random-input-len", "90", "--random-output-len", "12", "--max-concurrency", "8"),
        *("--temperature", "0", "--ignore-eos", "--save-result", "--save-detailed"),
        *("--result-dir", str(folder), "--result-filename", "result.json", "--disable-tqdm"),
    )
    return json.loads((folder / "result.json").read_text())


JSON = {"Content-Type": "application/json"}
ASKED = b'{"prompt": "hello", "max_tokens": 2, "temperature": 0}'
# What is asked, and the status of one server and of the proxy, as docs/proxy.md lists them.
STATUSES: dict[tuple[str, str], tuple[dict[str, Any], int, int]] = {
    ("GET", "/version"): ({}, 200, 200),
    ("GET", "/health"): ({}, 200, 200),
    ("HEAD", "/health"): ({}, 405, 200),
    ("GET", "/load"): ({}, 200, 404),
    ("GET", "/ping"): ({}, 200, 404),
    ("GET", "/openapi.json"): ({}, 200, 404),
    ("GET", "/nothing"): ({}, 404, 404),
    ("GET", "/v1/completions"): ({}, 405, 405),
    ("GET", "/v1/models/"): ({}, 307, 307),
    ("POST", "/v1/completions/"): ({"headers": JSON, "content": ASKED}, 307, 307),
    ("POST", "/v1/completions"): ({"headers": JSON, "content": ASKED}, 200, 200),
    ("POST", "/v1/completions?no JSON"): ({"headers": JSON, "content": b"{"}, 400, 400),
    ("POST", "/v1/completions?no type"): ({"content": ASKED}, 400, 415),
    ("POST", "/v1/completions?too long"): (
        {"headers": JSON, "content": b'{"prompt": "%s"}' % (b"x" * (33 << 20))},
        400,
        413,
    ),
}


@pytest.mark.parametrize("asked", STATUSES, ids=" ".join)
def test_the_statuses_that_differ_are_those_in_the_docs(
    servers: Servers, asked: tuple[str, str]
) -> None:
    method, path = asked
    more, *expected = STATUSES[asked]
    urls = [f"{server.url}{path}" for server in (servers.plain, servers.proxy)]
    with httpx.Client(verify=tls(), trust_env=False, timeout=TIMEOUT_SECONDS) as client:
        got = [client.request(method, url, **more).status_code for url in urls]
    assert got == expected


@contextmanager
def vllm_router(servers: Servers, folder: Path) -> Iterator[Server]:
    """vLLM's router in its mode for prefill and decode engines, with its defaults."""
    port = free_port()
    router = Server(
        "vllm-router",
        [
            *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
            *("--host", LOOPBACK, "--port", str(port), "--prometheus-port", str(free_port())),
            *("--prefill", servers.prefill.url, "--decode", servers.decode.url),
        ],
        folder,
        port=port,
        environ={"PYTHONPATH": str(fetched(*ROUTER))},
    )
    with router:
        yield router


ROUTED = ("a completion", "a chat", "a stream", "a tool", "a tool in a stream", "structured output")


def test_vllms_router_is_answered_with_the_cache_of_the_prefill_server(
    servers: Servers, tmp_path: Path
) -> None:
    with vllm_router(servers, tmp_path) as router:
        for case in ROUTED:
            text, before = new_text(), scrape(servers.decode.url)
            got = official_client.ask(router.url, case, text)
            assert got == official_client.ask(servers.plain.url, case, text), case
            added = servers.added(before, BLOCKS, at_least=4)
            assert added.total(BLOCKS) >= 4, case
            assert added.total(FAILURES) == 0, case
