"""One streamed request behind the proxy: when its prompt was computed, read and answered, by the
proxy's own window.

    python benchmarks/one_request.py --out benchmarks/results/one_request
    python benchmarks/one_request.py --device cuda --gpus 0 1 --out OUT

A prefill and a decode engine, both asked at once.  A short request wakes them up; the second one
counts.  Writes OUT.json, from which `make docs` draws.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import engines
import load
import models
from engines import OURS, Engine, Setup
from load import Stream
from machine import machine
from moving.admin import Admin

from tests.kit.servers import ProxyServer

SIZES = {"cpu": (3000, 48), "cuda": (8000, 64)}
"""Tokens of the prompt and of the answer."""
STEP = {"cpu": 512, "cuda": 2048}
KV_BYTES = 20 << 30
REPORT_SECONDS = 1.5
"""Until the window shows a request that has ended."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--gpus", nargs=2, default=["", ""], metavar=("P", "D"))
    parser.add_argument("--commit", default="?")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


async def ask(proxy: ProxyServer, admin: Admin, args: argparse.Namespace) -> dict[str, Any]:
    """The window's entry of a request, and the client's times beside it."""
    prompt_tokens, answer_tokens = SIZES[args.device]
    dice = random.Random(1)
    found: list[dict[str, Any]] = []
    async with load.new_session() as session:
        for _ in range(3):
            stream = Stream([dice.randrange(32, 127) for _ in range(prompt_tokens)], answer_tokens)
            await stream.read(session, proxy.url)
            if stream.error:
                raise RuntimeError(f"expected an answer, got {stream.error}")
            await asyncio.sleep(REPORT_SECONDS)
            state = await window(session, admin)
            found.append({**state["latest"][0], "client": stream.token_seconds()})
    return found[-1]


async def window(session: aiohttp.ClientSession, admin: Admin) -> dict[str, Any]:
    async with session.get(f"{admin.url}/state", headers=admin.headers) as response:
        response.raise_for_status()
        return await response.json()


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="one-request-") as temporary:
        folder = Path(temporary)
        setup = Setup(
            args.device,
            folder,
            *models.by_device(folder / "model", args.device),
            max_tokens=sum(SIZES[args.device]) + 16,
            max_requests=8,
            start_seconds=400.0,
            server_args=["--max-num-batched-tokens", str(STEP[args.device])],
        )
        small = engines.SMALL_CACHE if args.device == "cpu" else ()
        made = [
            engines.server(setup, Engine(role, OURS, role, gpu, kv_bytes=KV_BYTES, args=small))
            for role, gpu in zip(("prefill", "decode"), args.gpus, strict=True)
        ]
        admin = Admin(folder)
        proxy = ProxyServer("proxy", [made[0].url], [made[1].url], folder, args=admin.args)
        with engines.ready(made), proxy:
            entry = asyncio.run(ask(proxy, admin, args))
    about = {
        "machine": machine("nixl", "torch", cuda=args.device == "cuda"),
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
    }
    args.out.with_suffix(".json").write_text(json.dumps({"about": about, **entry}, indent=1) + "\n")
    print(json.dumps(entry["parts"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
