"""What one vLLM server answers beside completions, and what clients may and may not set of the
parameters by which the proxy brings engines together."""

import asyncio
import json
from typing import Any

import pytest

from vllm_commext.proxy.http.request_body import MAX_SMALL_BYTES

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
IDS = {"prompt_token_ids": [1, 2, 3]}
LONG_IDS = {"prompt_token_ids": list(range(30_000))}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/batch",
        "/inference/v1/generate",
    ],
)
async def test_a_decode_engine_answers_what_is_no_completion(kit: Any, path: str) -> None:
    async with kit.cluster() as cluster:
        response = await cluster.ask({"model": "tiny", "max_tokens": 3}, path)
        assert (response.status, response.headers["X-Commext-Path"]) == (200, "direct")
        assert [call.path for call in cluster.decode[0].calls] == [path]
        assert not cluster.prefill[0].calls


async def test_the_version_is_the_decode_engines(kit: Any) -> None:
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.answering(200, b'{"version": "0.32.0"}')
        response = await cluster.get("/version")
        assert (response.status, await response.json()) == (200, {"version": "0.32.0"})


@pytest.mark.parametrize("path", ["/v1/completions", "/version", "/v1/messages"])
async def test_a_browser_is_answered_as_by_the_engine_without_a_key_or_a_place(
    kit: Any, path: str, tmp_path: Any
) -> None:
    """The engine is asked once, with no key; another origin is another question."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    release = asyncio.Event()

    async def preflight(call: Any) -> None:
        allowed = call.headers["origin"] == "https://page"
        head = "Access-Control-Allow-Origin: https://page\r\n" if allowed else ""
        await call.answer(200 if allowed else 400, b"OK" if allowed else b"no", "text/plain", head)

    async with kit.cluster(
        api_key_file=str(keys), engine_api_key_file=str(keys), max_in_flight=1
    ) as cluster:
        cluster.prefill[0].behave = kit.held(release, kit.prefill_ok)
        bearer = {"Authorization": "Bearer secret"}
        running = asyncio.create_task(cluster.ask(BODY, headers=bearer))
        await kit.until(lambda: bool(cluster.prefill[0].calls), "a request that takes the place")
        cluster.decode[0].behave = preflight
        for origin, status in (("page", 200), ("page", 200), ("other", 400), ("page", 200)):
            asked = {"Origin": f"https://{origin}", "Access-Control-Request-Method": "POST"}
            async with cluster.session.options(cluster.url + path, headers=asked) as response:
                assert response.status == status
                allowed = response.headers.get("Access-Control-Allow-Origin")
                assert allowed == ("https://page" if status == 200 else None)
        assert [call.headers["origin"] for call in cluster.decode[0].calls] == [
            "https://page",
            "https://other",
        ]
        assert not any("authorization" in call.headers for call in cluster.decode[0].calls)
        cluster.decode[0].behave = kit.decode_ok
        release.set()
        assert (await running).status == 200
        async with cluster.post(BODY) as response:
            assert response.status == 401


async def test_questions_of_browsers_are_few_at_a_time_and_short(kit: Any) -> None:
    release = asyncio.Event()
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.held(release, kit.answering(200, b"{}"))

        async def ask(origin: str) -> int:
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            path = cluster.url + "/v1/completions"
            async with cluster.session.options(path, headers=asked) as response:
                return response.status

        waiting = [asyncio.create_task(ask(f"https://{n}")) for n in range(4)]
        await kit.until(lambda: len(cluster.decode[0].calls) == 4, "four questions")
        assert await ask("https://4") == 503
        assert await ask("https://" + "x" * 300) == 400
        release.set()
        assert await asyncio.gather(*waiting) == [200] * 4


async def test_a_browser_gets_what_the_engine_allows_with_an_answer(kit: Any) -> None:
    """Else the page may not read it, whatever was said beforehand."""

    async def behave(call: Any) -> None:
        await call.answer(400, b"{}", headers="Access-Control-Allow-Origin: https://page\r\n")

    for role in ("prefill", "decode"):
        async with kit.cluster() as cluster:
            getattr(cluster, role)[0].behave = behave
            response = await cluster.ask(BODY)
            assert response.status == 400
            assert response.headers["Access-Control-Allow-Origin"] == "https://page"
            assert response.headers.getall("Content-Type") == ["application/json"]


HIDDEN = {
    "as a string": {"vllm_xargs": {"kv_transfer_params": "x"}},
    "as a number": {"vllm_xargs": {"kv_transfer_params": 3}},
    "as a list": {"vllm_xargs": {"kv_transfer_params": ["x", 1]}},
    "as null": {"vllm_xargs": {"kv_transfer_params": None}},
    "as an object": {"vllm_xargs": {"kv_transfer_params": {"do_remote_prefill": True}}},
    "beside much else": {"vllm_xargs": {"a": "x" * 70_000, "kv_transfer_params": "x"}},
    "in sampling parameters": {"sampling_params": {"extra_args": {"kv_transfer_params": "x"}}},
    "beside own ids": {"kv_transfer_params": {**IDS, "do_remote_prefill": True}},
    "beside many ids": {"kv_transfer_params": {**LONG_IDS, "stream_key": "0" * 32}},
    "no ids": {"kv_transfer_params": {"remote_host": "h"}},
    "text": {"kv_transfer_params": "x"},
    "many": {"kv_transfer_params": [1] * 40_000},
    "too much": {"vllm_xargs": {"a": "x" * (MAX_SMALL_BYTES + 1)}},
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/inference/v1/generate"])
async def test_parameters_of_the_engines_are_refused_wherever_they_hide(
    kit: Any, name: str, path: str
) -> None:
    async with kit.cluster() as cluster:
        response = await cluster.ask({**BODY, "n": 2, **HIDDEN[name]}, path)
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "bad_request"
        assert not cluster.decode[0].calls


@pytest.mark.parametrize("ids", [IDS, LONG_IDS], ids=["few", "many"])
@pytest.mark.parametrize("keys", [True, False])
async def test_a_clients_own_token_ids_go_to_both_engines(kit: Any, ids: Any, keys: bool) -> None:
    async with kit.cluster(keys=keys) as cluster:
        body = {**BODY, "kv_transfer_params": ids}
        assert (await cluster.ask(body)).status == 200
        assert (await cluster.ask({**body, "n": 2})).status == 200
        [prefilled] = (call.body["kv_transfer_params"] for call in cluster.prefill[0].calls)
        decoded, alone = (call.body["kv_transfer_params"] for call in cluster.decode[0].calls)
        assert prefilled.items() >= {**ids, "do_remote_decode": True}.items()
        assert decoded == {**ids, **kit.kv_params}
        assert alone == ids


async def test_what_holds_no_parameters_goes_on_as_it_is(kit: Any) -> None:
    own = {"vllm_xargs": {"session_id": "s", "b": [1, 2.5]}, "kv_transfer_params": None}
    async with kit.cluster() as cluster:
        assert (await cluster.ask({**BODY, **own})).status == 200
        assert json.loads(cluster.decode[0].calls[0].raw)["vllm_xargs"] == own["vllm_xargs"]


async def test_a_slash_at_the_end_leads_to_the_route_without_it(kit: Any) -> None:
    async with kit.cluster() as cluster:
        url = f"{cluster.url}/v1/completions/?a=1"
        async with cluster.session.post(url, json=BODY, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, "/v1/completions?a=1")
        async with cluster.session.post(url, json=BODY) as response:  # which follows it
            assert response.status == 200
        for path in ("/nothing/", "/v1/completions//", "//evil.example/"):
            async with cluster.session.post(cluster.url + path, json=BODY) as response:
                assert response.status == 404, path


async def test_another_method_is_told_which_are_allowed(kit: Any) -> None:
    async with kit.cluster() as cluster:
        response = await cluster.get("/v1/completions")
        assert (response.status, response.headers["Allow"]) == (405, "OPTIONS,POST")
        assert (await response.json())["error"]["code"] == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/inference/v1/generate"])
@pytest.mark.parametrize("is_allowed", [False, True])
async def test_clients_set_no_priority_unless_they_may(
    kit: Any, path: str, is_allowed: bool
) -> None:
    async with kit.cluster(client_priority=is_allowed) as cluster:
        headers = {"X-Vllm-Priority": "-9"}
        body = {**BODY, "priority": -9, "long": "w" * 50_000}
        for content in (body, {**BODY, "priority": -9}):
            assert (await cluster.ask(content, path, headers=headers)).status == 200
        for call in (*cluster.prefill[0].calls, *cluster.decode[0].calls):
            assert ("priority" in call.body) == is_allowed
            assert ("x-vllm-priority" in call.headers) == is_allowed
