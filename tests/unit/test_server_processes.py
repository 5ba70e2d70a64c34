"""Server processes are started, found ready, and ended whole."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.servers import LOOPBACK, Server, ServerEndedError, free_port
from vllm_commext.errors import CommextTimeoutError

STOP_SECONDS = 90
# A server whose child ignores SIGTERM and outlives it, as an engine process can.
STUBBORN = """
import http.server, signal, subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Starts a server and is killed: nobody is left to end it.
ORPHANING = """
import os, signal, sys
from tests.kit import servers
from tests.kit.servers import Server, free_port
port = free_port()
servers.GRACE_SECONDS = 1.0
server = Server("orphan", [sys.executable, "-c", sys.argv[1], str(port)], sys.argv[2], port=port)
server.start()
server.wait_ready()
print(*server.pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def stubborn(folder: Path) -> Server:
    port = free_port()
    return Server("stubborn", [sys.executable, "-c", STUBBORN, str(port)], folder, port=port)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_child_that_ignores_sigterm_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kit.servers.GRACE_SECONDS", 1.0)
    with stubborn(tmp_path) as server:
        pids = server.pids()
        assert len(alive(pids)) == 2
    assert alive(pids) == []


def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    owner = subprocess.run(
        [sys.executable, "-c", ORPHANING, STUBBORN, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert owner.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in owner.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + STOP_SECONDS
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(pids) == []


def test_an_early_end_is_told_with_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(ServerEndedError, match=r"(?s)status 3.*no such model"):
        Server("broken", command, tmp_path, port=free_port()).__enter__()


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = Server("silent", command, tmp_path, port=free_port(), ready_seconds=1.0)
    with pytest.raises(CommextTimeoutError, match="within 1 s"):
        server.__enter__()
    assert server.pids() == []


def test_ports_are_free_and_different() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, port))
