"""The demo's course: a single server's answers, then the same from prefill and decode engines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_commext.cli.demo_report import PREFIX, Claim, Noise, Pass, Traffic, table, verdict
from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import scrape, wait_for_added
from vllm_commext.testing.parity import Completion, complete
from vllm_commext.testing.prompts import PrefixCache, Prompt, blocks_one_at_a_time, prompt_set
from vllm_commext.testing.servers import ProxyServer, Server, VllmServer, free_port
from vllm_commext.testing.tiny_model import kv_bytes_per_token, write_tiny_model

CONCURRENCY = 8
NUM_REPEATED = 8
NUM_CONTROLS = 4
WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """What was asked for; ``port`` 0 means any free one."""

    folder: Path
    tensor_parallel_size: int
    num_requests: int
    port: int
    keep: bool


@dataclass(frozen=True)
class Reference:
    """The single server's answers: one at a time twice, and at concurrency twice."""

    one: Sequence[Completion]
    one_again: Sequence[Completion]
    many: Sequence[Completion]
    many_again: Sequence[Completion]

    @property
    def noise_one(self) -> Noise:
        """One at a time; the second time prompts hit the prefix cache."""
        return Noise.between(self.one, self.one_again)

    @property
    def noise_many(self) -> Noise:
        """At concurrency; what a split prompt alone gives is part of it."""
        found = Noise.between(self.many, self.many_again)
        return Noise(found.agrees, max(found.max_logprob, self.noise_one.max_logprob))


class Scenario:
    """One run of the demo; prints as it goes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.started = time.monotonic()
        self.passes: list[Pass] = []
        self.claims: list[Claim] = []
        number = options.num_requests
        self.prompts = prompt_set(number, seed=1, block_size=cluster.BLOCK_SIZE)
        # None share a prefix: which of two requests under way finds the other's blocks is chance,
        # and the number of blocks to be read would be as well.
        self.prompts_at_once = prompt_set(
            number, seed=2, block_size=cluster.BLOCK_SIZE, num_shared=0
        )

    def run(self) -> bool:
        """Whether every claim held."""
        self.options.folder.mkdir(parents=True, exist_ok=True)
        self.say(f"writing a tiny model, logs in {self.options.folder}")
        self.model = write_tiny_model(self.options.folder / "model")
        self.block_bytes = kv_bytes_per_token(self.model) * cluster.BLOCK_SIZE
        reference = self.reference()
        with ExitStack() as stack:
            prefill, decode, corrupting = self.start_engines(stack)
            self.say("starting the proxy")
            proxy = ProxyServer(
                "proxy",
                [prefill.url],
                [decode.url],
                self.options.folder,
                port=self.options.port or free_port(),
                args=cluster.PATIENT_PROXY_ARGS,
            )
            stack.enter_context(proxy)
            self.send_all(reference, proxy, decode)
            self.control(reference, prefill, corrupting)
            print(f"\n{table(self.passes)}\n\n{verdict(self.claims)}", flush=True)
            if self.options.keep:
                corrupting.stop()
                self.keep([prefill, decode, proxy])
            self.say("stopping all servers")
        self.say("nothing is left running")
        return all(claim.held for claim in self.claims)

    def say(self, text: str) -> None:
        """A progress line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def reference(self) -> Reference:
        """Let a plain server answer everything."""
        self.say("starting a single server without this package, for reference")
        server = cluster.plain_server(
            "single",
            self.model,
            self.options.folder,
            tensor_parallel_size=self.options.tensor_parallel_size,
        )
        with server:
            self.say(f"single server ready; {len(self.prompts)} prompts one at a time, twice")
            one, again = self.one_at_a_time(server.url), self.one_at_a_time(server.url)
            self.say(f"{len(self.prompts_at_once)} prompts, {CONCURRENCY} at once, twice")
            many, many_again = self.at_once(server.url), self.at_once(server.url)
        found = Reference(one, again, many, many_again)
        self.say(
            f"single server against itself: logprobs differ by {found.noise_one.max_logprob:.2g} "
            f"one at a time, by {found.noise_many.max_logprob:.2g} at once"
        )
        return found

    def start_engines(self, stack: ExitStack) -> tuple[VllmServer, VllmServer, VllmServer]:
        """Start prefill, decode and the negative control's decode engine at the same time."""
        tp = self.options.tensor_parallel_size
        self.say(f"starting a prefill and two decode servers, each with tensor parallel size {tp}")
        prefill = self.engine("prefill", "kv_producer")
        decode = self.engine("decode", "kv_consumer")
        corrupting = self.engine("decode-corrupting", "kv_consumer", corrupt=True)
        servers = (prefill, decode, corrupting)
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            self.say(f"{server.name} ready after {server.wait_ready():.0f} s on {server.url}")
        return servers

    def engine(self, name: str, role: str, corrupt: bool = False) -> VllmServer:
        """A server with the connector, not started."""
        config = cluster.kv_transfer_config(
            role,
            connector=cluster.CORRUPTING if corrupt else cluster.CONNECTOR,
            module_path=cluster.CORRUPTING_MODULE if corrupt else None,
        )
        tp = self.options.tensor_parallel_size
        return cluster.engine_server(
            name, self.model, self.options.folder, config, tensor_parallel_size=tp
        )

    def one_at_a_time(self, url: str, prompts: Sequence[Prompt] | None = None) -> list[Completion]:
        """Ask for each prompt in turn, every second one streamed."""
        asked = self.prompts if prompts is None else prompts
        return [
            complete(url, cluster.MODEL_NAME, prompt, stream=place % 2 == 1)
            for place, prompt in enumerate(asked)
        ]

    def at_once(self, url: str) -> list[Completion]:
        """Ask for all prompts with ``CONCURRENCY`` under way, every second one streamed."""

        def ask(place: int) -> Completion:
            prompt = self.prompts_at_once[place]
            return complete(url, cluster.MODEL_NAME, prompt, stream=place % 2 == 1)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(ask, range(len(self.prompts_at_once))))

    def send_all(self, reference: Reference, proxy: Server, decode: Server) -> None:
        """The three passes through the proxy."""
        quiet, busy = reference.noise_one, reference.noise_many
        cache = PrefixCache(cluster.BLOCK_SIZE)

        def measure(
            name: str,
            expected: Sequence[Completion],
            noise: Noise,
            send: Callable[[], list[Completion]],
        ) -> None:
            one = self.measure(name, decode, cache, expected, noise, send)
            self.claims += [one.claim_equal(noise), one.claim_transferred()]

        self.say(f"{len(self.prompts)} prompts through the proxy, one at a time")
        measure("one at a time", reference.one, quiet, lambda: self.one_at_a_time(proxy.url))
        again = range(NUM_REPEATED)
        self.say(f"{NUM_REPEATED} of them again: the decode server lacks only their last block")
        measure(
            "repeated",
            reference.one[:NUM_REPEATED],
            quiet.of(again),
            lambda: self.one_at_a_time(proxy.url, self.prompts[:NUM_REPEATED]),
        )
        self.say(f"{len(self.prompts_at_once)} other prompts, {CONCURRENCY} at once")
        measure(f"{CONCURRENCY} at once", reference.many, busy, lambda: self.at_once(proxy.url))

    def control(self, reference: Reference, prefill: Server, corrupting: Server) -> None:
        """The same comparison must notice one damaged block in each request."""
        long = [i for i, one in enumerate(self.prompts) if len(one) > cluster.BLOCK_SIZE]
        places = long[:NUM_CONTROLS]
        self.say(f"negative control: {len(places)} prompts, one block of each damaged on arrival")
        one = self.measure(
            "damaged (control)",
            corrupting,
            PrefixCache(cluster.BLOCK_SIZE),
            [reference.one[place] for place in places],
            reference.noise_one.of(places),
            lambda: [
                cluster.disaggregated(
                    prefill.url, corrupting.url, cluster.MODEL_NAME, self.prompts[place]
                )
                for place in places
            ],
        )
        self.claims += [one.claim_noticed(), one.claim_transferred()]

    def measure(
        self,
        name: str,
        decode: Server,
        cache: PrefixCache,
        expected: Sequence[Completion],
        noise: Noise,
        send: Callable[[], list[Completion]],
    ) -> Pass:
        """Send requests, compare the answers and count what the decode server read for them."""
        before = scrape(decode.url)
        got = send()
        num_blocks = blocks_one_at_a_time(cache, [(one.prompt, one.token_ids) for one in got])
        added = wait_for_added(
            decode.url, before, f"{PREFIX}bytes_total", num_blocks * self.block_bytes
        )
        traffic = Traffic.of(added, self.options.tensor_parallel_size)
        differences = noise.compare_all(expected, got)
        one = Pass(name, got, differences, traffic, num_blocks, self.block_bytes)
        self.passes.append(one)
        return one

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
