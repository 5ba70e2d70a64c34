"""API keys, TLS on either side, and the access log."""

import asyncio
import logging
import re
import shutil
import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.limited_log import RateLimitedLog

BODY = {"prompt": "hello", "max_tokens": 20}
REQUESTS = "commext_proxy_requests_total"


@pytest.mark.parametrize("engine_key", ["for-engines", None])
async def test_a_client_needs_a_key_that_engines_never_get(
    kit: Any, tmp_path: Path, engine_key: str | None
) -> None:
    keys, own = tmp_path / "keys", tmp_path / "engine_key"
    keys.write_text("# clients\nfirst\nsecond\n")
    own.write_text("for-engines\n")
    options = {"api_key_file": str(keys)}
    options |= {"engine_api_key_file": str(own)} if engine_key else {}
    async with kit.cluster(**options) as cluster:
        for given in (None, "Bearer third", "Bearer # clients", "Bearer ", "first"):
            headers = {} if given is None else {"Authorization": given}
            async with cluster.post(BODY, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await cluster.get("/v1/models", headers=headers)).status == 401
        assert cluster.prefill[0].calls == []
        assert (await cluster.ask(BODY, headers={"Authorization": "Bearer second"})).status == 200
        for path in ("/live", "/ready", "/health", "/metrics"):
            assert (await cluster.get(path)).status == 200
        for server in (cluster.prefill[0], cluster.decode[0]):
            expected = f"Bearer {engine_key}" if engine_key else None
            assert server.calls[0].headers.get("authorization") == expected


async def test_requests_without_a_key_are_counted_by_endpoint_and_few_are_logged(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = RateLimitedLog(logging.getLogger("vllm.commext.proxy"))
    monkeypatch.setattr("vllm_commext.proxy.http.access_and_errors.complaints", complaints)
    (tmp_path / "keys").write_text("first\n")
    async with kit.cluster(api_key_file=str(tmp_path / "keys"), access_log=True) as cluster:
        for path in ("/v1/models", "/v1/models", "/of-a-stranger", "/live") * 3:
            await cluster.get(path)
        page = await cluster.metrics()
    counted = [line for line in page.splitlines() if line.startswith(REQUESTS + "{")]
    assert counted == [f'{REQUESTS}{{endpoint="models",outcome="unauthorized",side="proxy"}} 6.0']
    assert [one.getMessage() for one in caplog.records] == ["no valid API key from 127.0.0.1"] * 5


@pytest.mark.parametrize("content", [None, "", "# only this\n"])
def test_a_file_without_keys_is_refused(kit: Any, tmp_path: Path, content: str | None) -> None:
    from vllm_commext.proxy.http.access_and_errors import client_keys

    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match="API key"):
        client_keys(str(tmp_path / "keys"))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", cert, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


def whole_hello() -> bytes:
    """A TLS client's first message."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), sent, server_hostname="x"
        ).do_handshake()
    return sent.read()


async def test_clients_and_engines_may_speak_tls(kit: Any, tmp_path: Path) -> None:
    from vllm_commext.proxy.config import server_tls
    from vllm_commext.proxy.routes_readiness_shutdown import connections_of, open_port

    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(cert))
    options = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    async with kit.cluster(**options) as inner:
        config = inner.proxy.config
        port = await open_port(
            inner.runner, connections_of(config), "127.0.0.1", 0, server_tls(config)
        )
        url = f"https://127.0.0.1:{port.sockets[0].getsockname()[1]}"
        async with inner.session.post(url + "/v1/completions", json=BODY, ssl=context) as response:
            assert response.status == 200
        for ca_file, status in ((str(cert), 200), ("", 503)):
            outer_options = {
                "decode": (url,), "engine_ca_file": ca_file, "engine_wait_seconds": 0.1
            }  # fmt: skip
            async with kit.cluster(num_decode=0, **outer_options) as outer:
                outer.prefill[0].behave = kit.answering(200, b"{}")
                async with outer.post(BODY) as response:
                    assert response.status == status


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_answer_names_the_libraries_of_the_proxy(kit: Any, role: str) -> None:
    """Neither in a header nor in an error, nor their versions."""
    async with kit.cluster() as cluster:
        getattr(cluster, role)[0].behave = kit.dropping
        host, port = cluster.url.removeprefix("http://").split(":")
        asked = "GET /live", "GET /none", "PUT /live", "OPTIONS /v1/models", "GET /metrics"
        for line in (*asked, "\x16\x03"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            writer.write((line + head).encode("latin-1"))
            told = (await asyncio.wait_for(reader.read(), 30)).lower()
            writer.close()
            assert told.startswith(b"http/1.")
            assert b"aiohttp" not in told
            assert b"python/" not in told
        for body in (BODY, {**BODY, "stream": True}):
            response = await cluster.ask(body)
            told = f"{response.headers} {await response.text()}"
            assert "aiohttp" not in told.lower()
            assert "ServerDisconnected" not in told


@pytest.mark.parametrize("hello", [b"\x16\x03\x01", whole_hello()], ids=["part", "whole"])
async def test_handshakes_that_stall_count_as_connections(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hello: bytes
) -> None:
    """They go when others come, and take nothing from those who get on. One is in progress."""
    from vllm_commext.proxy.config import server_tls
    from vllm_commext.proxy.http import client_connections as connections
    from vllm_commext.proxy.routes_readiness_shutdown import open_port

    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(cert))
    options = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    monkeypatch.setattr(connections, "MIN_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(connections, "_MAX_HANDSHAKES", 1)
    guard = connections.Connections(3, 3, 60.0)
    async with kit.cluster(**options) as cluster:
        port = await open_port(
            cluster.runner, guard, "127.0.0.1", 0, server_tls(cluster.proxy.config)
        )
        number = port.sockets[0].getsockname()[1]
        stalled = [await asyncio.open_connection("127.0.0.1", number) for _ in range(3)]
        for _, writer in stalled:
            writer.write(hello)
        await kit.until(lambda: guard.num_open == 3, "three handshakes")
        url = f"https://127.0.0.1:{number}"
        async with cluster.session.get(url + "/live", ssl=context) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        await asyncio.sleep(0.2)
        async with cluster.session.post(url + "/v1/completions", json=BODY, ssl=context) as got:
            assert got.status == 200
        told = await asyncio.wait_for(stalled[0][0].read(), 5)
        assert bool(told) == (len(hello) > 3)
        assert guard.num_open <= 3
        for _, writer in stalled:
            writer.close()
        await kit.until(lambda: guard.num_open <= 1, "the others to be gone")


def test_a_handshake_that_comes_before_uvloop_pauses_is_not_lost(tmp_path: Path) -> None:
    from vllm_commext.proxy.http.client_connections import Connections

    cert, key = certificate(tmp_path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(cert, key)
    client.load_verify_locations(cert)

    async def live(request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def main() -> None:
        loop, guard = asyncio.get_running_loop(), Connections(9, 9, 60.0)
        port = await loop.create_server(lambda: guard.make(web.Server(live), server), "127.0.0.1")
        url = f"https://127.0.0.1:{port.sockets[0].getsockname()[1]}"
        for _ in range(20):
            await asyncio.to_thread(lambda: urlopen(url, timeout=5, context=client).close())

    pytest.importorskip("uvloop").run(main())


async def test_the_access_log_has_a_line_for_each_request(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.INFO, logger="vllm.commext.proxy.access"):
        async with kit.cluster(access_log=True) as cluster:
            assert (await cluster.ask(BODY, headers={"X-Request-Id": "one"})).status == 200
            assert (
                await cluster.ask({"prompt": "x", "kv_transfer_params": {"x": 1}})
            ).status == 400
    took = time.monotonic() - began
    first, second = (r.getMessage() for r in caplog.records if r.name.endswith(".access"))
    assert first.startswith("id=one client=127.0.0.1 endpoint=/v1/completions outcome=ok ")
    assert " path=two-step prefill=prefill0 decode=decode0 first_token=" in first
    timed = re.search(r" first_token=(\d+\.\d{3}) seconds=(\d+\.\d{3})$", first)
    assert timed is not None, first
    assert 0.0 < float(timed[1]) <= float(timed[2]) <= took
    assert "outcome=bad_request side=proxy path=- prefill=- decode=- first_token=- " in second
