"""Running answers that leave their decode engine: what a drain and what a kill cost their clients.

All streams are at one decode engine.  When each has some of its answer, that engine is drained, and
they move to the other one; then as many new streams at that other engine lose it by SIGKILL, and go
on at the first one.  An engine serves nobody when the proxy counts no request there: after the
drain it could end, after the kill all losses are detected.  "Beyond" is the longest gap of a stream
since the drain less its own 99th percentile before, while all streams ran.  Of some answers each
token is judged by an engine that computes all of it at once.  With `--proxy-args --no-move` a drain
takes as long as the longest answer.

    python benchmarks/moves.py --out OUT
    python benchmarks/moves.py --device cuda --roles prefill decode decode --gpus 0 0 1 \
        --kv-gib 8 34 40 --connector-extra '{"reuse_blocks": true}' --out OUT --server-args \
        --compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
    python benchmarks/moves.py --device cuda --roles both both --gpus 0 1 --kv-gib 44 44 \
        --connector-extra '{"reuse_blocks": true}' --out OUT

Writes OUT.json and OUT.md.  Without GPUs it runs with a tiny model, to try it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import engines
import load
import models
import pages
import repository  # noqa: F401
from engines import OURS, Engine, Setup
from load import Stream
from machine import load_average, machine
from moving.admin import BOUND_SECONDS, Admin
from moving.streams import MAX_RANK, Span, figures, ranks, tokens_by_window, until

from tests.kit.metrics import Metrics, scrape
from tests.kit.servers import ProxyServer, VllmServer
from vllm_commext.bench.figures import quantile
from vllm_commext.proxy.errors_phases import Resume

DRAIN, KILL = "drain", "kill"
LEAST_TOKEN = 3
COUNTERS = {DRAIN: "commext_proxy_moves_total", KILL: "commext_proxy_resumes_total"}
LONG = ("each", "tokens by window")
READ = {
    "blocks read": "vllm:commext_nixl_blocks_total",
    "reused": "vllm:commext_nixl_reuse_blocks_total",
}
"""By the new engine of any other one, and of those of the old one's running requests."""
SIZES = {"cpu": (300, (600, 600), 50, 4), "cuda": (7000, (3000, 2000), 500, 32)}
"""Prompt tokens, answers' tokens of a drain and of a kill, tokens before it, streams."""
VOCABULARY = {"cpu": 256, "cuda": 32000}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--roles", nargs="+", choices=tuple(engines.ROLES), default=["prefill", "decode", "decode"])
    add("--gpus", nargs="+", default=[], help="of each engine")
    add("--kv-gib", nargs="+", type=float, default=[], help="KV cache of each engine on a GPU")
    add("--faults", nargs="+", choices=(DRAIN, KILL), default=[DRAIN, KILL])
    add("--streams", type=int)
    add("--kill-streams", type=int, help="of a kill, where not as many")
    add("--prompt-tokens", type=int)
    add("--answer-tokens", type=int, nargs=2, metavar=("DRAIN", "KILL"))
    add("--before-tokens", type=int, help="of each answer, before its engine goes")
    add("--checked", type=int, default=8, help="answers of each fault whose tokens are judged")
    add("--step", type=int, default=2048, help="tokens of an engine's step at most")
    add("--connector-extra", type=json.loads, default={}, metavar="JSON")
    add("--proxy-args", type=shlex.split, default=[], help="one text")
    add("--start-seconds", type=float, default=400.0, help="for an engine to become ready")
    add("--commit", default="?")
    add("--seed", type=int, default=1)
    add("--logs", type=Path, help="keep the servers' logs there")
    add("--out", type=Path, required=True)
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    args = parser.parse_args()
    prompt, answers, before, streams = SIZES[args.device]
    args.prompt_tokens = args.prompt_tokens or prompt
    args.answer_tokens = dict(zip((DRAIN, KILL), args.answer_tokens or answers, strict=True))
    args.before_tokens = args.before_tokens or before
    num_streams = args.streams or streams
    args.streams = {DRAIN: num_streams, KILL: args.kill_streams or num_streams}
    for name in ("gpus", "kv_gib"):
        given = getattr(args, name)
        if args.device == "cuda" and len(given) != len(args.roles):
            parser.error(f"--{name.replace('_', '-')}: expected one for each of {args.roles}")
        setattr(args, name, given or [0] * len(args.roles))
    if sum(role != "prefill" for role in args.roles) != 2:
        parser.error(f"--roles: expected two that decode, got {args.roles}")
    return args


class Run:
    """Streams at two decode engines, *first* and *second*."""

    def __init__(
        self,
        args: argparse.Namespace,
        proxy: ProxyServer,
        admin: Admin,
        decode: Sequence[VllmServer],
        session: aiohttp.ClientSession,
    ) -> None:
        self._args = args
        self._proxy = proxy
        self._admin = admin
        self._first, self._second = decode
        self._session = session
        self._dice = random.Random(args.seed)

    async def all(self, rows: list[dict[str, Any]]) -> None:
        """Add one row a fault."""
        for fault in self._args.faults:
            old, new = self._first, self._second
            if fault == KILL:
                old, new = new, old
            rows.append(await self._fault(fault, old, new))
            short = {key: value for key, value in rows[-1].items() if key not in LONG}
            print(json.dumps(short), flush=True)

    async def _fault(self, fault: str, old: VllmServer, new: VllmServer) -> dict[str, Any]:
        await self._ask("POST", "undrain", url=old.url)
        await self._ask("POST", "drain", url=new.url)
        await self._admin.until_usable(self._session, [old.url])
        streams = [self._stream(fault) for _ in range(self._args.streams[fault])]
        before, read_before = scrape(self._proxy.url), scrape(new.url)
        tasks = [asyncio.create_task(one.read(self._session, self._proxy.url)) for one in streams]
        try:
            await self._until(streams, 1)
            steady = time.monotonic()
            await self._ask("POST", "undrain", url=new.url)
            await self._until(streams, self._args.before_tokens)
            await self._admin.until_usable(self._session, [old.url, new.url])
            lengths = [len(one.ids) for one in streams]
            went = time.monotonic()
            if fault == DRAIN:
                await self._ask("POST", "drain", url=old.url)
            else:
                await asyncio.to_thread(old.signal_all, signal.SIGKILL)
            empty = await self._admin.until_empty(self._session, old.url)
            await asyncio.wait_for(asyncio.gather(*tasks), BOUND_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
        added, read = scrape(self._proxy.url).minus(before), scrape(new.url).minus(read_before)
        span = Span(steady, went, empty)
        each = [
            {"before": n, **figures(one, span)} for n, one in zip(lengths, streams, strict=True)
        ]
        return {
            "fault": fault,
            "empty seconds": empty - went,
            **summary(each, added, fault),
            **{name: int(read.total(counter)) for name, counter in READ.items()},
            **await self._judged(new, streams),
            "each": each,
            "tokens by window": tokens_by_window(streams, went),
        }

    def _stream(self, fault: str) -> Stream:
        most = VOCABULARY[self._args.device]
        count = self._args.prompt_tokens
        prompt = [self._dice.randrange(LEAST_TOKEN, most) for _ in range(count)]
        return Stream(prompt, self._args.answer_tokens[fault])

    async def _until(self, streams: Sequence[Stream], count: int) -> None:
        def has_begun() -> bool:
            broken = [one.error for one in streams if one.error]
            if broken:
                raise RuntimeError(f"expected all streams to run, got {broken[0]}")
            return all(len(one.ids) >= count for one in streams)

        await until(has_begun, f"{count} tokens of each stream", BOUND_SECONDS)

    async def _ask(self, method: str, path: str, **fields: str) -> None:
        await self._admin.ask(self._session, method, path, **fields)

    async def _judged(self, engine: VllmServer, streams: Sequence[Stream]) -> dict[str, int]:
        """How many tokens of some answers were judged, and how many are wrong."""
        whole = [one for one in streams if not one.error][: self._args.checked]
        asked = (ranks(self._session, engine.url, one) for one in whole)
        found = [rank for one in await asyncio.gather(*asked) for rank in one]
        wrong = sum(rank > MAX_RANK for rank in found)
        return {"judged": len(found), "wrong": wrong, "first": sum(rank == 1 for rank in found)}


def summary(each: Sequence[dict[str, Any]], added: Metrics, fault: str) -> dict[str, Any]:
    """What a fault's streams have in common."""
    counter = COUNTERS[fault]
    results = {str(one): int(added.total(counter, result=one)) for one in Resume}
    spread = {
        key: [quantile([one[key] for one in each], share) for share in (0.0, 0.5, 0.9, 1.0)]
        for key in ("before", "p99 before", "longest", "beyond", "on")
    }
    return {
        "streams": len(each),
        "moved": sum(one["resumed"] > 0 for one in each),
        "results": {key: value for key, value in results.items() if value},
        "errors": [one["error"] for one in each if one["error"]],
        **spread,
    }


def markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    columns = ("fault", "streams", "serves nobody after, s", "moved", "results")
    more = ("blocks read (reused)", "broken", "answer's tokens before")
    of_each = ("p99 before, ms", "longest gap since, ms", "beyond, ms", "goes on after, ms")
    keys = ("p99 before", "longest", "beyond", "on")
    lines = [
        "Of each stream: least / median / 90 % / most. Goes on after: since no request was there.",
        f"Wrong: of a rank above {MAX_RANK}, of the tokens that were judged.",
        "",
    ]
    shown = [
        [
            *(row["fault"], str(row["streams"]), f"{row['empty seconds']:.3f}", str(row["moved"])),
            ", ".join(f"{key} {value}" for key, value in row["results"].items()),
            f"{row['blocks read']} ({row['reused']})",
            str(len(row["errors"])),
            " / ".join(f"{value:.0f}" for value in row["before"]),
            *(" / ".join(f"{value:.1f}" for value in row[key]) for key in keys),
            f"{row['wrong']} of {row['judged']} ({row['first']} of rank 1)",
        ]
        for row in rows
    ]
    head = [*columns, *more, *of_each, "wrong tokens"]
    return [
        *pages.head("Streams that leave their engine", about),
        *lines,
        *pages.table(head, shown),
    ]


async def run(
    args: argparse.Namespace,
    proxy: ProxyServer,
    admin: Admin,
    decode: Sequence[VllmServer],
    rows: list[dict[str, Any]],
) -> None:
    """Warm the engines up, and have all faults."""
    async with load.new_session() as session:
        await admin.until_usable(session, [one.url for one in decode])
        warming = [Stream([LEAST_TOKEN + n] * 2 * args.step, 32) for n in range(4)]
        for one in warming:
            one.prompt = one.prompt[: args.prompt_tokens]
        await asyncio.gather(*(one.read(session, proxy.url) for one in warming))
        if broken := [one.error for one in warming if one.error]:
            raise RuntimeError(f"expected answers at the start, got {broken[0]}")
        await Run(args, proxy, admin, decode, session).all(rows)


def servers_of(args: argparse.Namespace, folder: Path) -> list[VllmServer]:
    """All engines, not started."""
    step = ["--max-num-batched-tokens", str(args.step)]
    setup = Setup(
        args.device,
        folder,
        *models.by_device(folder / "model", args.device),
        max_tokens=args.prompt_tokens + max(args.answer_tokens.values()) + 16,
        max_requests=2 * max(args.streams.values()),
        start_seconds=args.start_seconds,
        server_args=args.server_args,
    )
    small = engines.SMALL_CACHE if args.device == "cpu" else ()
    return [
        engines.server(
            setup,
            Engine(
                f"{role}-{number}",
                OURS,
                gpu=str(args.gpus[number]),
                kv_bytes=int(args.kv_gib[number] * (1 << 30)),
                policy="recompute",
                extra=args.connector_extra,
                args=[*step, *small],
            ),
        )
        for number, role in enumerate(args.roles)
    ]


def measure(
    args: argparse.Namespace, folder: Path, about: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Start all servers, add the rows, and stop them."""
    begun = time.monotonic()
    made, admin = servers_of(args, folder), Admin(folder)
    named = [
        word
        for role, one in zip(args.roles, made, strict=True)
        for word in (f"--{'engine' if role == 'both' else role}", one.url)
    ]
    proxy = ProxyServer("proxy", [], [], folder, args=[*named, *admin.args, *args.proxy_args])
    with engines.ready(made), proxy:
        about["seconds to start"] = f"{time.monotonic() - begun:.0f}"
        decode = [one for one, role in zip(made, args.roles, strict=True) if role != "prefill"]
        asyncio.run(run(args, proxy, admin, decode, rows))


def main() -> int:
    args = arguments()
    about: dict[str, Any] = {
        "machine": machine("nixl", "torch", cuda=args.device == "cuda"),
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
        "engines": ", ".join(args.roles),
        "prompts": f"{args.prompt_tokens} tokens; "
        + ", ".join(f"answers of {n} for a {name}" for name, n in args.answer_tokens.items()),
        "load average at the start": load_average(),
    }
    with tempfile.TemporaryDirectory(prefix="moves-") as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        try:
            measure(args, folder, about, rows)
        finally:
            about["load average at the end"] = load_average()
            found = {"about": about, "rows": rows}
            print(pages.write(args.out.parent, args.out.name, found, markdown(rows, about)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
