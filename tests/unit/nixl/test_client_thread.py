"""The client of side channels over time: what is done later, how long its thread sleeps, and how
that ends."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.nixl import test_client
from tests.unit.nixl.test_client import Asked, buggy, found
from vllm_commext.nixl.wire.client import CHECK_SECONDS, LOOK_SECONDS, ClientThread

BOUND_SECONDS = 20.0
asked = test_client.asked


def test_what_is_to_be_done_later_is_done_in_order_whatever_one_of_them_raises(
    asked: Asked,
) -> None:
    done: list[Any] = []
    asked.client.after(2.0, lambda: done.append("late"))
    asked.client.after(1.0, buggy)
    asked.client.after(1.0, lambda: done.append("early"))
    asked.client.after(0.0, lambda: asked.client.after(0.0, lambda: done.append("again")))
    for after, expected in ((0.0, ["again"]), (0.5, ["again"]), (0.5, ["again", "early"])):
        asked.poll(after=after)
        assert done == expected
    asked.client.close()
    asked.poll(after=5.0)
    assert done == ["again", "early"]


def test_how_long_a_thread_may_sleep(asked: Asked) -> None:
    registered: list[Any] = []
    poller: Any = SimpleNamespace(register=lambda *one: registered.append(one))
    asked.ask(seconds=5.0)
    assert asked.channel.wait_by(poller, asked.now) == 0.0  # it is still to be sent
    asked.poll()
    assert asked.channel.wait_by(poller, asked.now) == LOOK_SECONDS  # it is being connected to
    assert registered == []
    asked.connections[0].number = 0
    for passed, wait in ((0.0, CHECK_SECONDS), (4.95, 0.05)):
        assert asked.channel.wait_by(poller, asked.now + passed) == pytest.approx(wait)
    assert registered == [(asked.connections[0], 1)] * 2
    asked.ask()
    asked.poll(found(1))
    asked.channel._is_sent = False
    assert asked.channel.wait_by(poller, asked.now) == 0.0


def test_a_thread_does_what_it_is_told_in_order_and_ends() -> None:
    client, done = ClientThread(None), deque[Any]()
    client.call(buggy)
    for number in range(100):
        client.call(done.append, number)
    client.call(client.after, 0.02, lambda: done.append("later"))
    begun = time.monotonic()
    while len(done) < 101:
        assert time.monotonic() - begun < BOUND_SECONDS
        time.sleep(0.001)
    assert [*done] == [*range(100), "later"]
    assert client._thread is not None
    assert client._thread.daemon  # whatever it waits for, the process can end
    client.close()
    assert not client._thread.is_alive()
    client.call(done.append, "after its end")
    client.close()
    assert done[-1] == "later"
