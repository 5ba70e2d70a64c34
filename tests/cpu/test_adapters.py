"""LoRA adapters of real servers: an answer through P and D is that of the adapter that D has,
whichever of them was loaded anew; and equal adapters hand over, wherever their files are."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cpu import behind_proxy
from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import compare, complete
from tests.kit.servers import ProxyServer, Server
from tests.kit.tiny_lora import RANK, write_lora

pytestmark = pytest.mark.long  # contract tests have each adapter with its prompt, without servers
ATOL = 1e-4  # nats, at float32
NIXL = "vllm:commext_nixl_"
NAMES = ("first", "second")
LORA = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"]
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
_dice = random.Random(5)


@dataclass
class Servers(behind_proxy.Servers):
    """``plain`` serves each content under a name of its own; P and D have theirs as ``a``."""

    folder: Path

    def place(self, server: Server, content: str) -> Path:
        """Where an engine has the files."""
        place = self.folder / server.name / content
        shutil.copytree(self.folder / content, place, dirs_exist_ok=True)
        return place

    def load(self, content: str, *servers: Server) -> None:
        for server in servers:
            path = str(self.place(server, content))
            body = {"lora_name": "a", "lora_path": path, "load_inplace": True}
            url = f"{server.url}/v1/load_lora_adapter"
            answer = httpx.post(url, json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text

    def check(self, content: str, *, is_read: bool, times: int = 2) -> None:
        """Through the proxy and by hand, each prompt twice, the second time of what is cached."""
        before = scrape(self.decode.url)
        for _ in range(times):
            prompt = [_dice.randrange(32, 127) for _ in range(100)]
            own = complete(self.plain.url, content, prompt)
            other = complete(self.plain.url, NAMES[content == NAMES[0]], prompt)
            assert not compare(other, own, ATOL).equal
            for _ in range(2):
                got = complete(self.proxy.url, "a", prompt)
                assert compare(own, got, ATOL).equal
            got = cluster.disaggregated(self.prefill.url, self.decode.url, "a", prompt)
            assert compare(own, got, ATOL).equal
        moved = scrape(self.decode.url).minus(before)
        assert (moved.total(f"{NIXL}bytes_total") > 0) == is_read


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_lora(folder / name, model, seed)

    def args(server: str, *names: tuple[str, str]) -> Sequence[str]:
        return [*LORA, "--lora-modules", *(f"{name}={folder / path}" for name, path in names)]

    plain = cluster.plain_server(
        "plain",
        model,
        folder,
        args=args("plain", *((name, name) for name in NAMES)),
        environ=cluster.PLAIN_ENVIRON,
    )
    engines = [
        cluster.engine_server(
            role,
            model,
            folder,
            cluster.kv_transfer_config(role),
            args=args(role, ("a", "first")),
            environ=RUNTIME,
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    urls = [engine.url for engine in engines]
    proxy = ProxyServer("proxy", urls[:1], urls[1:], folder, args=cluster.PATIENT_PROXY_ARGS)
    with cluster.all_ready([plain, *engines]), proxy:
        yield Servers(plain, engines[0], engines[1], proxy, folder)


def test_an_adapter_loaded_anew_at_one_engine_is_no_answer_of_the_other_one(
    servers: Servers,
) -> None:
    servers.check("first", is_read=True)
    servers.load("second", servers.decode)
    servers.check("second", is_read=False)
    servers.load("second", servers.prefill)
    servers.check("second", is_read=True)
    servers.load("first", servers.prefill)
    servers.check("second", is_read=False)
    servers.load("first", servers.decode)
    servers.check("first", is_read=True)


def test_a_stream_ends_when_its_adapter_is_loaded_anew(servers: Servers) -> None:
    """No engine has what its beginning was computed with, and none goes on with another content."""
    servers.load("first", servers.prefill, servers.decode)
    asked = {"model": "a", "prompt": "x" * 40, "max_tokens": 300, "ignore_eos": True}
    url, told = f"{servers.proxy.url}/v1/completions", list[str]()
    with httpx.stream("POST", url, json={**asked, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if not told:
                servers.load("second", servers.decode)
            told.append(line)
    assert any('"finish_reason":"abort"' in line for line in told), told[-3:]
