"""The link between two network namespaces: it passes, can be cut and throttled, and goes away."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.network import Link, NetworkError, namespace_link

BOUND_SECONDS = 20.0
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    while True:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(accepted.recv(100))
"""


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    """A link with an echo server at its far end."""
    manager = namespace_link()
    try:
        made = manager.__enter__()
    except NetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    command = [*made.enter(), sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield made
        finally:
            server.kill()
            manager.__exit__(None, None, None)


def echo(link: Link, seconds: float = BOUND_SECONDS) -> bytes:
    with socket.create_connection((link.far_address, 7000), timeout=seconds) as client:
        client.sendall(b"hello")
        return client.recv(100)


def test_a_cut_link_passes_nothing_and_then_everything_again(link: Link) -> None:
    assert echo(link) == b"hello"
    with link.cut(), pytest.raises(OSError, match=r"timed out|unreachable|No route"):
        echo(link, 0.5)
    assert echo(link) == b"hello"


def test_a_throttled_link_passes(link: Link) -> None:
    with link.throttled():
        assert echo(link) == b"hello"
    assert echo(link) == b"hello"
