"""The demo's scenario for any model and any two tensor-parallel sizes.

A decode engine computes only the last token of a prompt. A plain server does the same where all
prompts have as many tokens as it may compute in one step, and one more; so started, it computes in
the same pieces as prefill and decode engine together. At equal sizes its answers are theirs to the
bit. At different ones they are within what the two sizes differ by without any transfer, which a
plain server of the prefill engine's size shows. Prefix caches are off: a state cannot be cut back
to the tokens that two prompts share.
"""

import time
from collections.abc import Callable, Sequence

from tests.kit import cluster
from tests.kit.demo.report import BYTES, Expected, Noise
from tests.kit.demo.scenario import (
    CONCURRENCY,
    NUM_CONTROLS,
    Options,
    Scenario,
    at_once,
    one_at_a_time,
)
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import Completion
from tests.kit.prompts import Prompt, almost_the_same, equal_prompts
from tests.kit.servers import Server, VllmServer
from tests.kit.tiny_kinds import KINDS

PROMPT_TOKENS = 130
SETTLE_SECONDS = 1.0


class SplitScenario(Scenario):
    """Prompts of one length."""

    prefill_args = decode_args = (
        "--max-num-batched-tokens",
        str(PROMPT_TOKENS - 1),
        "--no-enable-prefix-caching",
    )

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        made = equal_prompts(1 + options.num_requests, PROMPT_TOKENS, seed=1)
        self.first, self.prompts = made[0], made[1:]

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
            args=[*self.model_args(), *self.decode_args],
        )

    def send_all(self, proxy: Server, decode: Server) -> None:
        if KINDS[self.options.kind].model_type == "llama":
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
