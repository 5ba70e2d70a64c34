"""One asker of a side channel that a test drives step by step."""

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_commext.errors import CommextError
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, SideChannel, SideChannelClient

BOUND_SECONDS = 60.0


class Inquiry:
    """A question that has been asked, over a connection of its own."""

    def __init__(
        self, host: str, port: int, request: wire.AnyRequest, secret: bytes | None = None
    ) -> None:
        self._client = SideChannelClient(secret)
        self._came: deque[Any] = deque()
        self._news: deque[bool] = deque()
        told = self._news.append if isinstance(request, wire.DescribeRequest) else None
        self.channel = SideChannel(self._client, (host, port), BackOff(), on_draining=told)
        self.ask(request)

    def ask(self, request: wire.AnyRequest) -> None:
        """Ask, in the place of the question before."""
        add = self._came.append
        self.channel.ask(request, BOUND_SECONDS, add, add, replaces=True)
        self._look()

    def poll(self) -> Any:
        """The answer, None where there is none yet; raises what the client says of it."""
        self._look()
        came = self._came.popleft() if self._came else None
        if isinstance(came, CommextError):
            raise came
        return came

    def take_news(self) -> bool | None:
        self._look()
        return self._news.popleft() if self._news else None

    def is_connected(self) -> bool:
        self._look()
        return self.channel.is_open

    def wait(self) -> None:
        """Sleep until something comes, or it is time to look."""
        poller = select.poll()
        poller.poll(1000 * self.channel.wait_by(poller, time.monotonic()))

    def close(self) -> None:
        self.channel.close()

    def _look(self) -> None:
        self.channel.poll(time.monotonic())


def ask(host: str, port: int, request: wire.AnyRequest, secret: bytes | None = None) -> Any:
    """The answer to one question."""
    with contextlib.closing(Inquiry(host, port, request, secret)) as inquiry:
        return wait_for(inquiry.poll, inquiry.wait)


def wait_for(look: Callable[[], Any], wait: Callable[[], None] = lambda: time.sleep(0.0005)) -> Any:
    deadline = time.monotonic() + BOUND_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "nothing came in time"
        wait()
    return found
