"""Request parameters: written by prefill, carried by any router, read by decode."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.messages import PROTOCOL_VERSION
from vllm_commext.nixl.wire.params import (
    MAX_RANKS,
    MAX_SAMPLING_CHARACTERS,
    OWN_FIELDS,
    TransferParams,
    place_of_stream,
    places_for_reuse,
    read_params,
    write_params,
    write_place,
)

REMOTE = RemoteRequest(
    engine_id="p",
    incarnation="start-1",
    host="10.0.0.1",
    port=5600,
    tp_size=2,
    request_id="r1",
    block_ids=((5, 3, 9), (4,)),
    num_tokens=40,
    fence_slot=7,
    fence_nonce=0xFEDCBA9876543210,
)
PROMPT = {"tokens": "ab" * 32, "cache_salt": "0" * 64}
TRANSFER = TransferParams(REMOTE, PROMPT, 77, "0123 greedy", 1_764_000_000_000)
SECRET = b"0123456789abcdef"
REQUIRED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "tp_size",
    "pp_size",
    "remote_fence_slot",
)


@given(
    st.builds(
        RemoteRequest,
        engine_id=st.text(),
        incarnation=st.text(),
        host=st.text(),
        port=st.integers(1, 65535),
        tp_size=st.integers(1, 64),
        pp_size=st.sampled_from([1, 2, 16]),
        request_id=st.text(),
        block_ids=st.lists(
            st.lists(st.integers(0, 1 << 31), max_size=9).map(tuple), min_size=1, max_size=4
        ).map(tuple),
        num_tokens=st.integers(0, (1 << 31) - 1),
        fence_slot=st.integers(0, 65535),
        fence_nonce=st.integers(0, (1 << 64) - 1),
    ),
    st.sampled_from([None, SECRET]),
    st.sampled_from([(-1, ""), (0, "a greedy"), ((1 << 31) - 1, "a" * MAX_SAMPLING_CHARACTERS)]),
)
@settings(max_examples=60)
def test_round_trip_through_json(
    remote: RemoteRequest, secret: bytes | None, first: tuple[int, str]
) -> None:
    transfer_params = TransferParams(remote, PROMPT, *first)
    carried = json.loads(
        json.dumps(write_params(transfer_params, secret), allow_nan=False, sort_keys=True)
    )
    assert read_params(carried, secret) == transfer_params


def test_the_parameters_of_vllms_own_connector_are_refused_as_such() -> None:
    own = {key: value for key, value in write_params(TRANSFER).items() if key not in OWN_FIELDS}
    with pytest.raises(ProtocolError, match="no field of CommextNixlConnector"):
        read_params(own)


def test_no_field_of_ours_can_be_dropped_unnoticed() -> None:
    for name in OWN_FIELDS:
        params = write_params(TRANSFER, SECRET)
        del params[name]
        with pytest.raises(
            ProtocolError, match="altered|carry no proof|missing required|protocol 4, got"
        ):
            read_params(params, SECRET)


@pytest.mark.parametrize("version", [None, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_named_whatever_else_it_has(version: int | None) -> None:
    params = {**write_params(TRANSFER), "remote_protocol": version}
    del params["pp_size"]
    with pytest.raises(
        ProtocolError, match=f"remote_protocol {PROTOCOL_VERSION}, got {version}: install"
    ):
        read_params(params)


def test_a_proof_is_that_of_one_secret_and_of_all_values() -> None:
    sealed = write_params(TRANSFER, SECRET)
    with pytest.raises(ProtocolError, match="another secret"):
        read_params(sealed, b"f" * 16)
    with pytest.raises(ProtocolError, match="this decode engine has none"):
        read_params(sealed)
    with pytest.raises(ProtocolError, match="carry no proof"):
        read_params(write_params(TRANSFER), SECRET)
    other = write_params(
        TransferParams(replace(REMOTE, block_ids=((5, 3, 8), (4,))), PROMPT), SECRET
    )
    with pytest.raises(ProtocolError, match="altered"):
        read_params({**other, "remote_seal": sealed["remote_seal"]}, SECRET)
    assert SECRET.decode() not in json.dumps(sealed)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_or_empty_field_is_named(name: str) -> None:
    params = write_params(TRANSFER)
    del params[name]
    with pytest.raises(ProtocolError, match=name):
        read_params(params)
    with pytest.raises(ProtocolError, match=name):
        read_params({**params, name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_port", 0),
        ("remote_port", "http"),
        ("tp_size", MAX_RANKS + 1),
        ("pp_size", MAX_RANKS),
        ("remote_host", 5),
        ("remote_num_tokens", 1 << 80),
        ("remote_fence_slot", -1),
        ("remote_fence_slot", 1 << 63),
        *(("remote_fence_nonce", value) for value in ("", "old", -1, 7, "0" * 15, "F" * 16)),
        ("remote_block_ids", []),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [[1], [[2]]]),
        ("remote_block_ids", [[1]] * 1025),
        ("remote_protocol", "newest"),
        ("remote_prompt", None),
        ("remote_prompt", {}),
        ("remote_prompt", {"tokens": "AB" * 32}),
        ("remote_prompt", {"tokens": "ab" * 31}),
        ("remote_prompt", {"tokens": 5}),
        ("remote_prompt", {"lora": "ab" * 32}),
        ("remote_prompt", {"tokens": "ab" * 32, "language": "ab" * 32}),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=name):
        read_params({**write_params(TRANSFER), name: value})


def test_a_wrong_value_is_told_shortened() -> None:
    for name, value, told in (
        ("remote_port", 70_000, "`int` <= 65535 - at `$.remote_port`, got 70000"),
        ("remote_block_ids", [[1, "x" * 99]], f"[0][1]`, got [[1, '{'x' * 12}...{'x' * 13}']]"),
    ):
        with pytest.raises(ProtocolError, match=re.escape(f"{told}): send what the")):
            read_params({**write_params(TRANSFER), name: value})
    with pytest.raises(ProtocolError, match=r"host, port and seal, got \[7\]: Expected `object`"):
        places_for_reuse({"reuse_from": [7]})


def test_the_blocks_of_all_groups_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_commext.nixl.wire.params.MAX_BLOCKS", 5)
    most = {**write_params(TRANSFER), "remote_block_ids": [[1, 2, 3], [4, 5]]}
    assert read_params(most).remote.block_ids == ((1, 2, 3), (4, 5))
    with pytest.raises(ProtocolError, match="blocks in remote_block_ids from 0 to 5, got 6"):
        read_params({**most, "remote_block_ids": [[1, 2, 3], [4, 5, 6]]})


def test_an_id_that_no_cache_has_is_left_to_whoever_knows_the_cache() -> None:
    huge = {**write_params(TRANSFER), "remote_block_ids": [[-1, 1 << 80], [1 << 31]]}
    assert read_params(huge).remote.block_ids == ((-1, 1 << 80), (1 << 31,))
    with pytest.raises(ProtocolError, match="altered"):
        read_params({**huge, "remote_seal": "0" * 64}, SECRET)


def test_the_place_of_a_stream_is_read_as_it_was_written_and_proven() -> None:
    params = write_params(TRANSFER, SECRET, chunk_tokens=64)
    place = (TRANSFER.remote.host, TRANSFER.remote.port)
    assert place_of_stream(params, SECRET) == place
    assert place_of_stream(params) == place  # who has no secret checks nothing
    assert read_params(params, SECRET) == TRANSFER
    unsealed = write_params(TRANSFER, chunk_tokens=64)
    assert unsealed["remote_place_seal"] == ""
    assert place_of_stream(unsealed) == place
    for wrong in (
        {"remote_host": "p1"},
        {"remote_port": TRANSFER.remote.port + 1},
        {"remote_place_seal": write_place("p1", TRANSFER.remote.port, SECRET)["seal"]},
        {"remote_place_seal": params["remote_seal"]},
        {"remote_place_seal": "\ud800"},
        {"remote_place_seal": ["0" * 64]},
    ):
        with pytest.raises(ProtocolError, match="remote_place_seal to prove .*, got another proof"):
            place_of_stream({**params, **wrong}, SECRET)
    with pytest.raises(ProtocolError, match="another proof"):
        place_of_stream(params, b"f" * 16)
    # A router that knows nothing of the seal, or a prefill engine that has no secret.
    for missing in ({k: v for k, v in params.items() if k != "remote_place_seal"}, unsealed):
        with pytest.raises(ProtocolError, match="got no proof: let the router pass on"):
            place_of_stream(missing, SECRET)


_NASTY = st.text(alphabet=st.characters(), max_size=6) | st.sampled_from(
    ["half\ud800", "\udfff", "nul\0", "x" * 10_000, "1e999"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _NASTY | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NASTY, inner, max_size=3),
    max_leaves=6,
)
_NAMES = sorted({*write_params(TRANSFER, SECRET, chunk_tokens=9), "reuse_from"})


@pytest.mark.parametrize("secret", [None, SECRET])
@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4))
def test_any_value_reads_in_range_or_is_refused_with_our_error(
    secret: bytes | None, changes: dict[str, Any]
) -> None:
    params = {**write_params(TRANSFER, secret, chunk_tokens=9), **changes}
    for read in (read_params, place_of_stream, places_for_reuse):
        try:
            found = read(params, secret)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 the message must be one
        else:
            if isinstance(found, TransferParams):
                check_ranges(found.remote)


def check_ranges(remote: RemoteRequest) -> None:
    assert 0 <= remote.num_tokens < 1 << 31
    assert all(isinstance(block, int) for group in remote.block_ids for block in group)
    assert len(remote.block_ids) > 0
    assert 1 <= remote.tp_size <= MAX_RANKS
    assert 1 <= remote.port <= 65535
    assert remote.fence_slot >= 0
    assert 0 <= remote.fence_nonce < 1 << 64
