"""Child processes of the benchmark."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 30.0
HERE = Path(__file__).parent


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """*command*, ended with the block."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextmanager
def engine(folder: Path, name: str) -> Iterator[int]:
    """A paced engine; its port."""
    port_file = folder / f"{name}.port"
    port_file.unlink(missing_ok=True)
    with running([sys.executable, str(HERE / "engine.py"), str(port_file)], folder / "engine.log"):
        end = time.monotonic() + START_SECONDS
        while not (port_file.exists() and port_file.read_text()):
            if time.monotonic() > end:
                raise TimeoutError(f"engine {name} did not start within {START_SECONDS} s")
            time.sleep(0.02)
        yield int(port_file.read_text())


def wait_listening(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
