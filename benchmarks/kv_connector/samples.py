"""Figures, and the processes in which they are taken."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

OURS, VLLM = "ours", "vllm"
SPAWN = multiprocessing.get_context("spawn")
# vLLM stays as it would be without this package, and says nothing while it is timed.
ENVIRON = {
    "VLLM_COMMEXT": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "NIXL_LOG_LEVEL": "WARN",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "warn",
}


@dataclass(frozen=True)
class Sample:
    """One figure: ``value`` in ``unit`` of a variant in a case; lower is better."""

    case: str
    unit: str
    variant: str
    value: float


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables of the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def in_child(
    measure: Callable[..., list[Sample]],
    *arguments: Any,
    environ: Mapping[str, str] | None = None,
    limit_seconds: float = 1800.0,
) -> list[Sample]:
    """Samples that a function takes in a process of its own.

    Raises:
        TimeoutError: it has not ended within ``limit_seconds``.
        RuntimeError: it failed; carries its trace.
    """
    here, there = SPAWN.Pipe()
    with environment({**ENVIRON, **(environ or {})}):
        child = SPAWN.Process(target=_answer, args=(there, measure, arguments))
        child.start()
    there.close()
    try:
        if not here.poll(limit_seconds):
            raise TimeoutError(f"{measure.__name__} has not ended within {limit_seconds:g} s")
        failure, samples = here.recv()
    except EOFError:
        child.join(10)
        failure, samples = f"the process ended with status {child.exitcode}", []
    finally:
        child.kill()
        child.join(10)
    if failure:
        raise RuntimeError(f"{measure.__name__}: {failure}")
    return samples


def _answer(there: Connection, measure: Callable[..., list[Sample]], arguments: Any) -> None:
    """The parent ends this process: agents that are taken down while a peer lives may abort."""
    try:
        there.send(("", measure(*arguments)))
    except BaseException:  # noqa: BLE001 whatever it is, the parent raises it
        there.send((traceback.format_exc(), []))
    there.poll(None)
