"""Answers that break off, clients that leave, and faults of the proxy itself."""

import asyncio
import json
from typing import Any

import pytest

from vllm_commext.proxy.session.failures import MAX_WHOLE_BYTES
from vllm_commext.proxy.session.relay import Relay

BODY = {"prompt": "hello", "max_tokens": 20}
STREAM = {**BODY, "stream": True}
CONTENT = json.dumps(STREAM).encode()
RAW_STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(CONTENT) + CONTENT
)
EVENT = b'data: {"n": 1}\n\n'


@pytest.mark.parametrize(
    ("ending", "kind"), [("cut", "lost"), ("short", "lost"), ("silence", "timeout")]
)
async def test_a_broken_stream_ends_with_an_error_event(kit: Any, ending: str, kind: str) -> None:
    async def breaking(call: Any) -> None:
        if ending == "short":
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 60\r\n\r\n"
            )
            await call.send(head + EVENT + b'data: {"half of an ev')
            return
        await call.begin_stream()
        await call.chunk(EVENT)
        await call.chunk(b'data: {"half of an ev')
        if ending == "silence":
            await kit.hanging(call)

    # Short where it is to run out, and above a busy machine's pauses where it is not.
    seconds = 0.5 if kind == "timeout" else 60.0
    async with kit.cluster(decode_idle_timeout_seconds=seconds) as cluster:
        cluster.decode[0].behave = breaking
        async with cluster.post(STREAM) as response:
            assert response.status == 200
            text = await response.read()
        assert text.startswith(EVENT + b"data: ")
        assert text.endswith(b"\n\n")
        error = json.loads(text[len(EVENT) + len(b"data: ") :])["error"]
        assert (error["type"], error["side"], error["engine"]) == (kind, "decode", "decode0")
        assert kit.outcome(kind, "decode") in await cluster.metrics()


async def test_a_broken_plain_answer_is_seen_as_incomplete(kit: Any) -> None:
    """One that is too long to be read before the client is told of it."""
    length = 2 * MAX_WHOLE_BYTES

    async def breaking(call: Any) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
        await call.send(f"{head}{length}\r\n\r\n".encode() + b"x" * (length - 1))

    import aiohttp

    async with kit.cluster() as cluster:
        cluster.decode[0].behave = breaking
        with pytest.raises(aiohttp.ClientError):
            await cluster.ask(BODY)
        await cluster.idle()
        assert kit.outcome("lost", "decode") in await cluster.metrics()


@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_before_the_answer_aborts_the_engine(
    kit: Any, step: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with kit.cluster() as cluster:
        engine = getattr(cluster, step)[0]
        engine.behave = kit.hanging
        asking = asyncio.ensure_future(cluster.post(body).__aenter__())
        await kit.until(lambda: bool(engine.calls), f"the {step} step")
        asking.cancel()
        await kit.until(lambda: engine.num_left == 1, "the abort to arrive")
        await cluster.idle()
        assert len(cluster.decode[0].calls) == (step == "decode")
        assert kit.outcome("client_gone", "proxy") in await cluster.metrics()
    assert ("keeps its KV blocks" in caplog.text) == (step == "decode")


async def test_a_client_that_leaves_in_mid_stream_aborts_the_decode(kit: Any) -> None:
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.streaming(EVENT, hangs=True)
        async with cluster.post(STREAM) as response:
            assert await response.content.readany() == EVENT
            response.close()
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the abort to arrive")
        await cluster.idle()
        assert kit.outcome("client_gone", "proxy") in await cluster.metrics()


async def test_a_client_that_leaves_at_the_error_event_hides_no_failure(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_broken, left = Relay.end_broken, asyncio.Event()
    stays = lambda *given: asyncio.gather(end_broken(*given), left.wait())  # noqa: E731
    monkeypatch.setattr(Relay, "end_broken", stays)
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.streaming(EVENT)
        async with cluster.post(STREAM, headers={"Connection": "close"}) as response:
            while b"error" not in await response.content.readany():
                pass
        await cluster.idle()
        assert kit.outcome("bad_answer", "decode") in await cluster.metrics()


async def test_a_client_that_reads_nothing_holds_neither_memory_nor_an_engine(kit: Any) -> None:
    async def flood(call: Any) -> None:
        await call.begin_stream()
        while True:
            await call.chunk(b"data: " + b"x" * (1 << 20) + b"\n\n")

    async with kit.cluster(client_timeout_seconds=0.2) as cluster:
        cluster.decode[0].behave = flood
        host, port = cluster.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(RAW_STREAM)
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the abort to arrive")
        await cluster.idle()
        assert kit.outcome("client_gone", "proxy") in await cluster.metrics()
        assert b"HTTP/1.1 499" not in await _until_cut(reader)
        writer.close()


async def _until_cut(reader: asyncio.StreamReader) -> bytes:
    received = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 20), 10):
            received += piece
    except ConnectionResetError:
        pass
    return received


async def test_a_fault_of_the_proxy_itself_is_answered_and_logged(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("a bug")

    async with kit.cluster() as cluster:
        monkeypatch.setattr("vllm_commext.proxy.session.two_step_bodies.prefill_body", broken)
        await kit.expect_error(cluster, 500, "internal", "proxy")
    assert "ArithmeticError: a bug" in caplog.text


DONE = b"data: [DONE]\n\n"


async def test_a_client_that_leaves_with_its_whole_answer_has_not_gone_away(kit: Any) -> None:
    """Some close their connection at the last event, before the engine has ended its own."""
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.streaming(EVENT, DONE, hangs=True)
        async with cluster.post(STREAM) as response:
            received = b""
            while not received.endswith(DONE):
                received += await response.content.readany()
            response.close()
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the engine to be left")
        await cluster.idle()
        assert kit.outcome("ok", "proxy") in await cluster.metrics()
