"""The demo's scenario for any model and any two tensor-parallel sizes.

A decode engine computes only the last token of a prompt. A plain server does the same where all
prompts have as many tokens as it may compute in one step, and one more; so started, it computes in
the same pieces as prefill and decode engine together. At equal sizes its answers are theirs to the
bit. At different ones they are within what the two sizes differ by without any transfer, which a
plain server of the prefill engine's size shows. Prefix caches are off: a state cannot be cut back
to the tokens that two prompts share.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kit import cluster, smollm2
from tests.kit.demo.report import BYTES, Claim, Expected, Noise, Pass, table, verdict
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import Completion, complete
from tests.kit.prompts import Prompt, almost_the_same, equal_prompts, num_blocks
from tests.kit.servers import ProxyServer, Server, VllmServer, free_port
from tests.kit.smollm2 import write_smollm2
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import kv_bytes_per_token, write_tiny_model

CONCURRENCY = 8
NUM_CONTROLS = 4
WATCH_SECONDS = 1.0
PROMPT_TOKENS = 130
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """What was asked for; ``kind`` is one of ``KINDS`` or ``smollm2``; ``show``: what runs stays up
    until Ctrl-C."""

    folder: Path
    kind: str
    prefill_tp: int
    decode_tp: int
    num_requests: int
    show: bool


class Scenario:
    """One run of the demo with prompts of one length; prints as it goes. ``args`` are those of all
    servers: plain ones are asked first, then the engines, last with prompts that are almost the
    same."""

    args: Sequence[str] = (
        *("--max-num-batched-tokens", str(PROMPT_TOKENS - 1)),
        "--no-enable-prefix-caching",
    )

    def __init__(self, options: Options) -> None:
        self.options = options
        self.started = time.monotonic()
        self.passes: list[Pass] = []
        self.claims: list[Claim] = []
        made = equal_prompts(1 + options.num_requests, PROMPT_TOKENS, seed=1)
        self.first, self.prompts = made[0], made[1:]

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
            if self.options.show:
                self.keep([prefill, decode, proxy])
            self.say("stopping all servers")
        self.say("nothing is left running")
        return all(claim.held for claim in self.claims)

    def write_model(self) -> Path:
        self.say(f"making the model {self.options.kind}, logs in {self.options.folder}")
        if self.is_pretrained:
            return write_smollm2()
        return write_tiny_model(self.options.folder / "model", self.options.kind)

    @property
    def is_pretrained(self) -> bool:
        return self.options.kind == smollm2.NAME

    def say(self, text: str) -> None:
        """A progress line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def start_engines(self, stack: ExitStack) -> tuple[VllmServer, VllmServer]:
        sizes = self.options.prefill_tp, self.options.decode_tp
        named = " and ".join(map(str, dict.fromkeys(sizes)))
        self.say(f"starting a prefill and a decode server, with tensor parallel size {named}")
        prefill = self.engine("prefill", "kv_producer", sizes[0])
        decode = self.engine("decode", "kv_consumer", sizes[1])
        for server in (prefill, decode):
            stack.callback(server.stop)
            server.start()
        for server in (prefill, decode):
            self.say(f"{server.name} ready after {server.wait_ready():.0f} s on {server.url}")
        return prefill, decode

    def engine(self, name: str, role: str, size: int) -> VllmServer:
        return cluster.engine_server(
            name,
            self.model,
            self.options.folder,
            cluster.kv_transfer_config(role),
            tensor_parallel_size=size,
            args=[*self.model_args(), *self.args],
        )

    def model_args(self) -> list[str]:
        return [] if self.is_pretrained else KINDS[self.options.kind].cpu_options

    def start_proxy(self, stack: ExitStack, prefill: Server, decode: Server) -> Server:
        self.say("starting the proxy")
        proxy = ProxyServer(
            "proxy",
            [prefill.url],
            [decode.url],
            self.options.folder,
            port=free_port(),
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

    def ask_references(self) -> None:
        """Let a plain server of the decode engine's size answer everything, and one of the prefill
        engine's where that is another."""
        prefill_tp, decode_tp = self.options.prefill_tp, self.options.decode_tp
        with self.plain_server(decode_tp) as server:
            self.say(f"{len(self.prompts)} prompts one at a time, then {CONCURRENCY} at once")
            self.expected = one_at_a_time(server.url, self.prompts)
            many = at_once(server.url, self.prompts)
        self.quiet = Noise()
        if prefill_tp != decode_tp:
            with self.plain_server(prefill_tp) as server:
                self.say(f"{len(self.prompts)} prompts one at a time")
                other = one_at_a_time(server.url, self.prompts)
            self.quiet = Noise.of_rounding(self.expected, other)
        self.busy = self.quiet.at_least(Noise.of_rounding(self.expected, many))
        self.say(
            f"the sizes' own answers: logprobs differ by {self.quiet.max_logprob:.2g} one at a "
            f"time, by {self.busy.max_logprob:.2g} at once"
        )

    def plain_server(self, size: int) -> VllmServer:
        self.say(
            f"starting a single server without this package, with tensor parallel size {size}, "
            "for reference"
        )
        return cluster.plain_server(
            f"single-tp{size}",
            self.model,
            self.options.folder,
            tensor_parallel_size=size,
            args=[*self.model_args(), *self.args],
        )

    def send_all(self, proxy: Server, decode: Server) -> None:
        if self.is_pretrained or KINDS[self.options.kind].model_type == "llama":
            self.needed = self.whole_prompts
        else:
            self.needed = self.as_before(proxy, decode)
        passes: list[tuple[str, Noise, Callable[[str, Sequence[Prompt]], list[Completion]]]] = [
            ("one at a time", self.quiet, one_at_a_time),
            (f"{CONCURRENCY} at once", self.busy, at_once),
        ]
        for name, noise, ask in passes:
            self.say(f"{len(self.prompts)} prompts through the proxy, {name}")
            one = self.measure(
                name,
                decode,
                self.expected,
                noise,
                lambda ask=ask: ask(proxy.url, self.prompts),
                self.needed,
            )
            self.claims += [one.claim_equal(noise), one.claim_transferred()]

    def as_before(
        self, proxy: Server, decode: Server
    ) -> Callable[[Sequence[Completion]], Expected]:
        self.say("one prompt through the proxy, to see how much is read for it")
        before = scrape(decode.url)
        one_at_a_time(proxy.url, [self.first])
        wait_for_added(decode.url, before, BYTES, 1)
        time.sleep(SETTLE_SECONDS)  # ranks may report in different steps
        found = int(scrape(decode.url).minus(before).total(BYTES))
        source = f"as many for each prompt as for the one before, {found:,}"
        return lambda got: Expected(len(got) * found, source)

    def control(self, proxy: Server, decode: Server) -> None:
        """The same comparison must notice that KV cache and states are another prompt's."""
        changed = [almost_the_same(prompt) for prompt in self.prompts[:NUM_CONTROLS]]
        self.say(f"negative control: {len(changed)} of the prompts with one early token changed")
        one = self.measure(
            "changed (control)",
            decode,
            self.expected[:NUM_CONTROLS],
            self.quiet,
            lambda: one_at_a_time(proxy.url, changed),
            self.needed,
        )
        self.claims += [one.claim_noticed(), one.claim_transferred()]

    def keep(self, servers: Sequence[Server]) -> None:
        """Leave the servers up until Ctrl-C, or until one of them ends."""
        body = json.dumps({"model": cluster.MODEL_NAME, "prompt": "Hello", "max_tokens": 16})
        url = f"{servers[-1].url}/v1/completions"
        ask = f"curl {url} -H 'Content-Type: application/json' -d '{body}'"
        self.say(f"all stays up until Ctrl-C; ask:\n\n  {ask}\n")
        with suppress(KeyboardInterrupt):
            while all(server.running() for server in servers):
                time.sleep(WATCH_SECONDS)


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
