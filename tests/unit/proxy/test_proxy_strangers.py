"""What strangers may send: nobody else waits for it, and it is answered as it should be."""

import asyncio
import gzip
import json
import logging
import os
import secrets
import socket
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.kit.crossed import crossed
from tests.kit.request_bodies import run
from vllm_commext.limited_log import RateLimitedLog
from vllm_commext.proxy.http import client_connections as connections
from vllm_commext.proxy.http import json_members as body_module
from vllm_commext.proxy.http.json_members import members_of

BODY = {"prompt": "hello", "max_tokens": 3}
PATHS = ("/v1/completions", "/v1/responses", "/v1/models", "/live", "/metrics", "/none")


class Stranger:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, cluster: Any, data: bytes = b"") -> "Stranger":
        host, port = cluster.url.removeprefix("http://").split(":")
        stranger = cls(*await asyncio.open_connection(host, int(port)))
        cluster.stack.callback(stranger._writer.close)
        stranger._writer.write(data)
        return stranger

    async def answer(self, *, keeps: bool = False) -> tuple[int, bytes]:
        """The status and the body of what it is told, until the proxy closes; without the body
        where it *keeps* the connection."""
        told = self._reader.readuntil(b"\r\n\r\n") if keeps else self.rest()
        head, _, content = (await asyncio.wait_for(told, 30)).partition(b"\r\n\r\n")
        return int(head.split()[1]), content

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self._reader.read(), 30)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def send_now(self, data: bytes) -> None:
        os.write(self._writer.get_extra_info("socket").fileno(), data)


def head(length: int, path: str = "/v1/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


async def served(cluster: Any) -> None:
    assert (await cluster.ask(BODY)).status == 200


@pytest.mark.parametrize(
    ("path", "encoding"), crossed(PATHS, ["gzip", "deflate", "br", "gzip, identity", "x"])
)
async def test_nobodys_body_is_unfolded(kit: Any, path: str, encoding: str) -> None:
    async with kit.cluster() as cluster:
        content = gzip.compress(json.dumps(BODY).encode())
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        request = cluster.session.post(cluster.url + path, data=content, headers=headers)
        async with request as response:
            assert response.status == 415
            assert (await response.json())["error"]["type"] == "bad_request"
        headers["Content-Encoding"] = "Identity"
        async with cluster.session.post(
            cluster.url + "/v1/completions", json=BODY, headers=headers
        ) as response:
            assert response.status == 200


MIB = 1 << 20
CUTS = [(1, 30), (-101, -100), (-60, -1), (20, -50), (-100, -99)]
TOO_MANY = [{"max_connections": 6}, {"max_connections_per_peer": 6}, {"max_connections": 7}]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b'"",' * (MIB // 3) + b"1]}",
        b'{"prompt": [' + b"[]," * (MIB // 3) + b"1]}",
        b'{"prompt": "' + b'\\"' * (MIB // 2) + b'"}',
        b'{"prompt": "' + b"\\\\" * (MIB // 2) + b'"}',
        b'{"prompt": [' + b'{"a":"}"},' * (MIB // 10) + b"1]}",
        b'{"n": 1' + b" " * MIB + b"}",
        b"{" + b", ".join(b'"%d": [%s1]' % (n, b"[]," * 7000) for n in range(50)) + b"}",
        b'{"prompt": [' + b"7, " * (MIB // 3) + b"1]}",
    ],
    ids=["quotes", "brackets", "escapes", "slashes", "objects", "spaces", "members", "ids"],
)
def test_no_step_looks_at_more_than_a_window(raw: bytes) -> None:
    assert run(members_of(bytearray(raw)))[1] >= len(raw) // body_module.WINDOW_BYTES


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{" + b'"":1,' * 20_000 + b'"":1}', "at most 1000 members"),
        (b'{"' + b"n" * MIB + b'":1}', "names of at most"),
        (b'{"n": ' + b"1" * MIB + b"}", "limit"),
        (b'{"a": ' + b"[" * MIB, "nested at most"),
        (b'{"messages": ' + b'{"a":' * MIB, "nested at most"),
    ],
)
def test_more_than_any_request_has_is_refused_early(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(members_of(bytearray(raw)))


async def test_large_bodies_leave_room_for_small_ones(kit: Any) -> None:
    async with kit.cluster(max_buffered_bytes=8 * MIB) as cluster:
        part = head(4 * MIB) + b" " * (3 * MIB)
        large = [await Stranger.of(cluster, part) for _ in range(2)]
        await kit.until(lambda: cluster.proxy.budget.held_bytes == 6 * MIB, "two bodies")
        large.append(await Stranger.of(cluster, part))
        assert (await large[2].answer(keeps=True))[0] == 503
        await served(cluster)


@pytest.mark.parametrize(("size", "cuts"), crossed([100, 20_000, 300_000], CUTS))
async def test_a_request_may_come_in_pieces(kit: Any, size: int, cuts: tuple[int, int]) -> None:
    """Whatever is looked at later, its bytes keep their order; two requests on one connection."""
    async with kit.cluster() as cluster:
        content = json.dumps({"prompt": secrets.token_hex(size // 2)}).encode()
        data = head(len(content)) + content
        places = [0, *(cut if cut > 0 else len(data) + cut for cut in cuts), len(data)]
        client = await Stranger.of(cluster)
        for number in range(2):
            for begin, end in pairwise(places):
                client.send(data[begin:end])
                await asyncio.sleep(0.005)
            await kit.until(lambda n=number: len(cluster.decode[0].calls) > n, "the request")
        prompts = [json.loads(call.raw)["prompt"] for call in cluster.decode[0].calls]
        assert prompts == [json.loads(content)["prompt"]] * 2


@pytest.mark.parametrize(
    ("size", "shape"),
    crossed([2 * MIB, 10 * MIB], ["one", "chunked", "three", "many heads", "TLS"]),
)
async def test_bodies_may_come_before_their_requests_begin(
    kit: Any, monkeypatch: pytest.MonkeyPatch, size: int, shape: str
) -> None:
    """All at once: uvloop reads again and again in one step, until it is paused. "many heads": as
    where too many are in memory. "TLS": before the end of its handshake is noted."""
    content = json.dumps({"prompt": "x" * size}).encode()
    request = head(len(content)) + content
    if shape == "chunked":
        begin = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        request = begin + b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"
    num_requests = 3 if shape in ("three", "many heads") else 1
    data = request * (num_requests - 1) + request.replace(b": x", b": x\r\nConnection: close", 1)
    monkeypatch.setattr(connections, "MAX_HEADS_BYTES", 0 if shape == "many heads" else 1 << 24)
    of, num_come, in_one_step = connections.Connection, 0, list[int]()
    make, take_in = of.connection_made, of.data_received

    def gather(one: Any, piece: bytes) -> None:
        nonlocal num_come
        num_come += len(piece)
        if num_come == len(data):
            num_come, one.data_received = 0, partial(take_in, one)
            in_one_step.append(go_on(one, 0))
            if shape == "TLS":
                make(one, one._client)

    def go_on(one: Any, start: int) -> int:
        while start < len(data) and one._client.is_reading():
            one.data_received(data[start : start + 256_000])
            start += 256_000
        if start < len(data):
            asyncio.get_running_loop().call_soon(go_on, one, start)
        return start

    monkeypatch.setattr(of, "connection_made", of.enter if shape == "TLS" else make)
    monkeypatch.setattr(of, "data_received", gather)
    async with kit.cluster() as cluster:
        for _ in range(3):
            told = await (await Stranger.of(cluster, data)).rest()
            assert told.count(b"HTTP/1.1 200 OK") == num_requests
        prompts = [json.loads(call.raw)["prompt"] for call in cluster.decode[0].calls]
        assert set(map(len, prompts)) == {size}
    assert max(in_one_step) <= {"many heads": 2, "TLS": 1}.get(shape, 3) * 256_000


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\n\r", False),
        (head(3) + b"12", False),
        (head(3) + b"123", True),
        (head(3).lower() + b"12", False),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc", False),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
        (b"", False),
    ],
)
def test_whether_a_request_is_whole(raw: bytes, expected: bool) -> None:
    assert connections._is_whole(raw) is expected


async def test_requests_that_are_not_whole_are_looked_at_for_a_part_of_the_time(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole one is answered before those that came earlier and are not."""
    monkeypatch.setattr(connections, "_PAUSE_SECONDS", 60.0)
    async with kit.cluster() as cluster:
        first = await Stranger.of(cluster, head(10))  # it is looked at, and no other for a minute
        await asyncio.sleep(0.1)
        later = [await Stranger.of(cluster, head(10)) for _ in range(20)]
        await served(cluster)
        assert cluster.proxy.requests.num_begun == 1
        for one in later:
            one.send(b'"a string"')
            assert (await one.answer(keeps=True))[0] == 400
        first.send(b'"a string"')
        assert (await first.answer(keeps=True))[0] == 400


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(5.0, ["aa"] * 5 + ["aaab", "aaabaa"]), (0.0, ["aa", "aaab", "aaabaa"])],
)
async def test_many_requests_begin_a_few_at_a_time_each_client_in_turn(
    seconds: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a look at all connections in between, and not while new ones come, for a moment."""
    monkeypatch.setattr(connections, "_ENTRY_SECONDS", seconds)
    begun: list[str] = []

    class One:
        def __init__(self, peer: str) -> None:
            self.peer, self.hold = peer, lambda: None
            self.take_up = lambda: begun.append(peer)

    every: Any = connections.Connections(100, 100, 1.0)
    for peer in "a" * 20 + "b":
        every.ready.take_up(One(peer))
    turns = []
    while len(begun) < 21:
        if len(turns) in (0, 2):  # those of a burst come at every look or every other one
            every.enter(One("c"))
        turns.append("".join(begun))
        await asyncio.sleep(0)
    assert turns[: len(expected)] == expected
    assert len(turns) == 7 + len(expected)


@pytest.mark.parametrize("sent", [0, 40_000])
async def test_a_body_must_keep_coming(kit: Any, monkeypatch: Any, sent: int) -> None:
    monkeypatch.setitem(connections._HTTP, "lingering_time", 0.1)
    options = {"client_timeout_seconds": 0.2, "upload_bytes_per_second": 100_000}
    async with kit.cluster(**options) as cluster:
        slow = await Stranger.of(cluster, head(MIB) + b" " * sent)
        status, content = await slow.answer()
        assert status == 408
        assert f"got {sent} bytes" in json.loads(content)["error"]["message"]


async def test_a_slow_body_that_keeps_the_rate_may_take_its_time(kit: Any) -> None:
    options = {"client_timeout_seconds": 0.5, "upload_bytes_per_second": 50_000}
    async with kit.cluster(**options) as cluster:
        content = json.dumps({"prompt": "x" * 100_000}).encode()
        client = await Stranger.of(cluster, head(len(content)))
        for start in range(0, len(content), 20_000):
            client.send(content[start : start + 20_000])
            await asyncio.sleep(0.15)
        await kit.until(lambda: bool(cluster.decode[0].calls), "the request")


async def is_live(cluster: Any) -> bool:
    asked = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return (await (await Stranger.of(cluster, asked)).answer())[0] == 200


@pytest.mark.parametrize(
    ("sent", "options"), crossed([b"", b"GET /live HT", head(50), head(50) + b"{"], TOO_MANY)
)
async def test_the_oldest_idle_connection_goes_where_there_are_too_many(
    kit: Any, sent: bytes, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MIN_IDLE_SECONDS", 0.0)
    async with kit.cluster(**options) as cluster:
        idle = [await Stranger.of(cluster, sent) for _ in range(7)]
        for _ in range(5):
            assert await is_live(cluster)
        with suppress(ConnectionError):
            assert await idle[0].rest() == b""
        await served(cluster)


async def test_one_whose_request_is_there_but_not_read_is_not_idle(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the proxy was busy. The new ones' connections are taken up first."""
    asked = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    monkeypatch.setattr(connections, "MIN_IDLE_SECONDS", 0.0)
    async with kit.cluster(max_connections=5) as cluster:
        old = [await Stranger.of(cluster) for _ in range(5)]
        await is_live(cluster)
        for one in old[1:]:
            one.send_now(asked)
        late = socket.create_connection(("127.0.0.1", int(cluster.url.rpartition(":")[2])))
        with late:
            late.sendall(asked)
            assert [(await one.answer())[0] for one in old[1:]] == [200] * 4
            late.setblocking(False)
            told = await asyncio.get_running_loop().sock_recv(late, 1 << 16)
            assert told.split()[1] in (b"200", b"503")


async def test_connections_that_are_served_are_kept_and_others_refused(kit: Any) -> None:
    release = asyncio.Event()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(kit.cluster(max_connections_per_peer=3))
        cluster.prefill[0].behave = kit.held(release, kit.prefill_ok)
        asked = [asyncio.ensure_future(cluster.ask(BODY)) for _ in range(3)]
        await kit.until(lambda: len(cluster.prefill[0].calls) == 3, "three requests")
        assert (await (await Stranger.of(cluster)).answer())[0] == 503
        release.set()
        assert [one.status for one in await asyncio.gather(*asked)] == [200] * 3


@pytest.mark.parametrize("path", ["/metrics", "/live", "/v1/models", "/none"])
async def test_answers_that_nobody_reads_are_closed(kit: Any, path: str) -> None:
    """However many are asked for at once; by the kernel, as no task waits for such a client."""
    asked = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 100

    async def until_cut(client: socket.socket) -> None:
        while True:
            try:
                client.send(asked)
            except BlockingIOError:
                await asyncio.sleep(0.02)

    async with kit.cluster(client_timeout_seconds=0.3) as cluster:
        host, port = cluster.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.setblocking(False)
            with pytest.raises(OSError, match="reset|pipe"):
                await asyncio.wait_for(until_cut(client), 60)
        await served(cluster)


async def test_a_head_may_be_as_large_as_a_vllm_server_takes_it(kit: Any) -> None:
    async with kit.cluster() as cluster:
        headers = {f"X-{number}": "v" * 100 for number in range(240)}
        assert (await cluster.ask(BODY, headers=headers)).status == 200
        assert (await cluster.ask(BODY, headers={"X": "v" * 60_000})).status == 200
        path = "/v1/completions?" + "q" * 60_000
        async with cluster.session.post(cluster.url + path, json=BODY) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /live HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"A" * 70_000 + b": b\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        b"POST /live HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
    ],
    ids=["tls", "version", "nul", "line", "many headers", "two lengths", "zeros"],
)
async def test_what_is_no_http_gets_json_and_few_lines(
    kit: Any, data: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = RateLimitedLog(logging.getLogger("vllm.commext.proxy"))
    monkeypatch.setattr("vllm_commext.proxy.http.client_connections.complaints", complaints)
    async with kit.cluster() as cluster:
        with caplog.at_level(logging.INFO):
            for _ in range(20):
                status, content = await (await Stranger.of(cluster, data)).answer()
                assert status == 400
                assert json.loads(content)["error"]["code"] == 400
        assert 0 < len(caplog.records) < 10
        assert all(record.exc_info is None for record in caplog.records)
        await served(cluster)


async def test_a_head_without_end_is_cut_off(kit: Any) -> None:
    async with kit.cluster() as cluster:
        stranger = await Stranger.of(cluster, b"GET /live HTTP/1.1\r\n")
        with suppress(ConnectionError):
            for number in range(200):
                stranger.send(b"X-%d: " % number + b"v" * 8000 + b"\r\n")
                await asyncio.sleep(0)
            assert await stranger.rest() == b""
        await served(cluster)


async def test_behind_a_refused_body_a_head_without_end_is_cut_off_too(kit: Any) -> None:
    async with kit.cluster() as cluster:
        refused = head(1).replace(b": x", b": x\r\nContent-Encoding: gzip") + b"x"
        stranger = await Stranger.of(cluster, refused)
        assert (await stranger.answer(keeps=True))[0] == 415
        with suppress(ConnectionError):
            stranger.send(b"GET /live HTTP/1.1\r\n" + (b"X: " + b"v" * 8000 + b"\r\n") * 100)
            assert b"HTTP" not in await stranger.rest()


@pytest.mark.parametrize("streams", [True, False])
async def test_an_unexpected_error_ends_the_stream_and_does_not_begin_another_answer(
    kit: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    from vllm_commext.proxy.http.answer_events import EventCutter

    released = asyncio.Event()

    async def behave(call: Any) -> None:
        if not streams:
            await kit.decode_ok(call)
            return
        await call.begin_stream()
        await call.chunk(b'data: {"n": 1}\n\n')
        await released.wait()
        await call.chunk(b'data: {"n": 2}\n\n')

    def fail(*_: Any) -> None:
        raise KeyError("unexpected")

    async with kit.cluster() as cluster:
        cluster.decode[0].behave = behave
        content = json.dumps({**BODY, "stream": streams}).encode()
        if not streams:
            answers = cluster.proxy.ledger.metrics.answers
            monkeypatch.setattr(answers.request_seconds, "labels", fail)
        client = await Stranger.of(cluster, head(len(content)) + content)
        await kit.until(lambda: bool(cluster.decode[0].calls), "the request")
        await asyncio.sleep(0.1)
        monkeypatch.setattr(EventCutter, "feed", fail)
        released.set()
        await cluster.idle()
        client.send(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        told = await client.rest()
        assert told.count(b"HTTP/1.1") == 1 + streams
        assert (b'"internal"' in told) == streams
        assert told.count(b"\r\n0\r\n\r\n") == streams
