"""Prefill engines that configuration names are asked who they are before any request is.

An entry is a side channel's host and port.  The engine's id and size, and what its requests call
that address, come with the answer; its workers are then connected to as for a request, so that the
first one finds them ready.  An engine that starts later is asked again and again, in growing
intervals, for some ten minutes.
"""

import time
from collections.abc import Callable
from functools import partial

from vllm_commext.errors import CommextError
from vllm_commext.nixl.config import ConnectorConfig, parse_address
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, SideChannel, SideChannelClient
from vllm_commext.nixl.wire.description import WorkerDescription, open_description

BACK_OFF = BackOff()
MAX_FAILURES = 80
"""With the intervals of ``BACK_OFF`` some ten minutes: a large model takes as long to load."""


class Preconnect:
    """Side channels that have not answered yet.  Owned by one thread.

    Args:
        on_found: given the host and port of a side channel as the engine's requests will name them,
            the engine's incarnation and its first worker; once for each.
    """

    def __init__(
        self,
        client: SideChannelClient,
        config: ConnectorConfig,
        request: wire.DescribeRequest,
        on_found: Callable[[str, int, str, WorkerDescription], None],
    ) -> None:
        self._client = client
        self._seconds = config.handshake_timeout
        self._request = request
        self._on_found = on_found
        addresses = [parse_address(text) for text in dict.fromkeys(config.peers)]
        self._channels = {
            SideChannel(client, address, BACK_OFF) for address in addresses if address is not None
        }
        for channel in self._channels:
            self._ask(channel)

    def __len__(self) -> int:
        return len(self._channels)

    def _ask(self, channel: SideChannel) -> None:
        channel.ask(
            self._request,
            self._seconds,
            partial(self._note_reply, channel),
            partial(self._note_error, channel),
        )

    def _note_reply(self, channel: SideChannel, reply: wire.Described) -> None:
        first = open_description(reply)
        host, port = channel.address
        self._on_found(reply.host or host, reply.port or port, reply.incarnation, first)
        self._forget(channel)

    def _note_error(self, channel: SideChannel, error: CommextError) -> None:
        host, port = channel.address
        if channel.num_failures >= MAX_FAILURES:
            logger.warning(
                "peers: %s:%d has not answered %d times and is asked no more; its first request "
                "connects to it: %s",
                host,
                port,
                channel.num_failures,
                error,
            )
            self._forget(channel)
            return
        if channel.num_failures == 1:
            logger.info("peers: %s:%d does not answer yet, is asked again: %s", host, port, error)
        self._client.after(channel.retry_at - time.monotonic(), partial(self._ask, channel))

    def _forget(self, channel: SideChannel) -> None:
        channel.close()
        self._channels.discard(channel)
