"""Processes that have imported vLLM, without importing it in each.

They are forked (see ``tests/kit/fork_server.py``) from a process that has imported what a server
does before it loads its plugins, the same one for all. A variable of the environment is there when
the code runs, and was not when vLLM was imported."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit import forked
from tests.kit.forked import SERVER_MODULES

SECONDS = 250
# What ranks on CPUs need; where torch is built for CUDA, its NCCL would look for GPUs.
ON_CPUS = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ON_CPUS |= {"VLLM_DISABLE_PYNCCL": "1"}
Done = subprocess.CompletedProcess[str]


def python(code: str, *args: str, **environ: str) -> Done:
    """Run ``code`` with ``args`` as its ``sys.argv[1:]``; of vLLM's variables only ``environ`` are
    set."""
    return python_at_once(code, [args], **environ)[0]


def python_at_once(code: str, all_args: Sequence[Sequence[str]], **environ: str) -> list[Done]:
    """Run ``code`` in as many processes at the same time as there are lists of arguments."""
    return run_at_once([{"code": code, "arguments": list(args)} for args in all_args], environ)


def ranks(script: Path, num_ranks: int, *args: str, first: str = "", **environ: str) -> list[Any]:
    """Run ``script RANK args``, behind what is to be ``first`` there, as processes of their own;
    what each prints as JSON at its end."""
    all_args = [(str(rank), *args) for rank in range(num_ranks)]
    code = first + script.read_text()
    done = python_at_once(code, all_args, **{**ON_CPUS, **environ})
    assert [one.returncode for one in done] == [0] * num_ranks, done
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


def run_at_once(programs: Sequence[dict[str, Any]], environ: dict[str, str]) -> list[Done]:
    """Fork each of these programs, and wait for all of them."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{number}") for number in range(len(programs))]
        made: list[forked.Forked] = []
        for program, output in zip(programs, outputs, strict=True):
            with (
                output.with_suffix(".out").open("wb") as out,
                output.with_suffix(".err").open("wb") as err,
            ):
                files = (out.fileno(), err.fileno())
                made.append(forked.start(program, clean, SERVER_MODULES, files, environ))
        deadline = time.monotonic() + SECONDS
        try:
            statuses = [each.wait(max(0.0, deadline - time.monotonic())) for each in made]
        finally:
            for each in made:
                each.stdin.close()  # ends what has not
        return [
            subprocess.CompletedProcess(
                program.get("arguments", []),
                status,
                output.with_suffix(".out").read_text(),
                output.with_suffix(".err").read_text(),
            )
            for program, status, output in zip(programs, statuses, outputs, strict=True)
        ]
