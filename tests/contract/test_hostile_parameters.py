"""Whatever a client or a router puts into ``kv_transfer_params``, vLLM's engine loop goes on: each
request ends, and the next one has its own tokens."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request, RequestStatus

from tests.contract.scheduled_core import BLOCK, Core, next_token, request_of, turn_until
from tests.kit.examples import examples
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.params import OWN_FIELDS, TransferParams, params_of, write_params
from vllm_commext.nixl.wire.prompt import Prompt, digests

PROMPT = list(range(14))
OTHER_PROMPT = [9, *range(13)]
NUM_TURNS = 10
SECRET = b"0123456789abcdef"
KEY = "0123456789abcdef" * 2
ODD: list[Any] = [
    *("\ud800", "\udfff" * 9, "\0", "x" * 100_000, "127.0.0.1", "0" * 16, "f" * 64, "", KEY),
    *(2**64, -(2**64), 10**30, 1e308, float("inf"), float("nan"), -1, 0, 1, True, False, None),
    *([[[[[]]]]], [[-1]], [[2**70]], [{}], {}, {"tokens": "\ud800"}),
    [{"host": "\ud800", "port": 1}],
    [{"host": "127.0.0.1", "port": 1, "seal": "\udc00"}],
]
FIELDS = (
    *("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "remote_block_ids", "remote_num_tokens", "tp_size", "pp_size"),
    *("stream_key", "remote_place_seal", "reuse_from", "transfer_mode"),
    *OWN_FIELDS,
)
NAMES = st.sampled_from(FIELDS) | st.text(max_size=4)
ANYTHING = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=5)
LOST = st.sets(st.sampled_from(FIELDS), max_size=2)
SETTINGS = settings(
    examples(15),  # for each role, with a secret and without
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_number = count()


@pytest.fixture(params=["kv_producer", "kv_consumer", "kv_both"])
def role(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[None, SECRET], ids=["no secret", "a secret"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


@pytest.fixture
def core(make_core: Callable[..., Core], role: str, secret: bytes | None, tmp_path: Path) -> Core:
    file = tmp_path / "secret"
    if secret is not None:
        file.write_bytes(secret)
    more = {"side_channel_secret_file": str(file)} if secret is not None else {}
    return make_core(role, policy="recompute", reuse_blocks=True, **more)


def request_with(params: Any) -> Request:
    """A request whose parameters are whatever they are."""
    request = request_of(f"r{next(_number)}", PROMPT, {}, max_tokens=2)
    request.kv_transfer_params = params
    return request


def goes_through(core: Core, params: Any) -> None:
    """A request goes through every callback and is aborted where it has not ended; the next one is
    answered as if nothing had been."""
    request = request_with(params)
    core.add(request)
    for _ in range(NUM_TURNS):
        core.turn()
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    after = request_with(None)
    core.add(after)
    core.run(after.request_id)
    first = next_token(PROMPT)
    assert core.answer(after.request_id).tokens == [first, next_token([*PROMPT, first])]
    side: Any = core.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    assert side.prompts._states == {}
    turn_until(core, lambda: not (side.prompts.quarantine.has_loads or side._prefills._states))


def offered(secret: bytes | None) -> dict[str, Any]:
    """What a prefill engine returns for the prompt."""
    remote = RemoteRequest(
        engine_id="p",
        incarnation="start",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        request_id="r",
        block_ids=(tuple(range(1, 2 + len(PROMPT) // BLOCK)),),
        num_tokens=len(PROMPT),
        fence_slot=3,
        fence_nonce=5,
    )
    about = digests(Prompt(len(PROMPT), PROMPT), len(PROMPT))
    return write_params(TransferParams(remote, about, 7, "s greedy"), secret)


@SETTINGS
@given(params=ANYTHING)
@example(params="x")
@example(params=["do_remote_prefill"])
@example(params=7)
def test_any_value_instead_of_parameters(core: Core, params: Any) -> None:
    goes_through(core, params)


@SETTINGS
@given(changes=CHANGES, lost=LOST)
@example(changes={"remote_engine_id": "\ud800"}, lost=set())
@example(changes={"remote_sampling": "\ud800"}, lost=set())
@example(changes={"remote_num_tokens": 10**30}, lost=set())
def test_any_values_in_what_a_prefill_engine_returned(
    core: Core, secret: bytes | None, changes: dict[str, Any], lost: set[str]
) -> None:
    params = {**offered(secret), **changes}
    goes_through(core, {name: value for name, value in params.items() if name not in lost})


@SETTINGS
@given(changes=CHANGES, is_for_prefill=st.booleans())
@example(changes={"remote_host": "\ud800", "remote_port": 1}, is_for_prefill=False)
@example(changes={"reuse_from": [{"host": "\ud800", "port": 1}]}, is_for_prefill=True)
def test_any_values_in_what_a_router_asks(
    core: Core, changes: dict[str, Any], is_for_prefill: bool
) -> None:
    asks = {"do_remote_prefill": not is_for_prefill, "do_remote_decode": is_for_prefill}
    place = {"stream_key": KEY, "remote_host": "127.0.0.1", "remote_port": 1}
    goes_through(core, {**asks, **place, **changes})


def test_what_is_no_object_is_none_for_vllm_too(make_core: Callable[..., Core]) -> None:
    core = make_core("kv_consumer")
    request = request_with("x")
    core.add(request)
    assert request.kv_transfer_params is params_of(request) is None
    core.run(request.request_id)


def test_two_prompts_with_one_prompts_parameters(make_core: Callable[..., Core]) -> None:
    """As a router sends them that knows of no second prompt: one is loaded, one computed here."""
    core = make_core("kv_consumer")
    params = offered(None)
    mine, other = request_with(dict(params)), request_of("o", OTHER_PROMPT, params, max_tokens=1)
    core.add(mine)
    core.add(other)
    core.run(mine.request_id, "o")
    assert core.answer("o").tokens == [next_token(OTHER_PROMPT)]
    assert core.worker.computed["o"] == list(range(14))
    assert core.worker.computed[mine.request_id][0] == 13
    assert core.failures == {"request": 1}
