"""First token of a conversation's third turn at an engine that holds nothing of its history.

One engine, the source, has answered two turns.  The third one goes to another, the target, in every
way that the pair of engines has:

- `computed`: the target computes the history;
- `at the source`: the source answers;
- `handed over`: behind our proxy the source prefills the turn and the target reads its blocks;
- `reused`: the target reads the blocks that the source offers (`reuse_blocks`);
- `p2p`: the target fetches them by vLLM's `OffloadingConnector` and its tier `p2p`.

Pairs: `ours`, CommextNixlConnector; `p2p`, the tier alone, without this package; `both`, the two in
a `MultiConnector`.  All engines are up all the time.  A source is idle, or busy with prompts and
answers of other clients, or killed while the first of several turns is under way.

    python benchmarks/history.py --out OUT                        # a tiny model on CPUs
    python benchmarks/history.py --device cuda --gpus 0 0 --pairs ours p2p both --out OUT

Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import statistics
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import engines
import load
import models
import pages
from engines import OURS, Engine, Setup
from load import Stream
from machine import load_average, machine

from tests.kit.metrics import Metrics, scrape
from tests.kit.servers import LOOPBACK, ProxyServer, VllmServer, free_port
from vllm_commext.errors import CommextError

COMPUTED, SOURCE, HANDED, REUSED, P2P = "computed", "at the source", "handed over", "reused", "p2p"
IDLE, BUSY, KILLED = "idle", "busy", "killed"
BOTH = "both"
WAYS = {
    "ours": (COMPUTED, SOURCE, HANDED, REUSED),
    P2P: (COMPUTED, P2P),
    BOTH: (COMPUTED, HANDED, P2P),
}
SIZES = {"cpu": (400, 32, 100, 20), "cuda": (8000, 128, 1500, 200)}
"""Tokens of the history, of the third prompt beyond it, of a busy source's prompts and answers."""
VOCABULARY = {"cpu": 256, "cuda": 32000}
LEAST_TOKEN = 3
ANSWER_TOKENS = 32
NUM_BUSY = 8
SETTLE_SECONDS, REPORT_SECONDS = 0.3, 0.6
"""Until a turn's blocks are stored, and until a step's statistics are on the metrics page."""
TIER_BYTES = 8 << 30
COMMON = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
COLUMNS = (
    *("pair", "source", "way", "turns", "first token, ms", "second", "of computed", "MB read"),
    "answers as the source's",
)
Row = dict[str, Any]


def configuration(name: str, side_channel: int, tier_port: int) -> dict[str, Any]:
    """``--kv-transfer-config`` of an engine."""
    extra: dict[str, Any] = {"side_channel_host": LOOPBACK, "side_channel_port": side_channel}
    extra["reuse_blocks"] = name == "ours"
    ours = {**COMMON, "kv_connector": OURS, "kv_connector_extra_config": extra}
    if name == "ours":
        return ours
    tier = engines.tier(TIER_BYTES, tier_port)
    if name == P2P:
        return tier
    extra = {"connectors": [ours, tier]}
    return {**COMMON, "kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


@dataclass(frozen=True)
class Pair:
    """Two engines; ``side_channel`` and ``tier`` are the source's ports."""

    name: str
    source: VllmServer
    target: VllmServer
    proxy: ProxyServer
    side_channel: int
    tier: int

    def params(self, way: str) -> dict[str, Any]:
        """``kv_transfer_params`` of a third turn."""
        if way == REUSED:
            place = {"host": LOOPBACK, "port": self.side_channel, "seal": ""}
            return {"answer_token_ids": [], "reuse_from": [place]}
        if way == P2P:
            peer = {"remote_host": LOOPBACK, "remote_port": self.tier}
            return {"remote_kv_source": {"kv_request_id": uuid.uuid4().hex, **peer}}
        return {}

    def url(self, way: str) -> str:
        return {SOURCE: self.source, HANDED: self.proxy}.get(way, self.target).url


def pair_of(name: str, setup: Setup, gpus: Sequence[str], kv_bytes: int) -> Pair:
    """A pair, not started."""
    side_channels, tiers = ([free_port(), free_port()] for _ in range(2))

    def make(number: int) -> VllmServer:
        environ = {"VLLM_COMMEXT": "0" if name == P2P else "1"}
        config = configuration(name, side_channels[number], tiers[number])
        config["kv_buffer_device"] = setup.device
        args = ["--kv-transfer-config", json.dumps(config)]
        label = f"{name}-{('source', 'target')[number]}"
        one = Engine(label, gpu=gpus[number], kv_bytes=kv_bytes, environ=environ, args=args)
        return engines.server(setup, one)

    source, target = make(0), make(1)
    proxy = ProxyServer(f"{name}-proxy", [source.url], [target.url], setup.folder)
    return Pair(name, source, target, proxy, side_channels[0], tiers[0])


def num_bytes(read: Metrics) -> float:
    """By the connector, and from the tier's peers into host memory."""
    ours = "vllm:commext_nixl_bytes_total"
    theirs = "vllm:kv_offload_tiering_read_bytes_total"
    return sum(
        value
        for (name, labels), value in read.samples.items()
        if name == ours or (name == theirs and dict(labels)["tier"].endswith(P2P))
    )


class Run:
    """Conversations at pairs, and what became of their third turns."""

    def __init__(
        self, args: argparse.Namespace, session: aiohttp.ClientSession, rows: list[Row]
    ) -> None:
        self._args = args
        self._session = session
        self._rows = rows
        self._dice = random.Random(args.seed)

    async def all(self, pairs: Sequence[Pair]) -> None:
        """Every pair and way in turn, one round to warm up, and the kills at the end."""
        for number in range(-1, self._args.rounds):
            for state in (IDLE, BUSY):
                for pair in pairs:
                    async with self._clients(pair, NUM_BUSY if state == BUSY else 0):
                        for way in WAYS[pair.name]:
                            row = await self._measure(pair, way, state)
                            if number >= 0:
                                self._keep(row)
        for pair in pairs:
            await self._kill(pair)

    def _prompt(self, count: int) -> list[int]:
        most = VOCABULARY[self._args.device]
        return [self._dice.randrange(LEAST_TOKEN, most) for _ in range(count)]

    async def _ask(self, url: str, prompt: Sequence[int], params: dict[str, Any]) -> Stream:
        stream = Stream(prompt, ANSWER_TOKENS, {"kv_transfer_params": params} if params else {})
        await stream.read(self._session, url)
        if stream.error:
            raise RuntimeError(f"{url}: expected an answer, got {stream.error}")
        return stream

    async def _third_prompt(self, pair: Pair) -> list[int]:
        """Of a conversation whose two turns the source has answered."""
        history, beyond, _, _ = SIZES[self._args.device]
        so_far: list[int] = []
        for end in (history // 2, history):
            so_far += self._prompt(end - ANSWER_TOKENS - len(so_far))
            so_far += (await self._ask(pair.source.url, so_far, {})).ids
        await asyncio.sleep(SETTLE_SECONDS)
        return so_far + self._prompt(beyond)

    async def _third(self, pair: Pair, way: str, prompt: Sequence[int], state: str) -> Row:
        stream = await self._ask(pair.url(way), prompt, pair.params(way))
        first, second = (1e3 * one for one in stream.token_seconds()[:2])
        row: Row = {"pair": pair.name, "way": way, "state": state}
        return {**row, "first": first, "second": second, "ids": stream.ids}

    async def _measure(self, pair: Pair, way: str, state: str) -> Row:
        prompt = await self._third_prompt(pair)
        before = scrape(pair.target.url)
        row = await self._third(pair, way, prompt, state)
        await asyncio.sleep(REPORT_SECONDS)
        row["MB"] = num_bytes(scrape(pair.target.url).minus(before)) / 1e6
        own = await self._ask(pair.source.url, prompt, {})
        return {**row, "equal": own.ids == row["ids"]}

    def _keep(self, row: Row) -> None:
        del row["ids"]
        self._rows.append(row)
        print(json.dumps(row), flush=True)

    @asynccontextmanager
    async def _clients(self, pair: Pair, count: int) -> AsyncIterator[None]:
        """Other clients at a pair's source meanwhile."""
        _, _, prompt, answer = SIZES[self._args.device]

        async def client() -> None:
            while True:
                await Stream(self._prompt(prompt), answer).read(self._session, pair.source.url)

        clients = [asyncio.create_task(client()) for _ in range(count)]
        try:
            yield
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _kill(self, pair: Pair) -> None:
        """Third turns around the source's death, twice in every way to its blocks."""
        ways = [way for way in WAYS[pair.name] if way not in (COMPUTED, SOURCE)] * 2
        turns = [(way, await self._third_prompt(pair)) for way in ways]
        for number, (way, prompt) in enumerate(turns):
            task = asyncio.create_task(self._third(pair, way, prompt, KILLED))
            if number == 0:
                await asyncio.sleep(self._args.kill_after_ms / 1e3)
                pair.source.signal_all(signal.SIGKILL)
            self._keep(await task)


def shown(rows: Sequence[Row]) -> list[list[str]]:
    """A line of medians for each pair, state and way; the first token with its range."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["pair"], row["state"], row["way"]), []).append(row)
    lines: list[list[str]] = []
    for (pair, state, way), of in found.items():
        computed = found.get((pair, IDLE if state == KILLED else state, COMPUTED), of)
        first, second, base = (
            statistics.median(row[key] for row in some)
            for some, key in ((of, "first"), (of, "second"), (computed, "first"))
        )
        firsts = [row["first"] for row in of]
        shown_first = f"{first:.1f} ({min(firsts):.1f}-{max(firsts):.1f})"
        megabytes = statistics.median(row.get("MB", 0.0) for row in of)
        lines.append([pair, state, way, str(len(of)), shown_first])
        lines[-1] += [f"{second:.1f}", f"{first / base:.2f}", f"{megabytes:.0f}"]
        lines[-1].append("-" if state == KILLED else str(sum(row["equal"] for row in of)))
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=tuple(SIZES), default="cpu")
    add("--pairs", nargs="+", choices=tuple(WAYS), default=["ours"])
    add("--gpus", nargs=2, default=["", ""], metavar=("SOURCE", "TARGET"))
    add("--kv-gib", type=float, default=4.5, help="KV cache of each engine on a GPU")
    add("--rounds", type=int, default=3)
    add("--kill-after-ms", type=float, default=15.0, help="of the turn that is under way")
    add("--start-seconds", type=float, default=400.0, help="for an engine to become ready")
    add("--seed", type=int, default=1)
    add("--logs", type=Path, help="keep the servers' logs there")
    add("--out", type=Path, required=True)
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    return parser.parse_args()


async def measure(args: argparse.Namespace, folder: Path, rows: list[Row]) -> None:
    """Start all servers, add the rows, and stop them."""
    setup = Setup(
        args.device,
        folder,
        *models.by_device(folder / "model", args.device),
        max_tokens=sum(SIZES[args.device][:2]) + ANSWER_TOKENS + 16,
        max_requests=2 * NUM_BUSY,
        start_seconds=args.start_seconds,
        server_args=[*(engines.SMALL_CACHE if args.device == "cpu" else ()), *args.server_args],
    )
    kv_bytes = int(args.kv_gib * (1 << 30))
    pairs = [pair_of(name, setup, args.gpus, kv_bytes) for name in args.pairs]
    first, *others = (one for pair in pairs for one in (pair.source, pair.target))
    # The others find what the first one has compiled.
    with engines.ready([first]), ExitStack() as stack:
        for one in others:
            stack.callback(one.stop)
            one.start()
        for pair in [*pairs]:
            try:
                seconds = pair.source.wait_ready(), pair.target.wait_ready()
                print(f"{pair.name} ready after {max(seconds):.0f} s", flush=True)
            except CommextError as error:
                print(f"{pair.name} is left out: {error}", flush=True)
                pairs.remove(pair)
                continue
            if HANDED in WAYS[pair.name]:
                stack.enter_context(pair.proxy)
        # vLLM closes a connection after five seconds, perhaps as the next request is sent.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=load.REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await Run(args, session, rows).all(pairs)


def main() -> int:
    args = arguments()
    about: dict[str, Any] = {
        "machine": machine("nixl", "torch", cuda=args.device == "cuda"),
        "command": shlex.join(["python", *sys.argv]),
        "load average at the start": load_average(),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="history-") as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            asyncio.run(measure(args, folder, rows))
        finally:
            about["load average at the end"] = load_average()
            lines = pages.head("A later turn at another engine", about)
            lines += pages.table(COLUMNS, shown(rows))
            found = {"about": about, "rows": rows}
            print(pages.write(args.out.parent, args.out.name, found, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
