"""The gate in front of an engine that drains, and the command that waits for it."""

import asyncio
import http.server
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.cli import main
from vllm_commext.drain import HEADER, LOOK_SECONDS, RELEASE, VARIABLE, DrainFile, Gate, drain_file
from vllm_commext.errors import ConfigError

METRICS = """# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m 1"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:num_requests_waiting_by_reason{{engine="0"}} 7.0
vllm:commext_nixl_held_requests{{engine="0"}} {held}
"""


class Connection:
    def __init__(self, method: str, path: str, kind: str = "http", pieces: int = 2) -> None:
        self.scope: dict[str, Any] = {"type": kind, "method": method, "path": path}
        self.told: list[Any] = []
        self._rest = pieces

    async def receive(self) -> dict[str, Any]:
        self._rest -= 1
        return {"type": "http.request", "body": b"x", "more_body": self._rest > 0}

    async def send(self, message: Any) -> None:
        self.told.append(message)

    def answer(self, gate: Gate) -> Any:
        asyncio.run(gate(self.scope, self.receive, self.send))
        return self.told


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send("served")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "drain"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr("vllm_commext.drain.LOOK_SECONDS", 0.0)
    return path


@pytest.mark.parametrize(
    ("method", "path", "kind", "is_refused"),
    [
        ("POST", "/v1/completions", "http", True),
        ("GET", "/health", "http", True),
        ("GET", "/metrics", "http", False),
        ("GET", "/ping", "http", False),
        ("GET", "/v1/models", "http", False),
    ],
)
def test_while_the_file_is_there_work_is_refused(
    file: Path, method: str, path: str, kind: str, is_refused: bool
) -> None:
    gate = Gate(app)
    assert Connection(method, path, kind).answer(gate) == ["served"]
    file.touch()
    told = Connection(method, path, kind).answer(gate)
    assert (told != ["served"]) is is_refused
    if is_refused:
        start, body = told
        assert start["status"] == 503
        assert (HEADER.lower().encode(), b"1") in start["headers"]
        assert json.loads(body["body"])["error"]["type"] == "draining"
    file.unlink()
    assert Connection(method, path, kind).answer(gate) == ["served"]


def test_what_frees_prefills_passes(file: Path) -> None:
    file.touch()
    release = Connection("POST", "/v1/completions")
    release.scope["headers"] = [(b"content-type", b"application/json"), (RELEASE.encode(), b"1")]
    assert release.answer(Gate(app)) == ["served"]


def test_a_websocket_is_not_accepted_then(file: Path) -> None:
    file.touch()
    told = Connection("", "/v1/realtime", "websocket").answer(Gate(app))
    assert told == [{"type": "websocket.close", "code": 1013}]


def test_a_refused_body_is_taken_whole_and_a_client_that_has_gone_is_told_nothing(
    file: Path,
) -> None:
    file.touch()
    one = Connection("POST", "/v1/completions", pieces=5)
    one.answer(Gate(app))
    assert one._rest == 0
    gone = Connection("POST", "/v1/completions")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    gone.receive = receive  # type: ignore[method-assign]
    assert gone.answer(Gate(app)) == []


async def test_what_is_under_way_goes_on_and_is_counted(file: Path) -> None:
    release = asyncio.Event()

    async def held(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        raise RuntimeError("a request that fails ends too")

    gate = Gate(held)
    running = [Connection("POST", "/v1/completions") for _ in range(2)]
    tasks = [asyncio.ensure_future(gate(one.scope, one.receive, one.send)) for one in running]
    await asyncio.sleep(0)
    file.touch()
    for expected in (2, 0):
        health = Connection("GET", "/health")
        await gate(health.scope, health.receive, health.send)
        assert json.loads(health.told[1]["body"])["in_flight"] == expected
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_the_file_is_looked_for_no_more_often_than_it_may(tmp_path: Path) -> None:
    file = DrainFile(str(tmp_path / "drain"))
    assert not file.is_there()
    file.path.touch()
    file._next_look += 3600
    assert not file.is_there()
    file._next_look = 0.0
    assert file.is_there()
    assert LOOK_SECONDS > 0


def test_without_the_variable_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert drain_file() is None
    with pytest.raises(ConfigError, match=f"expected {VARIABLE} to name the file"):
        Gate(app)


def test_the_command_makes_a_folder_of_its_own(engine: Any, tmp_path: Path) -> None:
    engine.file = tmp_path / "run" / "commext" / "drain"
    assert drain(engine, "--wait", "60", "--quiet", "0.1") == 0
    assert stat.S_IMODE(engine.file.parent.stat().st_mode) == 0o700
    assert drain(engine, "--undo") == 0


class Engine(http.server.BaseHTTPRequestHandler):
    file: Path
    is_gated = True
    running = 3
    held = 2

    def do_GET(self) -> None:
        kind = type(self)
        drains = self.path == "/health" and kind.is_gated and kind.file.exists()
        self.send_response(503 if drains else 200)
        if drains:
            self.send_header(HEADER, "1")
        self.end_headers()
        if drains:
            self.wfile.write(json.dumps({"in_flight": kind.running}).encode())
        if self.path == "/metrics":
            self.wfile.write(METRICS.format(running=kind.running, held=kind.held).encode())
            kind.running, kind.held = max(kind.running - 1, 0), max(kind.held - 1, 0)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[type[Engine]]:
    kind = type("OneEngine", (Engine,), {"file": tmp_path / "drain"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    kind.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kind
    server.shutdown()
    server.server_close()


def drain(engine: Any, *options: str) -> int:
    return main.main(["drain", "--file", str(engine.file), "--url", engine.url, *options])


def test_the_command_waits_until_nothing_is_left(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drain(engine, "--wait", "60", "--quiet", "0.3") == 0
    first, *_, last, end = capsys.readouterr().out.splitlines()
    assert "3 requests in its server, 3 in its engine, 2 held for decode engines" in first
    assert "0 requests in its server, 0 in its engine, 0 held for decode engines" in last
    assert "has drained" in end
    assert engine.file.exists()
    assert drain(engine, "--undo") == 0
    assert not engine.file.exists()
    assert drain(engine, "--undo") == 0


@pytest.mark.parametrize("seconds", ["0.3", "0"])
def test_the_command_gives_up_in_time(
    engine: Any, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.running = 10**6
    assert drain(engine, "--wait", seconds) == 1
    assert f"has not drained within {seconds} s" in capsys.readouterr().out
    assert engine.file.exists()


def test_an_engine_without_metrics_counts_as_one_that_has_not_drained(
    engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "METRICS", "process_cpu_seconds_total 3.0\n")
    assert drain(engine, "--wait", "1", "--quiet", "0.1") == 1
    said = capsys.readouterr().out
    assert "0 requests in its server, ? in its engine or held, as its metrics do not say" in said
    assert "has not drained within 1 s" in said


def test_the_command_says_what_an_engine_lacks(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_commext.cli.drain.NOTICE_SECONDS", 0.3)
    engine.is_gated = False
    assert drain(engine) == 2
    assert "start the engine with --middleware vllm_commext.drain.Gate" in capsys.readouterr().err
    (tmp_path / "no folder").touch()
    engine.file = tmp_path / "no folder" / "drain"
    for options in ((), ("--undo",)):
        assert drain(engine, *options) == 2
        assert "expected a file that can be" in capsys.readouterr().err
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main.main(["drain"]) == 2
    assert f"expected --file FILE, or {VARIABLE}" in capsys.readouterr().err
    engine.file, engine.url = tmp_path / "drain", "http://127.0.0.1:1"
    assert drain(engine) == 2
    said = capsys.readouterr().err
    assert "cannot reach an engine at http://127.0.0.1:1: [Errno 111]" in said
    assert "--undo" in said


@pytest.mark.parametrize("options", [(), ("--undo",)])
@pytest.mark.parametrize("kind", ["pipe", "text", "link", "folder"])
def test_what_is_no_drain_file_is_refused_and_stays(
    kind: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "there"
    (tmp_path / "target").touch()
    made = {
        "pipe": lambda: os.mkfifo(path, 0o600),
        "text": lambda: path.write_text("notes"),
        "link": lambda: path.symlink_to(tmp_path / "target"),
        "folder": path.mkdir,
    }
    made[kind]()
    before = path.lstat()
    command = ["drain", "--file", str(path), "--url", "http://127.0.0.1:1", *options]
    assert main.main(command) == 2
    assert "expected a file that can be" in capsys.readouterr().err
    assert path.lstat().st_ino == before.st_ino


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"in_flight": "many"}', '{"in_flight": null}'])
def test_an_answer_that_is_no_engines_is_one_sentence(
    engine: Any, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(self: Any) -> None:
        self.send_response(503)
        self.send_header(HEADER, "1")
        self.end_headers()
        self.wfile.write(body.encode())

    engine.do_GET = answer
    assert drain(engine) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot reach an engine at" in said
