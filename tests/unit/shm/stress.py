"""Code that the stress scripts share: forked processes with a pipe each, and their arguments."""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

FORK = multiprocessing.get_context("fork")  # 20 ms a process, not 500
SHAPE: dict[str, Any] = {"max_chunk_bytes": 1 << 15, "max_chunks": 2}  # a ring of 64 KiB


def start(work: Callable[..., None], *arguments: object) -> tuple[Any, Connection]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def arguments(doc: str | None, count: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(f"--{count}", type=int, required=True)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser
