"""What third turns of conversations cost others: requests whose tokens D decodes meanwhile, and P
where it decodes, too.

So many requests are at D and at P all the time, straight, one after the other; each has a prompt
that is short and known there, so that nearly all of it is decoding. A conversation's first two
turns are one request here, which leaves the same: D has all of the history, P all but the last
answer. When the histories are there, a third turn arrives every so often for some seconds: this is
a window, and of the others those count that began and ended in it. Windows take turns, in another
order each round: each way of the turns, and none of them.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from moving.streams import Stream

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.prompts import PRINTABLE
from turns.engines import OFF, Variant
from vllm_commext.bench.figures import quantile

NO_TURNS = "no turns"
PROMPT_TOKENS = 64
"""Of each of the others."""
STEADY_SECONDS = 2.0
"""From the first of the others on, where nothing else is waited for."""


@dataclass(frozen=True)
class Window:
    """What others had, and the turns.

    engines, reuse: of the turns; place: of the others, D or P; first_ms: to each turn's first
    token; blocks: that P read of D for all turns; tpot_ms: of each of the others; gap_ms: the
    longest time between two tokens of any.
    """

    round: int
    engines: str
    reuse: str
    place: str
    first_ms: Sequence[float]
    blocks: float
    tpot_ms: Sequence[float]
    gap_ms: float


@asynccontextmanager
async def answering(
    session: aiohttp.ClientSession, url: str, count: int, num_tokens: int
) -> AsyncIterator[list[Stream]]:
    """An engine that has so many requests at a time; gives all that were begun."""
    begun: list[Stream] = []

    async def keep(number: int) -> None:
        dice = random.Random(number)
        prompt = [dice.choice(PRINTABLE) for _ in range(PROMPT_TOKENS)]
        # The first ones differ, so that not all end at the same time.
        length = max(2, num_tokens * (number + 1) // count)
        while True:
            begun.append(Stream(prompt, length))
            await _read(session, url, begun[-1])
            length = num_tokens

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(keep(number)) for number in range(count)]
        yield begun
        for task in tasks:
            task.cancel()


async def _read(session: aiohttp.ClientSession, url: str, stream: Stream) -> None:
    await stream.read(session, url, cluster.MODEL_NAME)
    if stream.error:
        raise RuntimeError(f"{url}: {stream.error}")


class Windows:
    """Plays windows; each has conversations of its own."""

    def __init__(self, args: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self._args = args
        self._session = session
        self._num_played = 0

    async def warm_up(self, variants: Sequence[Variant]) -> None:
        """A conversation of each way at once, so that all are connected."""

        async def converse(one: Variant) -> None:
            (history,) = await self._histories(one, 1)
            await self._turn(one, history, 0.0)

        await asyncio.gather(*map(converse, variants))

    async def play(self, number: int, servers: Variant, *, has_turns: bool) -> list[Window]:
        """One window of a round, for each place of the others."""
        args, loop = self._args, asyncio.get_running_loop()
        urls = {"D": servers.decode.url, "P": servers.prefill.url}
        async with AsyncExitStack() as stack:
            begun = {
                place: await stack.enter_async_context(
                    answering(self._session, url, count, args.others_tokens)
                )
                for (place, url), count in zip(urls.items(), args.others, strict=True)
                if count
            }
            histories: list[Stream] = []
            if has_turns:
                histories = await self._histories(servers, args.turns)
            else:
                await asyncio.sleep(STEADY_SECONDS)
            before = await asyncio.to_thread(scrape, servers.prefill.url)
            begin, every = loop.time(), args.seconds / args.turns
            turns = [self._turn(servers, one, n * every) for n, one in enumerate(histories)]
            *first_ms, _ = await asyncio.gather(*turns, asyncio.sleep(args.seconds))
            added = (await asyncio.to_thread(scrape, servers.prefill.url)).minus(before)
        end = begin + args.seconds
        blocks = added.total("vllm:commext_nixl_reuse_blocks_total")
        named = (servers.engines, servers.reuse) if has_turns else (NO_TURNS, "-")
        return [
            Window(number, *named, place, first_ms, blocks, *_figures(streams, begin, end))
            for place, streams in begun.items()
        ]

    async def _histories(self, servers: Variant, count: int) -> list[Stream]:
        """Conversations whose third turn comes next."""
        args, made = self._args, list[Stream]()
        for _ in range(count):
            self._num_played += 1
            dice = random.Random(self._num_played)
            num_tokens = args.histories[0] - args.answer_tokens
            prompt = [dice.choice(PRINTABLE) for _ in range(num_tokens)]
            made.append(Stream(prompt, args.answer_tokens, salt=f"{self._num_played}"))
        await asyncio.gather(*(_read(self._session, servers.proxy.url, one) for one in made))
        return made

    async def _turn(self, servers: Variant, history: Stream, seconds: float) -> float:
        """Milliseconds to the first token of a third turn, so many seconds from now."""
        await asyncio.sleep(seconds)
        new = PRINTABLE[: self._args.new_tokens]
        prompt = [*history.prompt, *history.ids, *new]
        one = Stream(prompt, self._args.answer_tokens, salt=history.salt)
        begun = asyncio.get_running_loop().time()
        await _read(self._session, servers.proxy.url, one)
        return 1e3 * (one.times[0] - begun)


def _figures(streams: Sequence[Stream], begin: float, end: float) -> tuple[list[float], float]:
    """Milliseconds a token of each request of a span, and the longest gap that overlaps it."""
    whole = [
        one
        for one in streams
        if len(one.ids) == one.num_tokens and begin <= one.times[0] and one.times[-1] <= end
    ]
    tpots = [1e3 * (one.times[-1] - one.times[0]) / (len(one.ids) - 1) for one in whole]
    return tpots, 1e3 * max((gap for one in streams for gap in one.gaps(begin, end)), default=0.0)


async def _measure(args: argparse.Namespace, variants: Sequence[Variant]) -> list[Window]:
    found: list[Window] = []
    ways = [(variants[0], False), *((one, True) for one in variants)]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        windows = Windows(args, session)
        await windows.warm_up(variants)
        for number in range(args.rounds):
            first = number % len(ways)
            for servers, has_turns in [*ways[first:], *ways[:first]]:
                for one in await windows.play(number, servers, has_turns=has_turns):
                    found.append(one)
                    p50, p99 = (quantile(one.tpot_ms, share) for share in (0.5, 0.99))
                    text = f"{len(one.tpot_ms)} at {one.place}, TPOT {p50:.2f} / {p99:.2f} ms"
                    where = f"round {number + 1} of {args.rounds}, {one.engines}, {one.reuse}"
                    print(f"{where}: {text}, longest gap {one.gap_ms:.1f} ms", flush=True)
    return found


def measure(args: argparse.Namespace, variants: Sequence[Variant]) -> list[Window]:
    """All windows of all rounds."""
    return asyncio.run(_measure(args, variants))


def rows_of(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Of each way all rounds together, and its TPOT beside that without turns and without reuse."""
    groups: dict[tuple[str, str, str], list[Window]] = {}
    for one in windows:
        groups.setdefault((one.place, one.engines, one.reuse), []).append(one)
    p99 = {
        key: quantile([tpot for one in group for tpot in one.tpot_ms], 0.99)
        for key, group in groups.items()
    }
    rows: list[dict[str, Any]] = []
    for key, group in sorted(groups.items()):
        place, engines, reuse = key
        tpots = [tpot for one in group for tpot in one.tpot_ms]
        firsts = [first for one in group for first in one.first_ms]
        rows.append(
            {
                "others at": place,
                "turns": engines,
                "reuse": reuse,
                "number": len(firsts),
                "blocks read a turn": sum(one.blocks for one in group) / max(len(firsts), 1),
                "first token ms": quantile(firsts, 0.5) if firsts else "-",
                "others": len(tpots),
                "TPOT p50 ms": quantile(tpots, 0.5),
                "TPOT p99 ms": p99[key],
                "longest gap ms": max(one.gap_ms for one in group),
                "p99 to no turns": p99[key] / p99[place, NO_TURNS, "-"],
                "p99 to reuse off": p99[key] / p99[place, engines, OFF] if firsts else "-",
            }
        )
    return rows
