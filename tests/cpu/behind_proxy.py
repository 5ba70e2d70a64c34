"""A plain server, and a prefill and a decode server behind our proxy, of one tiny model.

The decode server recomputes what it cannot load, so that every answer can be compared. Its
connector goes by the name of vLLM's, which the package answers to where it is told to."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import cluster
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import Completion, complete, prefill
from tests.kit.servers import ProxyServer, Server, VllmServer
from vllm_commext.plugin import VLLMS_NAME
from vllm_commext.settings import ALIAS

SECRET = {"COMMEXT_NIXL_SECRET": "0123456789abcdef0123456789abcdef"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
NIXL = "vllm:commext_nixl_"
CHUNK_TOKENS = 128
FREE_SECONDS = 30.0
"""Half a lease: what is free by then has been released."""
_rng = random.Random(23)


def new_prompt(num_tokens: int = 100) -> tuple[int, ...]:
    """A prompt that no server has seen."""
    return tuple(_rng.randrange(32, 127) for _ in range(num_tokens))


def new_text(num_characters: int = 100) -> str:
    return "".join(map(chr, new_prompt(num_characters)))


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    decode: VllmServer
    proxy: Server

    def reference(self, prompt: Sequence[int]) -> Completion:
        return complete(self.plain.url, cluster.MODEL_NAME, prompt)

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        return prefill(self.prefill.url, cluster.MODEL_NAME, prompt)

    def decoded(self, prompt: Sequence[int], params: Mapping[str, Any] | None) -> Completion:
        extra = {"kv_transfer_params": dict(params)} if params is not None else None
        return complete(self.decode.url, cluster.MODEL_NAME, prompt, extra=extra)

    def added(self, before: Metrics, name: str, at_least: float) -> Metrics:
        self.decoded(new_prompt(8), None)
        return wait_for_added(self.decode.url, before, name, at_least=at_least)

    def frees_all(self) -> None:
        """P holds nothing, before and not because leases end."""
        deadline = time.monotonic() + FREE_SECONDS
        while (held := self._of_prefill("held_requests")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert held == 0, f"{held:g} prefills are held {FREE_SECONDS} s later"
        assert self._of_prefill("expired_requests_total") == 0

    def _of_prefill(self, name: str) -> float:
        return scrape(self.prefill.url).total(f"{NIXL}{name}")


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Servers]:
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = ["--chat-template", str(template), "--enable-auto-tool-choice"]
    args += ["--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]

    def engine(name: str, role: str, connector: str, *chunk: str, **more: str) -> VllmServer:
        config = cluster.kv_transfer_config(role, connector=connector, policy="recompute")
        environ, options = {**SECRET, **more}, [*args, *chunk]
        return cluster.engine_server(name, model, folder, config, args=options, environ=environ)

    plain = cluster.plain_server("plain", model, folder, args=args, environ=cluster.PLAIN_ENVIRON)
    chunk = "--max-num-batched-tokens", str(CHUNK_TOKENS)
    prefill_server = engine("prefill", "kv_producer", cluster.CONNECTOR, *chunk)
    decode = engine("decode", "kv_consumer", VLLMS_NAME, **{ALIAS: "1"})
    urls = [prefill_server.url], [decode.url]
    proxy = ProxyServer("proxy", *urls, folder, args=cluster.PATIENT_PROXY_ARGS)
    with cluster.all_ready([plain, prefill_server, decode]), proxy:
        yield Servers(plain, prefill_server, decode, proxy)
