"""Real NIXL agents in one process with nothing to read: releases, and what is looked at."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import load_of, same, wait_until
from vllm_commext.nixl import transfer_thread
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.messages import Released

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]


@pytest.mark.parametrize("awaited", [True, False])
def test_a_full_hit_only_releases(make_engine: MakeEngine, awaited: bool) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    before = [row.copy() for row in decode.memory]
    prefill.thread.submit(Hold("mine", 60.0))
    decode.thread.submit(load_of("r", prefill.remote("mine", [1, 2]), [], 2, awaited=awaited))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})
    if awaited:
        decode.wait(lambda: decode.collect().received == {"r"})
    assert decode.collect().failed == set()
    assert decode.outcomes.received == ({"r"} if awaited else set())
    assert same(decode.memory, before)
    assert decode.recorded["transfer_seconds"] == []


def test_a_worker_that_only_holds_blocks_looks_for_releases_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends a hold at once, and looks at everything again when there is something to do."""
    monkeypatch.setattr(transfer_thread, "DUTY_WAIT_SECONDS", 3600.0)
    prefill, decode = make_engine("p", seed=1, serve=True), make_engine("d", seed=3)
    looks: list[float] = []
    poll = prefill.thread._loader.poll
    monkeypatch.setattr(
        prefill.thread._loader, "poll", lambda: (looks.append(prefill.thread._next_turn), poll())[1]
    )
    prefill.thread.submit(Hold("mine", 600.0))
    prefill.thread.submit(Hold("other", 600.0))
    wait_until(lambda: prefill.thread._next_turn > 0, "a look at what is held")
    num_looks = len(looks)
    name = decode.agent.add_peer(prefill.agent.metadata())
    decode.agent.connect(name)
    released = Released(request_id="mine", consumer="d/0", num_consumers=1)
    decode.agent.notify(name, wire.encode(released))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})
    assert len(looks) == num_looks
    prefill.thread.submit(Hold("more", 600.0))
    wait_until(lambda: len(looks) > num_looks, "a look after a command")
