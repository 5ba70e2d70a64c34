"""Packages into a virtual environment by uv, which downloads side by side and resolves in seconds,
with the registries that pip is configured for; by pip where uv cannot."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UV = "0.13.9"
# Of pip's settings, those that say where packages come from, and what uv calls them.
LISTS = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
VALUES = {
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# As pip: the best version of all registries, and whatever was installed before stays if it fits.
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


class InstallError(RuntimeError):
    """A program of the environment failed; the message is what it said."""


def run(venv: Path, *args: str, more: Mapping[str, str] | None = None) -> str:
    """Run the environment's Python and return its standard output.

    Raises:
        InstallError: it ended with another status than 0.
    """
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        [str(venv / "bin" / "python"), *args],
        capture_output=True,
        text=True,
        env={**environment, **(more or {})},
        check=False,
    )
    if done.returncode != 0:
        raise InstallError(
            f"{done.stdout}{done.stderr}\n"
            f"`python {' '.join(args)}` ended with status {done.returncode}"
        )
    return done.stdout


def uv_environment(pip_settings: str) -> dict[str, str]:
    """uv's variables for what ``pip config list`` prints, a line ``section.name='value'`` each.

    What pip's environment variables say, which is listed as ``:env:``, comes before its files.
    """
    found: dict[str, str] = {}
    for line in pip_settings.splitlines():
        key, sign, value = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if sign and (name not in found or section == ":env:"):
            found[name] = ast.literal_eval(value.strip())
    environment = dict(LIKE_PIP)
    for name, value in found.items():
        if name in LISTS:
            variable, separator = LISTS[name]
            environment[variable] = separator.join(value.split())
        elif name in VALUES:
            environment[VALUES[name]] = value
    return environment


def install(venv: Path, *args: str) -> None:
    """``pip install`` with these arguments.

    Raises:
        InstallError: neither uv nor pip could.
    """
    try:
        if not (venv / "bin" / "uv").exists():
            pip_install(venv, f"uv=={UV}")
        environment = uv_environment(run(venv, "-m", "pip", "config", "list"))
        python = ("--python", str(venv / "bin" / "python"))
        run(venv, "-m", "uv", "pip", "install", "--quiet", *python, *args, more=environment)
    except InstallError as error:
        sys.stderr.write(f"{error}\ncpu_env: going on with pip, which takes longer\n")
        pip_install(venv, *args)


def pip_install(venv: Path, *args: str) -> None:
    """``pip install`` with these arguments, by pip itself."""
    run(venv, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args)
