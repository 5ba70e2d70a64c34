"""What the proxy decides without a socket: rewriting, event cutting, choice, configuration."""

import argparse
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.request_bodies import arrived, awkward, json_values, run
from vllm_commext.cli import proxy as proxy_cli
from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.choice import least_work
from vllm_commext.proxy.engines.engine import Engine, EnginePool
from vllm_commext.proxy.engines.health_and_metrics import failed_check
from vllm_commext.proxy.errors_phases import LocalPrefill
from vllm_commext.proxy.http.answer_events import EventCutter
from vllm_commext.proxy.http.endpoint_prompts import CHAT, COMPLETIONS
from vllm_commext.proxy.http.json_members import encode, members_of
from vllm_commext.proxy.session import two_step_bodies as two_step

quick = settings(max_examples=50)
FIELDS = (
    "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "stop",
    "stop_token_ids", "n", "logprobs", "temperature", "seed", "ignore_eos", "anything",
)  # fmt: skip


bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6).map(
    lambda b: {"prompt": "p", **b}
)


@quick
@given(bodies)
def test_prefill_step_makes_one_token_of_the_same_prompt(body: dict[str, Any]) -> None:
    before = json.dumps(body)
    step = two_step.prefill_body(body)
    assert json.dumps(body) == before, "the client's body must stay as it is for the decode step"
    assert (step["max_tokens"], step["stream"]) == (1, False)
    assert step.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in step) == ("max_completion_tokens" in body)
    assert ("stream_options" in step) == ("stream_options" in body and not body.get("stream"))
    if isinstance(body.get("min_tokens"), int):
        assert step["min_tokens"] == min(body["min_tokens"], 1)
    assert step["kv_transfer_params"]["do_remote_decode"] is True
    untouched = set(body) - {
        "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options",
        "stop_token_ids", "ignore_eos",
    }  # fmt: skip
    assert {name: step[name] for name in untouched} == {name: body[name] for name in untouched}


@quick
@given(bodies)
def test_an_engine_that_takes_keys_is_asked_what_the_client_asks(body: dict[str, Any]) -> None:
    """So it refuses what the decode engine would."""
    step = two_step.prefill_body(body, key="ab")
    assert step["kv_transfer_params"].pop("prefill_key") == "ab"
    assert step.pop("kv_transfer_params") == two_step.KEEP_FOR_DECODE
    assert step.pop("stream") is False
    assert ("stream_options" in step) == ("stream_options" in body and not body.get("stream"))
    assert step.items() <= body.items()
    assert set(body) - set(step) <= {"stream", "stream_options"}


@quick
@given(bodies, st.dictionaries(awkward, json_values, max_size=4))
def test_decode_step_is_the_clients_request_and_the_unchanged_parameters(
    body: dict[str, Any], params: dict[str, Any]
) -> None:
    sent = json.loads(b"".join(encode(two_step.decode_body(body, params))))
    assert sent.pop("kv_transfer_params") == params
    assert sent == body


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, LocalPrefill.NOT_ONE_PROMPT),
        (COMPLETIONS, {"prompt": [[1], [2]]}, LocalPrefill.NOT_ONE_PROMPT),
        (COMPLETIONS, {"prompt": []}, LocalPrefill.NOT_ONE_PROMPT),
        (COMPLETIONS, {}, LocalPrefill.NOT_ONE_PROMPT),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AA=="}, LocalPrefill.NOT_ONE_PROMPT),
        (COMPLETIONS, {"prompt": "a", "n": 2}, LocalPrefill.SEVERAL_SAMPLES),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, LocalPrefill.SEVERAL_SAMPLES),
        (COMPLETIONS, {"prompt": "a", "n": "2"}, LocalPrefill.SEVERAL_SAMPLES),
        (CHAT, {"messages": [], "n": 4}, LocalPrefill.SEVERAL_SAMPLES),
        (CHAT, {"messages": [], "use_beam_search": True}, LocalPrefill.BEAM_SEARCH),
        (CHAT, {"messages": [], "prompt_logprobs": 0}, LocalPrefill.PROMPT_LOGPROBS),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, LocalPrefill.PROMPT_LOGPROBS),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -1}, LocalPrefill.TRUNCATION),
        (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}, LocalPrefill.NO_GENERATION),
        *((COMPLETIONS, {"prompt": p, "n": 1}, None) for p in ("a", [1, 2], ["a"], [[1, 2]], [7])),
        (CHAT, {"messages": [], "logprobs": True, "top_logprobs": 5}, None),
        (CHAT, {"messages": [], "echo": True, "logprobs": True}, None),
        (CHAT, {"messages": [], "n": None, "truncate_prompt_tokens": 8}, None),
    ],
)
def test_what_is_not_one_sequence_is_prefilled_by_the_decode_engine(
    endpoint: str, body: dict[str, Any], reason: str | None
) -> None:
    assert two_step.local_prefill_reason(endpoint, arrived(body)) == reason


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "Expecting value"),
        (b'{"prompt": ', "Expecting value"),
        (b"\xff\xfe{}", "Expecting value"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b"[" * 10_000, "recursion"),
        (b"[" * 100_000, "expected '{' at byte 0"),
        (b'{"stop": ' + b"[" * 300 + b"]" * 300 + b"}", "at most 256 deep"),
        (b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}", "at most 256 deep"),
        (b"{" + b", ".join(b'"%d": 1' % n for n in range(1001)) + b"}", "at most 1000 members"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"temperature": 1e999}', "1e999 is beyond what a number can hold"),
    ],
    ids=[
        *("empty", "cut", "not-utf8", "nan", "deep", "deeper", "deep member", "deep prompt"),
        *("many", "huge-int", "huge-float"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(raw: bytes, message: str) -> None:
    with pytest.raises((ValueError, RecursionError), match=message):
        run(members_of(raw))


events = st.lists(
    st.tuples(
        st.text(alphabet="ab:{} ", min_size=1).map(lambda text: b"data: " + text.encode()),
        st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    ).map(b"".join)
)


@quick
@given(events, st.binary(max_size=5), st.data())
def test_cutter_passes_whole_events_only_and_loses_nothing(
    whole: list[bytes], tail: bytes, data: st.DataObject
) -> None:
    tail = tail.replace(b"\n", b"").replace(b"\r", b"")
    stream = b"".join(whole) + tail
    cutter = EventCutter()
    passed = b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        passed += cutter.feed(stream[:size])
        stream = stream[size:]
        assert not passed or passed.endswith((b"\n\n", b"\r\n\r\n"))
    assert passed == b"".join(whole)
    assert cutter.rest() == tail


def test_cutter_holds_a_bounded_amount() -> None:
    cutter = EventCutter(max_held_bytes=10)
    assert cutter.feed(b"0123456789") == b""
    assert cutter.feed(b"0") == b"01234567890"
    assert cutter.rest() == b""


def _pool(*in_flight: int) -> EnginePool:
    pool = EnginePool("decode")
    for idx in range(len(in_flight)):
        pool.add(f"http://h:{idx + 1}")
    for engine, count in zip(pool.engines, in_flight, strict=True):
        engine.state.pass_check()
        engine.work.tokens = count
    return pool


def test_pick_goes_round_among_equals() -> None:
    pool = _pool(0, 0, 0)
    assert [least_work(pool) for _ in range(6)] == [(one, 0) for one in pool.engines] * 2


@quick
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=6), st.data())
def test_pick_takes_a_least_loaded_healthy_engine(
    engines: list[tuple[bool, int]], data: st.DataObject
) -> None:
    pool = _pool(*(count for _, count in engines))
    for engine, (healthy, _) in zip(pool.engines, engines, strict=True):
        engine.state.healthy = healthy
    exclude = data.draw(st.lists(st.sampled_from(pool.engines), max_size=2))
    usable = [engine for engine in pool.engines if engine.state.healthy and engine not in exclude]
    chosen = least_work(pool, exclude)
    if chosen is None:
        assert not usable
    else:
        assert chosen[0] in usable
        assert chosen[0].work.tokens == min(engine.work.tokens for engine in usable)


def test_two_failed_checks_in_a_row_make_an_engine_unhealthy() -> None:
    engine = Engine("prefill", "prefill0", "http://h:1")
    assert not engine.state.healthy
    for _ in range(2):
        engine.state.pass_check()
        failed_check(engine, fall=2, detail="once")
        assert engine.state.healthy
    engine.state.pass_check()
    failed_check(engine, fall=2, detail="once")
    assert engine.state.healthy
    failed_check(engine, fall=2, detail="twice")
    assert (engine.state.healthy, engine.state.detail) == (False, "twice")


def test_an_engine_under_suspicion_is_asked_last_until_a_check_clears_or_ends_it() -> None:
    pool = _pool(0, 100)
    suspect, busy = pool.engines
    suspect.state.suspect()
    assert (suspect.usable, least_work(pool)) == (True, (busy, 0))
    suspect.state.pass_check()
    assert least_work(pool) == (suspect, 0)
    suspect.state.suspect()
    failed_check(suspect, fall=2, detail="gone")
    assert (suspect.usable, suspect.state.detail) == (False, "gone")


def test_numbers_of_engines_are_used_again() -> None:
    pool = _pool(0, 0, 0)
    pool.remove(pool.engines[1])
    assert [engine.name for engine in pool.engines] == ["decode0", "decode2"]
    assert [pool.add(f"http://n:{idx}").name for idx in (1, 2)] == ["decode1", "decode3"]


P, D = ("http://h:1",), ("http://h:2",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": ("h:2",)}, "expected http://HOST:PORT"),
        ({"decode": ("ftp://h:2",)}, "expected http://HOST:PORT"),
        ({"decode": ("http://h:notaport",)}, "expected http://HOST:PORT"),
        ({"decode": ("http://h:99999",)}, "expected http://HOST:PORT"),
        ({"decode": ("http://user:secret@h:2",)}, "no query, fragment, user or password"),
        ({"decode": ("http://h:2", "http://H:2/")}, "decode engine given twice: http://h:2"),
        ({"decode": ("http://a..b:2",)}, "expected http://HOST:PORT"),
        ({"decode": (f"dns+http://{'x' * 64}:2",)}, "expected http://HOST:PORT"),
        ({"decode": P}, "give each engine one role"),
        ({"health_timeout_seconds": 0.0}, "health_timeout_seconds: expected a finite number"),
        ({"prefill_timeout_seconds": float("nan")}, "prefill_timeout_seconds: expected"),
        ({"drain_timeout_seconds": float("inf")}, "drain_timeout_seconds: expected"),
    ],
)
def test_configuration_refuses_what_cannot_work(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**{"prefill": P, "decode": D, **values})


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    proxy_cli.add_arguments(made)
    return made


def test_command_line_reaches_the_configuration(parser: argparse.ArgumentParser) -> None:
    engines = ["--prefill", "http://h:1/", "--prefill", "http://[::1]:2/base/"]
    engines += ["--decode", "http://h:3"]
    options = ["--port", "0", "--decode-timeout", "7.5", "--max-in-flight", "3"]
    args = parser.parse_args(engines + options)
    values = {name: value for name, value in vars(args).items() if name != "log_level"}
    config = ProxyConfig(**values)
    assert config.prefill == ("http://h:1", "http://[::1]:2/base")
    assert (config.host, config.port) == ("127.0.0.1", 0)
    assert (config.decode_timeout_seconds, config.max_in_flight) == (7.5, 3)
    assert config.health_timeout_seconds == ProxyConfig.health_timeout_seconds


@pytest.mark.parametrize("flag", proxy_cli.GONE)
@pytest.mark.parametrize("value", [[], ["4"]])
def test_an_option_that_is_gone_ends_the_command_with_what_to_use(
    parser: argparse.ArgumentParser, flag: str, value: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--port", "1", flag, *value])
    typed = " ".join([flag, *value])
    assert (
        capsys.readouterr().err == f"vllm-commext proxy: {typed} is gone: {proxy_cli.GONE[flag]}\n"
    )
