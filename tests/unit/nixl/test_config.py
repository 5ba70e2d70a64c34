"""``kv_connector_extra_config``: every key, good and bad."""

import dataclasses
import math
from typing import Any

import pytest

from vllm_commext.errors import ConfigError
from vllm_commext.nixl.config import GONE, KNOWN_KEYS, ConnectorConfig, parse_config
from vllm_commext.nixl.decode.reads import num_descriptors

SECONDS = (
    "kv_lease_duration",
    "kv_lease_max_duration",
    "handshake_timeout",
    "transfer_timeout",
    "stream_begin_timeout",
    "reuse_lookup_timeout",
)
FLAGS = (
    "enforce_handshake_compat",
    "host_copy",
    "transport_probe",
    "first_token_from_prefill",
    "stream_chunks",
    "reuse_blocks",
)

GOOD: list[tuple[str, Any, Any]] = [
    ("backends", ["UCX"], ("UCX",)),
    ("backend_params", {"split_batch_size": "64"}, {"split_batch_size": "64"}),
    ("backend_params", {"num_threads": "0"}, {"num_threads": "0"}),
    ("max_bytes_in_flight", 1 << 40, 1 << 40),
    *((key, value, value) for key in FLAGS for value in (False, True)),
    ("peers", ["p0:5600", "[fd00::7]:65535"], ("p0:5600", "[fd00::7]:65535")),
    ("side_channel_host", "10.0.0.7", "10.0.0.7"),
    *(("mapped_reads", value, value) for value in ("auto", "never")),
    *(("side_channel_secret_file", value, value) for value in ("", "/run/secrets/commext")),
    ("side_channel_port", 1, 1),
    ("side_channel_port", 65535, 65535),
    *((key, 3, 3.0) for key in SECONDS),
    *((key, 0.25, 0.25) for key in SECONDS),
]

BAD: list[tuple[str, Any]] = [
    *(("backends", value) for value in ("UCX", [], [1])),
    *(("backend_params", value) for value in (["a"], {"num_threads": "-1"}, {"num_threads": 4})),
    *(("max_bytes_in_flight", value) for value in (0, -1, 1.5, "4", True, None)),
    *((key, value) for key in FLAGS for value in (0, 1, "false", None)),
    *(("peers", value) for value in ("p0:5600", [5600])),
    *(("peers", ["p0:5600", value]) for value in ("p0", ":5600", "p0:0", "p0:65536", "p0:x")),
    *(("peers", [value]) for value in ("tcp://p0:5600", "p 0:5600", "[]:5600", "fd00::7:5600")),
    *(("mapped_reads", value) for value in ("always", "", True, False, 1, None, ["auto"])),
    *(("side_channel_host", value) for value in ("", 5, None, ["h"])),
    *(("side_channel_secret_file", value) for value in (5, None, ["f"])),
    *(("side_channel_port", value) for value in (0, 65536, -1, "5600", 1.0, True, None)),
    *(
        (key, value)
        for key in SECONDS
        for value in (0, -1, "30", None, True, math.nan, math.inf, -math.inf)
    ),
]


def parse(**extra: Any) -> ConnectorConfig:
    return parse_config(extra, default_host="here", default_port=5600)


def test_nothing_given_takes_the_defaults() -> None:
    assert parse() == ConnectorConfig(side_channel_host="here", side_channel_port=5600)


def test_every_key_is_tried_here() -> None:
    assert {key for key, *_ in GOOD} == {key for key, _ in BAD} == set(KNOWN_KEYS)
    assert set(KNOWN_KEYS) == {field.name for field in dataclasses.fields(ConnectorConfig)}


@pytest.mark.parametrize(("key", "given", "expected"), GOOD)
def test_a_good_value_is_taken_and_changes_nothing_else(
    key: str, given: Any, expected: Any
) -> None:
    config = parse(**{key: given})
    value = getattr(config, key)
    assert (value, type(value)) == (expected, type(expected))
    assert dataclasses.replace(config, **{key: getattr(parse(), key)}) == parse()


@pytest.mark.parametrize(("key", "given"), BAD)
def test_a_bad_value_is_refused_with_its_key_and_value(key: str, given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(**{key: given})
    assert repr(key) in str(raised.value)
    assert repr(given) in str(raised.value)
    assert "expected" in str(raised.value)


def test_unknown_keys_are_listed_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        parse(backend=["UCX"], kv_lease=3, kv_lease_duration=2)
    assert "['backend', 'kv_lease']" in str(raised.value)
    for key in KNOWN_KEYS:
        assert key in str(raised.value)


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_says_what_takes_its_place(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(**{key: True, "unheard_of": 1})
    assert str(raised.value) == f"kv_connector_extra_config[{key!r}] is gone: {GONE[key]}"


def test_a_bad_default_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="side_channel_port"):
        parse_config({}, default_host="here", default_port=0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4 * 1024),
        ({"backend_params": {"num_threads": "1"}}, 1024),
        ({"backend_params": {"num_threads": "0"}}, 0),
        ({"backends": ("GDS",)}, 0),
        ({"backend_params": {"num_threads": "3", "split_batch_size": "10"}}, 30),
        ({"backend_params": {"num_threads": "2", "split_batch_size": "0"}}, 2),
    ],
)
def test_every_worker_thread_of_nixl_gets_descriptors(
    settings: dict[str, Any], expected: int
) -> None:
    assert num_descriptors(ConnectorConfig("here", 5600, **settings)) == expected
