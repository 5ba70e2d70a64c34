"""Processes that have imported vLLM and nothing else, without importing it in each.

One process imports what every server process does before it loads its plugins, and forks a child
for each piece of code, which then runs there as `python -c` would run it, under an environment of
its own. Importing vLLM takes ten seconds, forking takes none.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

SECONDS = 250
IMPORTS = ("vllm.plugins", "vllm.envs", "vllm.distributed.kv_transfer.kv_connector.factory")


def python(code: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``args`` as its ``sys.argv[1:]``; of vLLM's variables only ``environ`` are
    set."""
    return python_at_once(code, [args], **environ)[0]


def python_at_once(
    code: str, all_args: Sequence[Sequence[str]], **environ: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``code`` in as many processes at the same time as there are lists of arguments."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: list[dict[str, Any]] = [
            {"args": args, "out": str(folder / f"out{i}"), "err": str(folder / f"err{i}")}
            for i, args in enumerate(all_args)
        ]
        statuses = _ask({"code": code, "environ": environ, "jobs": jobs})
        return [
            subprocess.CompletedProcess(
                job["args"], status, Path(job["out"]).read_text(), Path(job["err"]).read_text()
            )
            for job, status in zip(jobs, statuses, strict=True)
        ]


def two_ranks(script: Path, *args: str, **environ: str) -> list[Any]:
    """Run ``script RANK args`` as two processes of their own; what each prints as JSON at its
    end."""
    made = [
        subprocess.Popen(
            [sys.executable, str(script), rank, *args],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        texts = [rank.communicate(timeout=300)[0] for rank in made]
    finally:
        for rank in made:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in made] == [0, 0], texts
    return [json.loads(text.splitlines()[-1]) for text in texts]


def _ask(request: Mapping[str, Any]) -> list[int]:
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps(request) + "\n")
    parent.stdin.flush()
    answer = parent.stdout.readline()
    assert answer.startswith("["), f"the process that imports vLLM has ended: {parent.poll()}"
    return json.loads(answer)


@cache
def _parent() -> subprocess.Popen[str]:
    """Ends with this process: its input does."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=clean,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve(requests: IO[str], answers: int) -> None:
    for line in requests:
        request = json.loads(line)
        children: list[int] = []
        for job in request["jobs"]:
            children.append(os.fork())
            if children[-1] == 0:
                os.close(answers)
                _run(request, job)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(answers, json.dumps(statuses).encode() + b"\n")


def _run(request: Mapping[str, Any], job: Mapping[str, Any]) -> NoReturn:
    """In the child: the code, as the main program, and then the end."""
    signal.alarm(SECONDS)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(request["environ"])
    sys.argv = ["-c", *job["args"]]
    exec(request["code"], {"__name__": "__main__"})
    raise SystemExit


def main() -> None:
    """Import vLLM, then serve until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed while importing is no answer
    for module in IMPORTS:
        importlib.import_module(module)
    _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
