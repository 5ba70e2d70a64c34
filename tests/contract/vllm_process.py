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
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

SECONDS = 250
IMPORTS = ("vllm.plugins", "vllm.envs", "vllm.distributed.kv_transfer.kv_connector.factory")


def python(code: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``args`` as its ``sys.argv[1:]``; of vLLM's variables only ``environ`` are
    set."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        request = {"code": code, "args": args, "environ": environ, "out": str(out), "err": str(err)}
        status = _ask(request)
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


def _ask(request: Mapping[str, Any]) -> int:
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps(request) + "\n")
    parent.stdin.flush()
    answer = parent.stdout.readline()
    assert answer.startswith("{"), f"the process that imports vLLM has ended: {parent.poll()}"
    return json.loads(answer)["status"]


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
        child = os.fork()
        if child == 0:
            os.close(answers)
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        text = json.dumps({"status": os.waitstatus_to_exitcode(status)})
        os.write(answers, text.encode() + b"\n")


def _run(request: Mapping[str, Any]) -> NoReturn:
    """In the child: the code, as the main program, and then the end."""
    signal.alarm(SECONDS)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(request["environ"])
    sys.argv = ["-c", *request["args"]]
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
