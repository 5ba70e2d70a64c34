#!/usr/bin/env python3
"""What the newest releases on pip's index cost: vLLM, NIXL, FlashInfer and torch.

    python tools/canary.py [--vllm 0.34.0] [--source FOLDER] [--quick]

Prints the newest releases beside the tested ones, then the names that differ in that vLLM, by the
part that depends on them. Then it makes an environment of it in ``.venv-canary``, for CPUs, and
runs the contract tests and the demo there, but for ``--quick``. ``--source`` names an unzipped
wheel, such as a nightly's, and skips both.

Exit status: 0, nothing has moved and all holds; 1, something has, said line by line; 2, the index
could not be asked, or the environment not be made.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cpu_env import NIXL, TORCH
from installer import InstallError, run, uv_environment
from known_sources import SourceError, differences, download, version_in
from wheel_text import WheelError, url_of

from vllm_commext.compat.fits import NEWEST

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-canary"
RELEASES = {
    "vllm": f"{NEWEST}.0",
    "nixl": NIXL,
    "flashinfer-python": "whichever vLLM pins",
    "torch": TORCH,
}


def newest() -> dict[str, str]:
    """The newest release of each distribution on pip's index."""
    python = Path(sys.executable)
    settings = uv_environment(run(python.parent.parent, "-m", "pip", "config", "list"))
    found: dict[str, str] = {}
    for name in RELEASES:
        wheel = url_of(name, python, settings).rpartition("/")[2]
        found[name] = wheel.split("-")[1].partition("%2B")[0].partition("+")[0]
    return found


def announced(root: Path) -> Iterator[str]:
    """What vLLM's own text says will go in a later release: not a failure yet."""
    pattern = re.compile(r"removed in v?0\.(\d+)")
    newest_minor = int(version_in(root).split(".")[1])
    for path in sorted((root / "vllm").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = pattern.search(line)
            if found and int(found[1]) > newest_minor:
                yield f"{path.relative_to(root)}:{number}: {line.strip()}"


def trial(version: str, nixl: str) -> Iterator[str]:
    """Run the contract tests and a hand-over on that vLLM, and name those that fail."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "cpu_env.py", VENV, "--vllm", version, "--nixl", nixl],
        check=False,
    )
    if made.returncode:
        raise SourceError(f"the environment of vLLM {version} could not be made")
    python = str(VENV / "bin" / "python")
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for what, command in (
        ("the contract tests", ("-m", "pytest", "-q", "-n", "2", "tests/contract")),
        (
            "handovers",
            ("-m", "pytest", "-q", "tests/cpu/test_topologies.py", "-k", "llama and own"),
        ),
    ):
        done = subprocess.run([python, *command], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            yield f"{what} ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="", help="that release instead of the newest")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="an unzipped wheel")
    parser.add_argument("--quick", action="store_true", help="read its text, run nothing")
    args = parser.parse_args()
    try:
        return report(args)
    except (InstallError, SourceError, WheelError) as error:
        print(f"canary: {error}", file=sys.stderr)
        return 2


def report(args: argparse.Namespace) -> int:
    found = newest()
    for name, version in found.items():
        print(f"{name}: {version} is the newest; tested: {RELEASES[name]}")
    version = args.vllm or found["vllm"]
    with tempfile.TemporaryDirectory() as folder:
        root = args.source or download(version, Path(folder))
        print(f"\nvLLM {version_in(root)}, read:", flush=True)
        problems = [f"differs, {line}" for line in differences(root)]
        print("\n".join(problems) or f"all as in {NEWEST}")
        print("\nannounced by vLLM itself:", *announced(root), sep="\n")
    if not (args.source or args.quick):
        print(f"\nvLLM {version}, run:", flush=True)
        problems += trial(version, found["nixl"])
    print("\n" + ("\n".join(problems) or "Nothing has moved."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
