"""The demo with a dense model and one tensor-parallel size: answers of a plain server, then those
of prefill and decode engines that keep their prefix caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.kit import cluster
from tests.kit.demo.report import Noise
from tests.kit.demo.scenario import (
    CONCURRENCY,
    NUM_CONTROLS,
    Options,
    Scenario,
    at_once,
    one_at_a_time,
)
from tests.kit.parity import Completion
from tests.kit.prompts import PrefixCache, almost_the_same, prompt_set
from tests.kit.servers import Server

NUM_REPEATED = 8


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


class EqualTpScenario(Scenario):
    """Prompts of many lengths, some of which share a prefix."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        number = options.num_requests
        self.prompts = prompt_set(number, seed=1, block_size=cluster.BLOCK_SIZE)
        # None share a prefix: which of two requests under way finds the other's blocks is chance,
        # and the number of blocks to be read would be as well.
        self.prompts_at_once = prompt_set(
            number, seed=2, block_size=cluster.BLOCK_SIZE, num_shared=0
        )

    def ask_references(self) -> None:
        self.say("starting a single server without this package, for reference")
        server = cluster.plain_server(
            "single", self.model, self.options.folder, tensor_parallel_size=self.options.decode_tp
        )
        with server:
            self.say(f"single server ready; {len(self.prompts)} prompts one at a time, twice")
            one, again = (one_at_a_time(server.url, self.prompts) for _ in range(2))
            self.say(f"{len(self.prompts_at_once)} prompts, {CONCURRENCY} at once, twice")
            many, many_again = (at_once(server.url, self.prompts_at_once) for _ in range(2))
        found = self.reference = Reference(one, again, many, many_again)
        self.say(
            f"single server against itself: logprobs differ by {found.noise_one.max_logprob:.2g} "
            f"one at a time, by {found.noise_many.max_logprob:.2g} at once"
        )

    def send_all(self, proxy: Server, decode: Server) -> None:
        """One at a time, some of them again, and others at once."""
        reference = self.reference
        quiet, busy = reference.noise_one, reference.noise_many
        needed = self.blocks_needed(PrefixCache(cluster.BLOCK_SIZE))

        def measure(
            name: str,
            expected: Sequence[Completion],
            noise: Noise,
            send: Callable[[], list[Completion]],
        ) -> None:
            one = self.measure(name, decode, expected, noise, send, needed)
            self.claims += [one.claim_equal(noise), one.claim_transferred()]

        self.say(f"{len(self.prompts)} prompts through the proxy, one at a time")
        measure(
            "one at a time", reference.one, quiet, lambda: one_at_a_time(proxy.url, self.prompts)
        )
        again = range(NUM_REPEATED)
        self.say(f"{NUM_REPEATED} of them again: the decode server lacks only their last block")
        measure(
            "repeated",
            reference.one[:NUM_REPEATED],
            quiet.of(again),
            lambda: one_at_a_time(proxy.url, self.prompts[:NUM_REPEATED]),
        )
        self.say(f"{len(self.prompts_at_once)} other prompts, {CONCURRENCY} at once")
        measure(
            f"{CONCURRENCY} at once",
            reference.many,
            busy,
            lambda: at_once(proxy.url, self.prompts_at_once),
        )

    def control(self, proxy: Server, decode: Server) -> None:
        """The same comparison must notice that the KV cache is another prompt's."""
        long = [i for i, one in enumerate(self.prompts) if len(one) > cluster.BLOCK_SIZE]
        places = long[:NUM_CONTROLS]
        self.say(f"negative control: {len(places)} of the prompts with one early token changed")
        changed = [almost_the_same(self.prompts[place]) for place in places]
        one = self.measure(
            "changed (control)",
            decode,
            [self.reference.one[place] for place in places],
            self.reference.noise_one.of(places),
            lambda: one_at_a_time(proxy.url, changed),
            self.blocks_needed(PrefixCache(cluster.BLOCK_SIZE)),
        )
        self.claims += [one.claim_noticed(), one.claim_transferred()]
