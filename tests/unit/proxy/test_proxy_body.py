"""Large bodies: taken apart as json would, in short steps, and sent on as they came."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.request_bodies import arrived, awkward, json_values, run
from vllm_commext.proxy.errors_phases import LocalPrefill
from vllm_commext.proxy.http import json_members as body_module
from vllm_commext.proxy.http.endpoint_prompts import COMPLETIONS
from vllm_commext.proxy.http.json_members import (
    RawJson,
    compacted,
    decode,
    dumps,
    encode,
    members_of,
    num_tokens,
)
from vllm_commext.proxy.session import two_step_bodies as two_step

objects = st.dictionaries(awkward, json_values, max_size=5)


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small examples take the way of large bodies, in windows of a few bytes."""
    monkeypatch.setattr(body_module, "LARGE_BODY_BYTES", 0)
    monkeypatch.setattr(body_module, "MAX_DECODED_BYTES", 12)
    monkeypatch.setattr(body_module, "WINDOW_BYTES", 7)
    monkeypatch.setattr(body_module, "_COMPACTED_BYTES", 5)


def decoded(members: dict[str, Any]) -> dict[str, Any]:
    return {
        name: json.loads(bytes(value.text)) if isinstance(value, RawJson) else value
        for name, value in members.items()
    }


@pytest.mark.usefixtures("everything_is_large")
@given(objects, st.booleans(), st.sampled_from([None, 1]))
def test_the_members_are_those_that_json_finds(
    content: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    raw = json.dumps(content, ensure_ascii=ascii_only, indent=indent).encode()
    members, _ = run(members_of(bytearray(raw)))
    assert decoded(members) == content
    assert json.loads(b"".join(encode(members))) == content
    kept, _ = run(compacted(members))
    assert json.loads(b"".join(encode(kept))) == content
    for name, value in kept.items():
        dense = json.dumps(content[name], ensure_ascii=ascii_only, separators=(",", ":"))
        assert not isinstance(value, RawJson) or value.text == dense.encode()
    for name, value in members.items():
        if isinstance(value, RawJson) and isinstance(content[name], list):
            assert value.num_items == len(content[name])


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[1]", b'{"a": 1', b'{"a": "x', b'{"a": [1, {"b": "]"}', b'{"a" 1}', b'{a: 1}',
        b'{"a": 1} x', b'{"a": 1,}', b'{"a": }', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\"}',
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        run(members_of(raw))


@pytest.mark.usefixtures("everything_is_large")
def test_the_last_of_equal_names_counts_for_judgement_and_engine_alike() -> None:
    members, _ = run(members_of(b'{"n": 1, "prompt": "0123456789abcdef", "n": 2}'))
    assert members["n"] == 2
    assert json.loads(b"".join(encode(members)))["n"] == 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_every_encoding_that_the_engines_read_is_read(encoding: str) -> None:
    assert decode('{"prompt": "caf\u00e9"}'.encode(encoding)) == {"prompt": "caf\u00e9"}


@pytest.mark.parametrize("value", ["a\ud800", {"\udfff": [1 << 70, -0.0, 1e-7]}, ["\u2028"]])
def test_a_value_is_the_same_after_both_ways(value: Any) -> None:
    assert decode(json.dumps(value).encode()) == value
    assert json.loads(dumps(value)) == value


LONG = 1 << 20


@pytest.mark.parametrize(
    ("prompt", "tokens", "reason"),
    [
        ([7] * LONG, LONG, None),
        ([[7] * LONG], None, None),
        (["x" * LONG], None, None),
        ("x" * LONG, LONG // 4, None),
        (["x" * LONG, "y"], None, LocalPrefill.NOT_ONE_PROMPT),
        ([[7] * LONG, [7]], None, LocalPrefill.NOT_ONE_PROMPT),
    ],
    ids=["ids", "list of ids", "list of text", "text", "two texts", "two lists of ids"],
)
def test_a_long_prompt_stays_text_and_is_judged_all_the_same(
    prompt: Any, tokens: int | None, reason: str | None
) -> None:
    raw = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
    members, num_yields = run(members_of(raw))
    assert isinstance(members["prompt"], RawJson)
    assert members["max_tokens"] == 3
    assert num_yields >= len(raw) // body_module.WINDOW_BYTES - 1
    assert two_step.local_prefill_reason(COMPLETIONS, members) == reason
    assert tokens is None or num_tokens(members["prompt"]) == tokens
    sent = json.loads(b"".join(encode(two_step.prefill_body(members))))
    assert (sent["prompt"], sent["max_tokens"]) == (prompt, 1)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("12345", 2),
        ([1, 2, 3], 3),
        ([[1, 2, 3]], 3),
        ([{"role": "user", "content": "12345678"}], 10),
        (7, 0),
    ],
)
def test_tokens_are_counted_or_estimated(prompt: Any, tokens: int) -> None:
    assert num_tokens(arrived({"prompt": prompt})["prompt"]) == tokens


def test_a_short_prompt_is_not_worth_two_steps() -> None:
    body = arrived({"prompt": "x" * 80})
    assert two_step.local_prefill_reason(COMPLETIONS, body, 20) is None
    assert two_step.local_prefill_reason(COMPLETIONS, body, 21) == LocalPrefill.SHORT_PROMPT
