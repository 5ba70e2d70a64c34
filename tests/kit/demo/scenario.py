"""What the demo's scenarios have in common: their servers, how they ask them, and how they end."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kit import cluster
from tests.kit.demo.report import BYTES, Claim, Expected, Noise, Pass, table, verdict
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import Completion, complete
from tests.kit.prompts import Prompt, num_blocks
from tests.kit.servers import ProxyServer, Server, VllmServer, free_port
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import kv_bytes_per_token, write_tiny_model

CONCURRENCY = 8
NUM_CONTROLS = 4
WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """What was asked for; ``kind`` is one of ``KINDS`` or ``smollm2``, ``port`` 0 means any free
    one."""

    folder: Path
    kind: str
    prefill_tp: int
    decode_tp: int
    num_requests: int
    port: int
    keep: bool


class Scenario(ABC):
    """One run of the demo; prints as it goes.

    A subclass says what is asked: of plain servers first (``ask_references``), then of the engines
    (``send_all``), last with prompts that are almost the same (``control``).
    ``prefill_args`` and ``decode_args`` go to ``vllm serve``.
    """

    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()

    def __init__(self, options: Options) -> None:
        self.options = options
        self.started = time.monotonic()
        self.passes: list[Pass] = []
        self.claims: list[Claim] = []

    @abstractmethod
    def ask_references(self) -> None: ...

    @abstractmethod
    def send_all(self, proxy: Server, decode: Server) -> None:
        """The passes through the proxy."""

    @abstractmethod
    def control(self, proxy: Server, decode: Server) -> None:
        """The same comparison must notice a KV cache that belongs to other tokens."""

    def run(self) -> bool:
        self.options.folder.mkdir(parents=True, exist_ok=True)
        self.model = self.write_model()
        self.ask_references()
        with ExitStack() as stack:
            prefill, decode = self.start_engines(stack)
            proxy = self.start_proxy(stack, prefill, decode)
            self.send_all(proxy, decode)
            self.control(proxy, decode)
            print(f"\n{table(self.passes)}\n\n{verdict(self.claims)}", flush=True)
            if self.options.keep:
                self.keep([prefill, decode, proxy])
            self.say("stopping all servers")
        self.say("nothing is left running")
        return all(claim.held for claim in self.claims)

    def write_model(self) -> Path:
        self.say(f"writing a tiny model, logs in {self.options.folder}")
        return write_tiny_model(self.options.folder / "model", self.options.kind)

    def say(self, text: str) -> None:
        """A progress line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def start_engines(self, stack: ExitStack) -> tuple[VllmServer, VllmServer]:
        self.say(f"starting a prefill and a decode server, {self._sizes()}")
        prefill = self.engine("prefill", "kv_producer")
        decode = self.engine("decode", "kv_consumer")
        for server in (prefill, decode):
            stack.callback(server.stop)
            server.start()
        for server in (prefill, decode):
            self.say(f"{server.name} ready after {server.wait_ready():.0f} s on {server.url}")
        return prefill, decode

    def _sizes(self) -> str:
        prefill, decode = self.options.prefill_tp, self.options.decode_tp
        if prefill == decode:
            return f"each with tensor parallel size {prefill}"
        return f"with tensor parallel size {prefill} and {decode}"

    def engine(self, name: str, role: str) -> VllmServer:
        options, is_prefill = self.options, role == "kv_producer"
        return cluster.engine_server(
            name,
            self.model,
            options.folder,
            cluster.kv_transfer_config(role),
            tensor_parallel_size=options.prefill_tp if is_prefill else options.decode_tp,
            args=[*self.model_args(), *(self.prefill_args if is_prefill else self.decode_args)],
        )

    def model_args(self) -> list[str]:
        return KINDS[self.options.kind].cpu_options

    def start_proxy(self, stack: ExitStack, prefill: Server, decode: Server) -> Server:
        self.say("starting the proxy")
        proxy = ProxyServer(
            "proxy",
            [prefill.url],
            [decode.url],
            self.options.folder,
            port=self.options.port or free_port(),
            args=cluster.PATIENT_PROXY_ARGS,
        )
        return stack.enter_context(proxy)

    def measure(
        self,
        name: str,
        decode: Server,
        expected: Sequence[Completion],
        noise: Noise,
        send: Callable[[], list[Completion]],
        needed: Callable[[Sequence[Completion]], Expected],
    ) -> Pass:
        """Send requests, compare the answers and count what the decode server read for them."""
        before = scrape(decode.url)
        got = send()
        reads = needed(got)
        added = wait_for_added(decode.url, before, BYTES, reads.num_bytes)
        differences = [noise.compare(*pair) for pair in zip(expected, got, strict=True)]
        self.passes.append(Pass(name, got, differences, added, reads))
        return self.passes[-1]

    def whole_prompts(self, got: Sequence[Completion]) -> Expected:
        """All blocks of a Llama's prompts on all ranks of the decode engine; ranks that share a KV
        head hold it each."""
        heads: int = json.loads((self.model / "config.json").read_text())["num_key_value_heads"]
        blocks = sum(num_blocks(len(one.prompt), cluster.BLOCK_SIZE) for one in got)
        token_bytes = kv_bytes_per_token(self.model) * max(heads, self.options.decode_tp) // heads
        return Expected(blocks * cluster.BLOCK_SIZE * token_bytes)

    def keep(self, servers: Sequence[Server]) -> None:
        """Leave the servers up until Ctrl-C, or until one of them ends."""
        body = json.dumps({"model": cluster.MODEL_NAME, "prompt": "Hello", "max_tokens": 16})
        url = servers[-1].url
        print(
            f"\nThe servers stay up until Ctrl-C. Ask the proxy:\n\n  curl {url}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{body}'\n",
            flush=True,
        )
        try:
            while all(server.running() for server in servers):
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            return
        ended = [server.name for server in servers if not server.running()]
        self.claims.append(Claim("the servers stay up", False, f"{ended} ended"))
        self.say(f"{ended} ended by itself; see the logs in {self.options.folder}")


def one_at_a_time(url: str, prompts: Sequence[Prompt]) -> list[Completion]:
    """Ask for each prompt in turn, every second one streamed."""
    return [
        complete(url, cluster.MODEL_NAME, prompt, stream=place % 2 == 1)
        for place, prompt in enumerate(prompts)
    ]


def at_once(url: str, prompts: Sequence[Prompt]) -> list[Completion]:
    """Ask for all prompts with ``CONCURRENCY`` under way, every second one streamed."""

    def ask(place: int) -> Completion:
        return complete(url, cluster.MODEL_NAME, prompts[place], stream=place % 2 == 1)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, range(len(prompts))))
