"""The Python files of a vLLM's wheel from pip's index, without its libraries: 12 of 336 MB.

uv finds the wheel with the registries that pip is configured for; its parts are then read by range
requests, or whole where the server has none.
"""

import io
import os
import re
import ssl
import subprocess
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

SUFFIXES = (".py", ".jinja", ".json", "/METADATA")
# Any machine can read them; those of other platforms have the same Python files.
PLATFORM = "x86_64-manylinux_2_28"
READ_AHEAD_BYTES = 4 << 20
SECONDS = 60


class WheelError(RuntimeError):
    """A wheel could not be had."""


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only what is asked for is fetched.

    Raises:
        WheelError: the server sends no parts of it.
    """

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self._url, self._context, self._at = url, context, 0
        with self._get("bytes=-1") as answer:
            total = re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if total is None:
            raise WheelError(f"expected {url} to be served in parts, got it whole")
        self._size = int(total[1])

    def _get(self, part: str) -> "urllib.request.addinfourl":
        request = urllib.request.Request(self._url, headers={"Range": part})
        return urllib.request.urlopen(request, timeout=SECONDS, context=self._context)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: "memoryview") -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with self._get(f"bytes={self._at}-{end - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def url_of(requirement: str, python: Path, environment: Mapping[str, str]) -> str:
    """Where the index has the newest wheel that meets a requirement.

    Args:
        requirement: such as ``vllm==0.33.0``.
        python: that has uv.
        environment: uv's variables, see `installer.uv_environment`.

    Raises:
        WheelError: the index has none.
    """
    options = ("--no-deps", "--only-binary", ":all:", "--format", "pylock.toml", "--no-header")
    target = ("--python-platform", PLATFORM, "--python", str(python))
    done = subprocess.run(
        [str(python), "-m", "uv", "pip", "compile", "-", "--quiet", *options, *target],
        input=requirement,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    found = re.search(r'url = "([^"]+\.whl)"', done.stdout)
    if found is None:
        raise WheelError(f"pip's index has no wheel of {requirement}: {done.stderr.strip()}")
    return found[1]


def _open(url: str, environment: Mapping[str, str]) -> zipfile.ZipFile:
    context = ssl.create_default_context(cafile=environment.get("SSL_CERT_FILE"))
    try:
        return zipfile.ZipFile(io.BufferedReader(RemoteFile(url, context), READ_AHEAD_BYTES))
    except WheelError:
        with urllib.request.urlopen(url, timeout=SECONDS, context=context) as whole:
            return zipfile.ZipFile(io.BytesIO(whole.read()))


def fetch(url: str, target: Path, environment: Mapping[str, str]) -> None:
    """Put a wheel's Python files, templates and metadata into a folder.

    Raises:
        WheelError: it could not be read.
    """
    try:
        with _open(url, environment) as archive:
            wanted = [one for one in archive.infolist() if one.filename.endswith(SUFFIXES)]
            for one in sorted(wanted, key=lambda one: one.header_offset):
                archive.extract(one, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{url} could not be read: {error}") from error
