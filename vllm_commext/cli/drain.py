"""`vllm-commext drain`: let an engine finish its work before it is stopped."""

import argparse
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from math import isnan, nan
from pathlib import Path
from typing import Any

from vllm_commext import private_files
from vllm_commext.drain import HEADER, MIDDLEWARE, VARIABLE
from vllm_commext.errors import CommextError, ConfigError

HELP = "drain an engine on this host: it rejects new requests and finishes what it has"

REQUEST_SECONDS = 10.0
NOTICE_SECONDS = 10.0
"""For the engine to notice the file."""
POLL_SECONDS = 0.2
# What an engine has to do, as it tells it on its page of metrics.
UNFINISHED = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HELD = "vllm:commext_nixl_held_requests"
UNSEEN = "in its engine or held, as its metrics do not say: does it run with --disable-log-stats?"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


class EngineAwayError(CommextError, RuntimeError):
    """The engine does not answer, or not as one that can drain."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    told = f"what the engine's {VARIABLE} names; default: the same variable here"
    add("--file", default=os.environ.get(VARIABLE, ""), help=told)
    add("--url", default="http://127.0.0.1:8000", help="the engine; default: %(default)s")
    for flag, default, told in (
        ("--wait", 300.0, "for its requests, and for the blocks that it holds for decode engines"),
        ("--quiet", 3.0, "that it must be idle: longer than routers take to see 503 of /health"),
    ):
        told = f"{told}; default: %(default)g"
        add(flag, type=float, default=default, metavar="SECONDS", help=told)
    told = "take the file away: the engine takes work again"
    add("--undo", action="store_true", help=told)


def run(args: argparse.Namespace) -> int:
    """0: it has nothing left to do, or takes work again; 1: it may still have after ``--wait``."""
    if not args.file:
        raise ConfigError(
            f"expected --file FILE, or {VARIABLE} as the engine has it; see its start command"
        )
    file, url = Path(args.file), args.url.rstrip("/")
    try:
        (private_files.remove if args.undo else private_files.make)(file)
    except (OSError, ValueError) as error:
        what = "removed" if args.undo else "made, in a folder that others cannot write"
        raise ConfigError(f"{file}: expected a file that can be {what}, got {error}") from error
    if args.undo:
        print(f"{file} is removed: its engine takes work again")
        return 0
    return _wait(url, args.wait, args.quiet)


def _wait(url: str, wait_seconds: float, quiet_seconds: float) -> int:
    began = idle_since = time.monotonic()
    told = ""
    while True:
        left, now = work_left(url), time.monotonic()
        if left is None:
            if now - began >= NOTICE_SECONDS:
                raise EngineAwayError(
                    f"{url}/health: expected 503 with {HEADER} within {NOTICE_SECONDS:g} s, got "
                    f"none: start the engine with --middleware {MIDDLEWARE} and the same "
                    f"{VARIABLE} as this command"
                )
            time.sleep(POLL_SECONDS)
            continue
        if any(left.values()):
            idle_since = now
        line = ", ".join(f"{'?' if isnan(n) else f'{n:g}'} {what}" for what, n in left.items())
        if line != told:
            print(f"{url} drains: {line}", flush=True)
            told = line
        if now - idle_since >= quiet_seconds:
            print(f"{url} has drained, in {now - began:.1f} s")
            return 0
        if now - began >= wait_seconds:
            print(f"{url} has not drained within {wait_seconds:g} s")
            return 1
        time.sleep(POLL_SECONDS)


def work_left(url: str) -> dict[str, float] | None:
    """Work left to an engine that drains, by kind; None for one that does not drain."""
    try:
        headers, health = _get(f"{url}/health")
        if HEADER not in headers:
            return None
        page = _SAMPLE.findall(_get(f"{url}/metrics")[1])
        samples = [(name, float(value)) for name, value in page]
        in_server = {"requests in its server": float(json.loads(health)["in_flight"])}
        if not any(name in UNFINISHED for name, _ in samples):
            return in_server | {UNSEEN: nan}
        return in_server | {
            "in its engine": sum(value for name, value in samples if name in UNFINISHED),
            "held for decode engines": sum(value for name, value in samples if name == HELD),
        }
    except (OSError, ValueError, TypeError, LookupError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else repr(error)
        raise EngineAwayError(
            f"cannot reach an engine at {url}: {why}; check --url, and undo this drain (--undo) if "
            "the engine is to serve"
        ) from error


def _get(url: str) -> tuple[Any, str]:
    """Headers and text of an answer of any status."""
    try:
        with _OPENER.open(url, timeout=REQUEST_SECONDS) as response:
            return response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.headers, error.read().decode()
