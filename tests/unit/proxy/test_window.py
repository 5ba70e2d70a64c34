"""The window tells of engines, times and requests, and nothing of a prompt."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.limits import Limits
from vllm_commext.proxy.errors_phases import Outcome, parts_of

TOKEN = "a-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "<img/src=x/onerror=alert(1)>"
STREAM = [b'data: {"choices": [{"text": "secret answer"}]}\n\n'] * 5 + [b"data: [DONE]\n\n"]


def outcome(first: float, per_token: float, kind: str = "ok", status: int = 0) -> Outcome:
    made = Outcome("x", kind, tokens=10, per_token=per_token, status=status)
    made.first_token_seconds = first
    return made


def test_the_parts_of_a_request_follow_from_its_marks() -> None:
    marks = [
        *((1.0, "planned", ""), (1.0, "prefilling", ""), (2.0, "prefill asked", "e0")),
        *((5.0, "prefilled", "e0"), (5.0, "decode asked", "e1"), (5.5, "decode answers", "e1")),
        *((6.0, "opened", ""), (6.0, "relaying", "e1"), (8.0, "prefill asked", "e2")),
        *((9.0, "prefilled", "e2"), (10.0, "moving", ""), (10.0, "decode asked", "e2")),
        *((10.5, "decode answers", "e2"), (11.0, "relaying", "e1"), (15.0, "asked", "")),
        *((16.0, "decode asked", "e1"), (17.0, "done", "")),
    ]
    assert [tuple(part) for part in parts_of(0.0, marks)] == [
        ("queue", "", 0.0, 2.0),
        ("prefill", "e0", 2.0, 5.0),
        ("ask", "e1", 5.0, 5.5),
        ("first token", "e1", 5.5, 6.0),
        ("prefill", "e2", 8.0, 9.0),
        ("decode", "e1", 6.0, 10.0),
        ("ask", "e2", 10.0, 10.5),
        ("first token", "e2", 10.5, 11.0),
        ("move", "", 10.0, 11.0),
        ("decode", "e1", 11.0, 15.0),
        ("queue", "", 15.0, 16.0),
        ("ask", "e1", 16.0, 17.0),
    ]
    assert parts_of(0.0, []) == []


def test_the_history_has_rates_quantiles_and_the_share_in_time() -> None:
    from vllm_commext.proxy.window.status_page import COLUMNS, NUM_BUCKETS, History

    history = History(Limits(0.02, 1.0), 1000.0)
    assert all(history.note(outcome(0.5, 0.01)) for _ in range(98))
    assert not history.note(outcome(1.5, 0.01)), "its first token came late"
    assert not history.note(outcome(0.5, 0.03)), "its other tokens came late"
    assert not history.note(outcome(0.5, 0.01, "no_engine", 503))
    assert history.note(outcome(0.5, 0.01, "bad_request", 400)), "the client's own mistake"
    history.count({"local": 7})
    row = dict(zip(COLUMNS, history.rows(1004.0)[-1], strict=True))
    assert (row["rate"], row["refused"], row["failed"], row["local"]) == (102 / 4, 1, 0, 7)
    assert row["first_p50"] == pytest.approx(0.5, rel=0.03)
    assert row["each_p99"] == pytest.approx(0.01, rel=0.03)
    assert row["in_time"] == pytest.approx(100 / 102)
    history.advance(1012.0)
    empty = dict(zip(COLUMNS, history.rows(1012.0)[-1], strict=True))
    assert (empty["rate"], empty["first_p50"], empty["in_time"]) == (0, None, None)
    minute = dict(zip(COLUMNS, history.minute(1012.0), strict=True))
    assert (minute["rate"], minute["local"]) == (102 / 12, 7)
    history.advance(1012.0 + 100 * NUM_BUCKETS)
    assert len(history.rows(1012.0 + 100 * NUM_BUCKETS)) <= NUM_BUCKETS
    assert history.minute(1012.0 + 100 * NUM_BUCKETS)[0] == 0


class Admin:
    def __init__(self, cluster: Any, url: str) -> None:
        self._session, self.url = cluster.session, url

    async def state(self, holds: Callable[[Any], object]) -> Any:
        """The state once it is as expected; the window looks once a second."""
        async with asyncio.timeout(60):
            while True:
                async with self._session.get(f"{self.url}/state", headers=BEARER) as response:
                    assert response.status == 200
                    if holds(state := await response.json()):
                        return state
                await asyncio.sleep(0.1)


def states(state: Any) -> list[str]:
    return [engine["state"] for engine in state["engines"]]


def placed(state: Any) -> int:
    columns, minute = state["history"]["columns"], state["minute"]
    return sum(minute[columns.index(name)] for name in ("local", "handed_over", "least_work"))


async def window_of(cluster: Any) -> Admin:
    from vllm_commext.proxy.routes_readiness_shutdown import admin_port

    lines: list[str] = []
    port = admin_port(cluster.proxy, cluster.proxy.config, lines.append)
    await cluster.stack.enter_async_context(port)
    return Admin(cluster, lines[0].removeprefix("admin port on "))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "token").write_text(TOKEN)
    return {
        **{"admin_port": 0, "admin_token_file": str(tmp_path / "token")},
        **{"health_interval_seconds": 0.05, "tpot_ms": 1000, "ttft_ms": 5000, "num_both": 2},
    }


async def stream_both(kit: Any, call: Any) -> None:
    is_prefill = (call.body.get("kv_transfer_params") or {}).get("do_remote_decode")
    if is_prefill:
        await kit.prefill_ok(call)
        return
    await call.stream(STREAM, lambda: asyncio.sleep(0.02))


async def test_the_state_has_requests_engines_and_placements_and_no_text(
    kit: Any, options: dict[str, Any]
) -> None:
    async with kit.cluster(0, 0, **options) as cluster:
        for engine in cluster.both:
            engine.behave = lambda call: stream_both(kit, call)
            engine.cache = (1000, 0.5)
        admin = await window_of(cluster)
        body = {"prompt": "secret question " * 20, "max_tokens": 20, "stream": True}
        for _ in range(3):
            answer = await cluster.ask(body, headers={"X-Request-Id": HOSTILE})
            assert answer.status == 200
        state = await admin.state(lambda state: len(state["latest"]) == 3 and placed(state) == 3)
        one = state["latest"][0]
        assert (one["id"], one["kind"]) == (HOSTILE, "ok")
        assert 1 <= one["tokens"] <= 5, "those that come with the first one count as one"
        assert one["prompt_tokens"] > 10
        assert one["decode"] in {engine["name"] for engine in state["engines"]}
        assert [part[0] for part in one["parts"]][-3:] == ["ask", "first token", "decode"]
        assert sum(part[3] - part[2] for part in one["parts"]) <= one["seconds"] + 1e-3
        assert {way[0] for way in one["ways"]} == {"local", "handed_over"}, "both ways' times"
        columns, minute = state["history"]["columns"], state["minute"]
        assert minute[columns.index("in_time")] == 1
        assert {engine["state"] for engine in state["engines"]} == {"ready"}
        assert all(engine["speed"] is None or engine["speed"] > 0 for engine in state["engines"])
        assert "secret" not in json.dumps(state)


async def test_an_engine_that_goes_and_comes_back_is_told_with_its_error(
    kit: Any, options: dict[str, Any]
) -> None:
    async with kit.cluster(0, 0, **options) as cluster:
        admin = await window_of(cluster)
        engines = cluster.proxy.registry.engines
        await cluster.both[0].stop()
        await kit.until(lambda: not engines[0].state.healthy, "the engine to be down")
        state = await admin.state(lambda state: states(state) == ["down", "ready"])
        assert "/health failed" in state["engines"][0]["error"]
        await cluster.both[0].start()
        await kit.until(lambda: engines[0].state.healthy, "the engine to be back")
        state = await admin.state(lambda state: states(state) == ["ready", "ready"])
        assert not state["engines"][0]["error"], "it is over"
        told = [event[2].partition(":")[0] for event in state["events"] if event[1] == "engine0"]
        assert told == ["ready", "down", "ready"]


async def test_the_page_is_open_and_runs_only_its_own_script_and_the_state_needs_the_token(
    kit: Any, options: dict[str, Any]
) -> None:
    async with kit.cluster(0, 0, **options) as cluster:
        admin = await window_of(cluster)
        async with cluster.session.get(admin.url) as response:
            page, rules = await response.read(), response.headers["Content-Security-Policy"]
        assert len(page) < 60_000
        assert "default-src 'none'" in rules
        assert "unsafe" not in rules
        assert re.findall(r"script-src 'sha256-", rules)
        assert not re.findall(
            rb"innerHTML|insertAdjacentHTML|document\.write|https?://(?!www\.w3)", page
        )
        async with cluster.session.get(f"{admin.url}/state") as response:
            assert response.status == 401


async def test_without_an_admin_port_nothing_is_kept(kit: Any) -> None:
    async with kit.cluster() as cluster:
        await cluster.ask({"prompt": "hello", "max_tokens": 2})
        assert not cluster.proxy.ledger.window.as_json(0.0)["latest"]
