"""First tokens of prompts that fit a GPU's KV cache no more: with vLLM's OffloadingConnector beside
ours on both sides, whose blocks wait in the host's memory, and without it.

    python benchmarks/memory_tier.py --gpus 0 1 --out OUT

An 8B-shaped prefill and decode engine a way, both ways' prefill engines on the first GPU, their
decode engines on the second one, each with a KV cache of the same size, a proxy before each way.
The prompts of a working set come in turn, again and again: the least recently used one is always
the next, so that a cache smaller than the set has none of it.  Rounds of the ways alternate; the
first of each, which computes everything, does not count.  At the end of a set each engine is asked
by itself, in the same order.  With `--rates` each way's prompts then come by a Poisson process, of
the same times for both ways, as many as in all rounds that count.

Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import pages
import repository  # noqa: F401
from handovers.variants import EIGHT_BILLION, Setup, write_model
from machine import load_average, machine
from moving.streams import Stream

from tests.kit import cluster, fixed_cache
from tests.kit.metrics import Metrics, scrape
from tests.kit.servers import (
    CUDA_ENVIRON,
    LOOPBACK,
    ProxyServer,
    Server,
    VllmServer,
    free_port,
)

WITH, WITHOUT = "with the tier", "without"
TOKEN_BYTES = (
    2 * 2 * EIGHT_BILLION["num_hidden_layers"] * EIGHT_BILLION["num_key_value_heads"] * 128
)
"""Keys and values in two bytes each, of 128 channels a head."""
READ = {
    "prompt tokens": "vllm:prompt_tokens_total",
    "from caches": "vllm:prompt_tokens_cached_total",
    "hits in the GPU's cache": "vllm:prefix_cache_hits_total",
    "hits in other memory": "vllm:external_prefix_cache_hits_total",
}
"""Of the prefill engine."""


@dataclass(frozen=True)
class Way:
    """Engines with or without the tier."""

    name: str
    prefill: VllmServer
    decode: VllmServer
    proxy: Server


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", nargs=2, required=True, help="of the prefill and of the decode engines")
    add("--kv-gib", type=float, default=12.0, help="KV cache of each engine on its GPU")
    add("--host-gib", type=float, default=32.0, help="of each engine with the tier")
    add("--sets", nargs="+", type=float, default=[1.3, 0.5], help="of a KV cache")
    add("--prompt-tokens", type=int, default=8000)
    add("--rounds", type=int, default=4, help="the first does not count")
    add("--concurrency", type=int, default=1)
    add("--rates", nargs="*", type=float, default=[], help="requests/s, after the rounds")
    add("--start-seconds", type=float, default=400.0)
    add("--commit", default="?")
    add("--logs", type=Path)
    add("--out", type=Path, required=True)
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    return parser.parse_args()


def engine(args: argparse.Namespace, setup: Setup, way: str, role: str) -> VllmServer:
    model, options = write_model(setup)
    config = {
        "kv_connector": cluster.CONNECTOR,
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
        "kv_connector_extra_config": {
            "side_channel_host": LOOPBACK,
            "side_channel_port": free_port(),
        },
    }
    if way == WITH:
        tier = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": int(args.host_gib * (1 << 30))},
        }
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": config["kv_role"],
            "kv_connector_extra_config": {"connectors": [config, tier]},
        }
    return VllmServer(
        f"{role}-{way.replace(' ', '-')}",
        model,
        setup.folder,
        kv_transfer_config=config,
        args=[
            *("--served-model-name", cluster.MODEL_NAME, *options),
            *("--max-model-len", str(setup.max_tokens), "--enable-prefix-caching"),
            *fixed_cache(int(args.kv_gib * (1 << 30))),
            *setup.server_args,
        ],
        environ={"CUDA_VISIBLE_DEVICES": args.gpus[role == "decode"], "VLLM_COMMEXT_STRICT": "1"},
        base_environ=CUDA_ENVIRON,
        ready_seconds=setup.start_seconds,
    )


def started(args: argparse.Namespace, setup: Setup, stack: ExitStack) -> list[Way]:
    """Both ways' servers, ready."""
    made = {
        way: [engine(args, setup, way, role) for role in ("prefill", "decode")]
        for way in (WITH, WITHOUT)
    }
    stack.enter_context(cluster.all_ready([one for pair in made.values() for one in pair]))
    ways: list[Way] = []
    for name, (prefill, decode) in made.items():
        label = f"proxy-{name.replace(' ', '-')}"
        proxy = ProxyServer(label, [prefill.url], [decode.url], setup.folder)
        ways.append(Way(name, prefill, decode, stack.enter_context(proxy)))
    return ways


async def first_tokens(
    server: Server,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    arrivals: Sequence[float] | None = None,
) -> list[float]:
    """Seconds to the first token of each prompt, at most so many asked at a time; of each since its
    arrival, where these are given in seconds from now."""
    slots, start = asyncio.Semaphore(concurrency), time.monotonic()

    async def ask(session: aiohttp.ClientSession, prompt: Sequence[int], at: float) -> float:
        if arrivals:
            await asyncio.sleep(start + at - time.monotonic())
        began = time.monotonic()
        async with slots:
            stream = Stream(prompt, 2)
            began = began if arrivals else time.monotonic()
            await stream.read(session, server.url, cluster.MODEL_NAME)
            if stream.error:
                raise RuntimeError(f"expected an answer of {server.name}, got {stream.error}")
            return stream.times[0] - began

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asked = zip(prompts, arrivals or [0.0] * len(prompts), strict=True)
        return await asyncio.gather(*(ask(session, *one) for one in asked))


def measured(
    args: argparse.Namespace, ways: Sequence[Way], share: float, dice: random.Random
) -> list[dict[str, Any]]:
    """One working set, a row for each way."""
    count = round(share * args.kv_gib * (1 << 30) / (args.prompt_tokens * TOKEN_BYTES))
    times: dict[str, list[list[float]]] = {way.name: [] for way in ways}
    prompts = {
        way.name: [
            [dice.randrange(3, EIGHT_BILLION["vocab_size"]) for _ in range(args.prompt_tokens)]
            for _ in range(count)
        ]
        for way in ways
    }
    before: dict[str, Metrics] = {}
    for number in range(args.rounds):
        for way in ways if number % 2 else ways[::-1]:
            if number == 1:
                before[way.name] = scrape(way.prefill.url)
            found = asyncio.run(first_tokens(way.proxy, prompts[way.name], args.concurrency))
            times[way.name].append(found)
            print(f"{share:g} {way.name}: {statistics.mean(found) * 1e3:.0f} ms", flush=True)
    rows: list[dict[str, Any]] = []
    for way in ways:
        added = scrape(way.prefill.url).minus(before[way.name])
        counted = [one for each in times[way.name][1:] for one in each]
        alone = [
            asyncio.run(first_tokens(one, prompts[way.name], args.concurrency))
            for one in (way.prefill, way.decode)
        ]
        rounds = times[way.name]
        rows.append(row_of(share, count, way.name, counted, added, rounds=rounds, alone=alone))
    for rate in args.rates:
        rows += under_load(args, ways, prompts, share, rate)
    return rows


def under_load(
    args: argparse.Namespace,
    ways: Sequence[Way],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    share: float,
    rate: float,
) -> list[dict[str, Any]]:
    """A row for each way, whose prompts come by a Poisson process."""
    rows: list[dict[str, Any]] = []
    for way in ways:
        dice, before = random.Random(rate), scrape(way.prefill.url)
        asked = list(prompts[way.name]) * (args.rounds - 1)
        arrivals = list(accumulate(dice.expovariate(rate) for _ in asked))
        found = asyncio.run(first_tokens(way.proxy, asked, len(asked), arrivals))
        added = scrape(way.prefill.url).minus(before)
        name = f"{way.name}, {rate:g} requests/s"
        rows.append(row_of(share, len(prompts[way.name]), name, found, added))
        print(f"{share:g} {name}: {rows[-1]['mean ms']:.0f} ms", flush=True)
    return rows


def row_of(
    share: float,
    num_prompts: int,
    way: str,
    seconds: Sequence[float],
    added: Metrics,
    *,
    rounds: Sequence[Sequence[float]] = (),
    alone: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """What was measured of a way: seconds to first tokens, and what P has counted meanwhile.

    Args:
        rounds: the seconds of each round.
        alone: those of P and of D, asked by themselves.
    """
    return {
        "set": share,
        "prompts": num_prompts,
        "way": way,
        "mean ms": statistics.mean(seconds) * 1e3,
        "median ms": statistics.median(seconds) * 1e3,
        "round means ms": [statistics.mean(one) * 1e3 for one in rounds],
        "alone ms": [statistics.mean(one) * 1e3 for one in alone],
        **{name: added.total(counter) for name, counter in READ.items()},
    }


def markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    head = [
        "working set, of a KV cache",
        "prompts",
        "way",
        "mean ms",
        "median ms",
        "mean of each",
        "P, D by itself",
    ]
    shown = [
        [
            *(f"{row['set']:g}", str(row["prompts"]), row["way"]),
            *(f"{row['mean ms']:.1f}", f"{row['median ms']:.1f}"),
            " / ".join(f"{one:.0f}" for one in row["round means ms"]) or "-",
            " / ".join(f"{one:.0f}" for one in row["alone ms"]) or "-",
            *(f"{row[name]:.0f}" for name in READ),
        ]
        for row in rows
    ]
    return [
        *pages.head("Prompts that fit the GPU no more", about),
        "Mean and median: first token, of all rounds but the first. The rest: P's counters since.",
        "",
        *pages.table([*head, *READ], shown),
    ]


def main() -> int:
    args = arguments()
    about: dict[str, Any] = {
        "machine": machine("nixl", "torch", cuda=True),
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
        "prompts": f"{args.prompt_tokens} tokens, {args.concurrency} at a time",
        "load average at the start": load_average(),
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="tier-"))
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            "cuda",
            folder,
            max_tokens=args.prompt_tokens + 16,
            concurrency=16,
            gpus=args.gpus,
            gpu_memory=0.0,
            start_seconds=args.start_seconds,
            server_args=args.server_args,
        )
        ways, dice = started(args, setup, stack), random.Random(1)
        try:
            for share in args.sets:
                rows += measured(args, ways, share, dice)
        finally:
            about["load average at the end"] = load_average()
            found = {"about": about, "rows": rows}
            print(pages.write(args.out.parent, args.out.name, found, markdown(rows, about)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
