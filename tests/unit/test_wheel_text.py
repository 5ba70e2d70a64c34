"""A wheel's Python files without its libraries, from a real server, by parts or whole."""

import http.server
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import wheel_text

LIBRARY_BYTES = 20 << 20
FILES = {
    "vllm/_version.py": "__version__ = '0.99.0'\n",
    "vllm/a/templates/chat.jinja": "{{ text }}",
    "vllm/z.py": "x = 1\n" * 1000,
    "vllm-0.99.0.dist-info/METADATA": "Name: vllm\nVersion: 0.99.0\n",
}


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; counts the bytes that it has sent."""

    def __init__(self, content: bytes, *, in_parts: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.in_parts, self.sent = content, in_parts, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/vllm-0.99.0-py3-none-any.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        data, wanted = self.server.content, self.headers.get("Range")
        if wanted and self.server.in_parts:
            start, end = self._part(wanted)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            data = data[start : end + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            return
        self.server.sent += len(data)

    def _part(self, wanted: str) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d*)-(\d+)", wanted)
        assert found is not None
        size = len(self.server.content)
        return (int(found[1]), int(found[2])) if found[1] else (size - int(found[2]), size - 1)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("wheel") / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
            archive.writestr(f"{name}.so", bytes(LIBRARY_BYTES))
    return path.read_bytes()


@pytest.fixture
def server(wheel: bytes, request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(wheel, in_parts=request.param) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize("server", [True, False], ids=["in parts", "whole"], indirect=True)
def test_only_python_files_and_what_belongs_to_them_are_fetched(
    server: Server, tmp_path: Path
) -> None:
    wheel_text.fetch(server.url, tmp_path, {})
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert {name: (tmp_path / name).read_text() for name in FILES} == FILES
    assert not any(name.endswith(".so") for name in found)
    if server.in_parts:
        assert server.sent < len(server.content) / 2


@pytest.mark.parametrize("server", [True], indirect=True)
def test_what_is_no_wheel_is_an_error_with_its_address(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>who are you?</html>"
    with pytest.raises(wheel_text.WheelError, match=re.escape(server.url)):
        wheel_text.fetch(server.url, tmp_path, {})


def test_nobody_there_is_an_error_with_the_address(tmp_path: Path) -> None:
    with pytest.raises(wheel_text.WheelError, match=r"127\.0\.0\.1:9/"):
        wheel_text.fetch("http://127.0.0.1:9/a.whl", tmp_path, {})
